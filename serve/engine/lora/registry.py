"""Adapters that an engine serves, by name, read from their folders into the host's memory."""

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.sharding import NamedSharding

from ....checkpoints.adapters.adapter import Adapter, AdapterReader
from ....checkpoints.families.family import Family
from ....lora.request import LoRARequest
from ....model.config import ModelConfig
from ....refusals import unknown_name_message
from ...host.progress import progress_enabled, track_items
from ...options.engine import EngineOptions
from ...options.lora import parse_lora_modules


@dataclass
class AdapterRegistry:
    """Adapters that requests may name. Every method may be called from any thread.

    A running request keeps its adapter when another one is loaded under the same name, or it is unloaded.
    """

    reader: AdapterReader
    _adapters_by_name: dict[str, tuple[LoRARequest, Adapter]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get_or_load_adapter(self, lora_request: LoRARequest | None) -> Adapter | None:
        """Return a request's adapter, read from its folder if the name is new or has another path. Raises
        CheckpointError."""
        if lora_request is None:
            return None
        known = self._adapters_by_name.get(lora_request.lora_name)
        if (
            known is not None
            and known[0].lora_path == lora_request.lora_path
            and not lora_request.load_inplace
        ):
            return known[1]
        return self.load(lora_request)

    def load(self, lora_request: LoRARequest) -> Adapter:
        """Read an adapter and serve it under its name from now on. Raises CheckpointError."""
        adapter = self.reader.read(Path(lora_request.lora_path), lora_request.lora_name)
        with self._lock:
            self._adapters_by_name[lora_request.lora_name] = lora_request, adapter
        return adapter

    def unload(self, name: str) -> None:
        """Forget the adapter of a name. Raises ValueError for a name that is not known."""
        with self._lock:
            self.get_request(name)
            del self._adapters_by_name[name]

    def get_request(self, name: str) -> LoRARequest:
        """Return the request that loaded the adapter of a name. Raises ValueError, with the known names."""
        known = self._adapters_by_name.get(name)
        if known is None:
            raise ValueError(
                unknown_name_message("adapter", name, self._adapters_by_name)
                if self._adapters_by_name
                else f"no adapter {name!r}"
            )
        return known[0]

    def find_by_digest(self, digest: str) -> Adapter | None:
        """Return the adapter with a digest, given in hexadecimal digits, or None."""
        served = (adapter for _, adapter in list(self._adapters_by_name.values()))
        return next((adapter for adapter in served if adapter.digest.hex() == digest), None)

    def next_id(self) -> int:
        """Return an adapter id that no request has: the largest plus 1."""
        return 1 + max((request.lora_int_id for request, _ in self._adapters_by_name.values()), default=0)

    @property
    def requests(self) -> list[LoRARequest]:
        """Requests that loaded the adapters, in the order of loading."""
        return [request for request, _ in list(self._adapters_by_name.values())]


def make_adapter_registry(
    options: EngineOptions, family: Family, config: ModelConfig, embed: Any
) -> AdapterRegistry | None:
    """Return the registry with the adapters of the option `lora_modules`; None if adapters are not enabled.

    Adapters have the embedding's dtype. Raises CheckpointError.
    """
    if not options.enable_lora:
        return None
    sizes = options.tensor_parallel_size, options.data_parallel_size, options.pipeline_parallel_size
    has_mesh = max(sizes) > 1 or isinstance(embed.sharding, NamedSharding)
    reader = AdapterReader(family, config, embed.dtype, options.max_lora_rank, has_mesh, options.lora_experts)
    registry = AdapterRegistry(reader)
    with progress_enabled(options.use_tqdm_on_load):
        for request in track_items(parse_lora_modules(options.lora_modules), "reading adapters"):
            registry.load(request)
    return registry
