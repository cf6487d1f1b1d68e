"""From a folder, or from parameters at hand, to a warm engine."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ..checkpoints.huggingface import GenerationDefaults, generation_defaults, load
from ..model.config import ModelConfig
from ..model.transformer import Decoder
from ..model.tree import paths
from .classes import choose_classes
from .devices import default_device, memory_limit
from .engine import Engine
from .hostmemory import keep_freed
from .options import EngineOptions
from .programs import Programs
from .scheduler import Limits
from .shapes import table
from .sizing import choose_sizes

DEMO = Path(__file__).parent.parent / "checkpoints" / "demo"


def cache_home() -> Path:
    """Where compiled programs are kept: `duetto/xla` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "duetto" / "xla"


def keep_compiled(folder: str | Path | None = "auto") -> None:
    """Let jax keep compiled programs on disk, so that the second start of a model does not compile; None changes nothing.

    With "auto" a directory that the user gave to jax stays as it is.
    """
    if folder is None or (folder == "auto" and jax.config.jax_compilation_cache_dir):
        return
    chosen = cache_home() if folder == "auto" else Path(folder)
    jax.config.update("jax_compilation_cache_dir", str(chosen))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def compute_dtype(dtype: str, device: jax.Device) -> Any:
    """The dtype to load weights in. "auto" is the checkpoint's own, but float32 on CPUs, whose 16-bit products are slow."""
    if dtype == "auto":
        return "float32" if device.platform == "cpu" else "auto"
    if dtype not in ("float32", "bfloat16", "float16"):
        raise ValueError(f'dtype {dtype!r} is not allowed: "auto", "float32", "bfloat16" or "float16"')
    return jnp.dtype(dtype)


def load_folder(path: Path, dtype: str) -> tuple[ModelConfig, Decoder, GenerationDefaults]:
    """A model folder's configuration, parameters and generation defaults. Raises CheckpointError."""
    config, params = load(path, compute_dtype(dtype, default_device()))
    return config, params, generation_defaults(path)


def start_engine(config: ModelConfig, params: Decoder, options: EngineOptions) -> Engine:
    """Size, compile and warm up an engine for parameters that are on their device. Raises TypeError for others."""
    require_arrays(params)
    device = next(iter(params.embed.devices()))
    if device.platform == "cpu":
        keep_freed()
    sizes = choose_sizes(config, options, params.embed.dtype, memory_limit(device))
    longest_chunk = min(options.max_prefill_tokens, sizes.max_model_len)
    shapes = table(sizes.max_num_seqs, longest_chunk, options.decode_steps, options.reproducible)
    programs = Programs(config, params, sizes, shapes)
    classes, state = choose_classes(programs, programs.empty(params), options.reproducible)
    limits = Limits(
        max_num_seqs=sizes.max_num_seqs,
        max_prefill_tokens=options.max_prefill_tokens,
        chunk=max(s.tokens for s in classes.prefill),
        decode_steps=max(s.tokens for s in classes.decode),
    )
    return Engine(programs, classes, state, limits, options.enable_prefix_caching)


def require_arrays(params: Decoder) -> None:
    """Raise TypeError unless every parameter is on a device: others would be copied there in every step."""
    for path, leaf in paths(params).items():
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                f"parameter {path} is a {type(leaf).__name__}, expected a jax.Array: use jax.device_put"
            )
