"""Adapters that an engine serves, by name, read from their folders into the host's memory."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.sharding import NamedSharding

from ....checkpoints.adapters.adapter import Adapter, Reader
from ....checkpoints.families.family import Family
from ....lora.request import LoRARequest
from ....model.config import ModelConfig
from ....refusals import unknown
from ...host.progress import over, telling
from ...options.engine import EngineOptions
from ...options.lora import modules_of


@dataclass
class Registry:
    """Adapters that requests may name. Every method may be called from any thread.

    A running request keeps its adapter when another one is loaded under the same name, or it is unloaded.
    """

    reader: Reader
    _known: dict[str, tuple[LoRARequest, Adapter]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def of(self, wanted: LoRARequest | None) -> Adapter | None:
        """Return a request's adapter, read from its folder if the name is new or has another path. Raises
        CheckpointError."""
        if wanted is None:
            return None
        known = self._known.get(wanted.lora_name)
        if known is not None and known[0].lora_path == wanted.lora_path and not wanted.load_inplace:
            return known[1]
        return self.load(wanted)

    def load(self, wanted: LoRARequest) -> Adapter:
        """Read an adapter and serve it under its name from now on. Raises CheckpointError."""
        adapter = self.reader.read(Path(wanted.lora_path), wanted.lora_name)
        with self._lock:
            self._known[wanted.lora_name] = wanted, adapter
        return adapter

    def unload(self, name: str) -> None:
        """Raises ValueError for a name that is not known."""
        with self._lock:
            self.named(name)
            del self._known[name]

    def named(self, name: str) -> LoRARequest:
        """Return the request that loaded a name. Raises ValueError, with the known names."""
        known = self._known.get(name)
        if known is None:
            raise ValueError(unknown("adapter", name, self._known) if self._known else f"no adapter {name!r}")
        return known[0]

    def equal_to(self, digest: str) -> Adapter | None:
        """Return the adapter with a digest, given in hexadecimal digits, or None."""
        served = (adapter for _, adapter in list(self._known.values()))
        return next((adapter for adapter in served if adapter.digest.hex() == digest), None)

    def next_id(self) -> int:
        return 1 + max((request.lora_int_id for request, _ in self._known.values()), default=0)

    @property
    def requests(self) -> list[LoRARequest]:
        """In the order of their loading."""
        return [request for request, _ in list(self._known.values())]


def registry_of(options: EngineOptions, family: Family, config: ModelConfig, embed: Any) -> Registry | None:
    """The adapters of an engine's option `lora_modules`, and room for others; None where it serves none. They
    have the dtype and lie on the devices of the embedding. Raises CheckpointError."""
    if not options.enable_lora:
        return None
    sizes = options.tensor_parallel_size, options.data_parallel_size, options.pipeline_parallel_size
    has_mesh = max(sizes) > 1 or isinstance(embed.sharding, NamedSharding)
    reader = Reader(family, config, embed.dtype, options.max_lora_rank, has_mesh, options.lora_experts)
    registry = Registry(reader)
    with telling(options.use_tqdm_on_load):
        for request in over(modules_of(options.lora_modules), "reading adapters"):
            registry.load(request)
    return registry
