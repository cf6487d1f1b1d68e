"""Facts that decide the bits of an engine's answers besides the requests, and cases in which they do not."""

from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from ....kvcache.stages import devices
from ....model.attention import FusedQKV
from ....model.tree import paths, unwrapped
from ....model.weights.cpu.packed import target_in
from ....model.weights.prepared import unprepared
from ...engine.core.engine import Engine
from ...host.devices import memory_limit
from ...options.engine import EngineOptions
from ...runtime import provenance
from ...runtime.compiled import executable_cache
from ...runtime.compiled.shapes import Canonical
from ...text.tokenizer.tokenizer import Tokenizer

# Options with which an engine runs the same requests with the same bits.
NEEDED = (
    "max_model_len", "kv_cache_dtype", "quantization", "batch_invariant_matmul", "cpu_kernels",
    "max_logprobs", "reproducible", "load_format", "hf_overrides", "max_num_seqs", "max_prefill_tokens",
    "page_size", "max_batched_token_mem", "enable_lora", "max_loras", "max_lora_rank", "lora_experts",
    "lora_modules",
)  # fmt: skip


def facts_of(engine: Engine, options: EngineOptions) -> dict[str, str]:
    """Return versions, device, settings, and how numbers are stored and multiplied. Another engine with the
    same facts and weights computes the same bits."""
    device = min(devices(engine.params), key=lambda d: d.id)
    canonical = Canonical.on(device.platform, options.on(memory_limit(device)), engine.sizes)
    products = engine.programs.products([s for s in canonical if s in engine.programs.steps])
    return {
        "duetto": version("duetto"),
        "source": executable_cache.source(),
        "platform": device.platform,
        **machine(device),
        "config": sha256(repr(engine.config.target).encode()).hexdigest(),
        "dtype": str(engine.params.embed.dtype),
        "kv_cache_dtype": options.kv_cache_dtype,
        "quantization": str(options.quantization),
        "fixed_products": str(options.batch_invariant_matmul),
        "cpu_kernels": str(target_in(engine.params)),
        "shapes": ", ".join(map(str, canonical)),
        **({} if products is None else {"products": products}),
        **({"logits_processors": repr(engine.sizes.processors)} if engine.sizes.processors else {}),
    }


def machine(device: Any) -> dict[str, str]:
    """Return the facts of a device, of installed versions and of their settings that decide bits."""
    return {**provenance.device(device), **provenance.versions(), **provenance.settings()}


def outside_contract(engine: Engine, options: EngineOptions) -> list[str]:
    """Return why the reproducibility contract does not cover an engine's answers; empty if it does."""
    found = []
    if not options.reproducible:
        found.append("reproducible is False")
    if options.guesses and options.speculation.acceptance == "rejection":
        found.append("speculation by rejection: what is drawn depends on the guesses")
    if len(devices(engine.params)) > 1:
        found.append("several devices")
    return found


def needed_options(options: EngineOptions) -> dict[str, Any]:
    return {name: vars(options)[name] for name in NEEDED}


def words_hash(tokenizer: Tokenizer | None) -> str | None:
    """Return a hash of the tokens' texts; None without a tokenizer."""
    if tokenizer is None:
        return None
    return sha256(repr(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def weights_hash(params: Any) -> str | None:
    """Return the SHA-256 of every parameter's name, shape, dtype and numbers as they were loaded; None if
    other processes hold a part of them."""
    found = hashed = sha256()
    params = unwrapped(params, FusedQKV, lambda x: replace(x, array=jax.device_get(x.array)))  # splits there
    for path, leaf in sorted(paths(unprepared(params)).items()):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return None
        numbers = np.ascontiguousarray(jax.device_get(leaf))
        hashed.update(f"{path} {numbers.dtype} {numbers.shape} ".encode())
        hashed.update(numbers.reshape(-1).view(np.uint8).data)
    return found.hexdigest()
