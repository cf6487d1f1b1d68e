"""Dtype of a model's computation: that of the option, and for "auto" one that is fast on the device; and the
caches that a device can keep."""

from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ....checkpoints import huggingface, orbax
from ....cpu_kernels.library import load_library
from ....model.config import ModelConfig
from ....model.gpus import E4M3_CAPABILITY, Gpu, gpu_from_device
from ...options.engine import EngineOptions
from ...runtime.multihost.rendezvous import is_chosen_by_rank_0
from .bfloat16_gain import bfloat16_gain

MIN_BFLOAT16_GAIN = 1.1  # minimum speed of bfloat16 over float32 on a CPU; below it float32, which is exact
DTYPES = ("auto", "float32", "bfloat16", "float16")
SHORT_NAMES = {"half": "float16", "float": "float32"}
TOO_LARGE = "numbers of this model are too large for float16"


def normalise_dtype_name(dtype: Any) -> str:
    """Return one of DTYPES for its name (vLLM's "half" and "float" too), or for a dtype of numpy, jax or
    torch. Raises ValueError."""
    if isinstance(dtype, str) or str(dtype).startswith("torch."):
        name = str(dtype).removeprefix("torch.")
    else:
        try:
            name = jnp.dtype(dtype).name
        except TypeError:
            name = ""
    name = SHORT_NAMES.get(name, name)
    if name not in DTYPES:
        raise ValueError(f'dtype {dtype!r} is not allowed: "auto", "float32", "bfloat16" or "float16"')
    return name


def compute_dtype(
    dtype: Any, device: Any, config: ModelConfig, folder: Path | None = None, cpu_kernels: bool | None = None
) -> Any:
    """Return the dtype in which to load the weights of a folder; without a folder, of random weights.

    "auto" is the checkpoint's dtype, with exceptions. A GPU without bfloat16 products takes float16 for
    bfloat16. A model that overflows float16 takes bfloat16 for it. A CPU takes float32, which holds the
    numbers of every checkpoint. If they are bfloat16 and the processor multiplies that faster, it takes
    bfloat16: by `cpu_kernels`, or as a first start measures (`bfloat16_gain`). XLA uses no CPU's float16
    products. Random weights count as stored in bfloat16.

    Raises ValueError if the model overflows float16 and the device has no other dtype for it.
    """
    name = normalise_dtype_name(dtype)
    if name == "float16" and may_overflow_float16(config):
        raise ValueError(f'dtype "float16" is not allowed: {TOO_LARGE}; use "bfloat16" or "float32"')
    if name != "auto":
        return jnp.dtype(name)
    gpu = gpu_from_device(device)
    if device.platform != "cpu" and (gpu is None or gpu.auto_dtype == "bfloat16"):
        is_too_narrow = may_overflow_float16(config) and default_stored_dtype(folder) == jnp.float16
        return jnp.dtype("bfloat16") if is_too_narrow else "auto"
    stored = default_stored_dtype(folder)
    if gpu is not None:
        return dtype_without_bfloat16(gpu, config, stored)
    is_faster = stored == jnp.bfloat16 and (
        (cpu_kernels and load_library().has_bfloat16) or bfloat16_gain(device, config) >= MIN_BFLOAT16_GAIN
    )
    return jnp.dtype("bfloat16" if is_faster else "float32")


def default_stored_dtype(folder: Path | None) -> Any:
    """Return the dtype in which a folder stores weights; bfloat16 without a folder. Raises
    CheckpointError."""
    return jnp.dtype("bfloat16") if folder is None else checkpoint_dtype(folder)


def may_overflow_float16(config: ModelConfig) -> bool:
    """Return True for models with norms before and after each sublayer (Gemma 2 to 4, GLM-4-0414).

    Nothing bounds their residual stream, which may exceed float16.
    """
    return config.pre_norms and config.post_norms


def dtype_without_bfloat16(gpu: Gpu, config: ModelConfig, stored: Any) -> Any:
    """Return the dtype for a checkpoint on a GPU that multiplies no bfloat16.

    Raises ValueError for a 16-bit checkpoint of a model that overflows float16, and of the first Gemma, which
    scales embeddings by the square root of its width.
    """
    is_scaled = config.embedding_scale == config.hidden_size**0.5
    if stored in (jnp.bfloat16, jnp.float16) and (may_overflow_float16(config) or is_scaled):
        raise ValueError(
            f'dtype "auto" is not allowed on {gpu.name}: it multiplies no bfloat16, and {TOO_LARGE}; '
            'use "float32"'
        )
    return jnp.dtype(gpu.auto_dtype) if stored == jnp.bfloat16 else "auto"


def check_kv_cache_dtype(options: EngineOptions, device: Any) -> None:
    """Raise ValueError if the device cannot store a cache of `kv_cache_dtype`. XLA might abort the
    process."""
    gpu, kv_cache_dtype = gpu_from_device(device), options.kv_cache_dtype
    if gpu is not None and gpu.capability < E4M3_CAPABILITY and kv_cache_dtype in ("fp8", "fp8_e4m3"):
        raise ValueError(
            f'kv_cache_dtype "{kv_cache_dtype}" is not allowed: float8_e4m3fn needs compute capability 8.9, '
            f'{gpu.name} has {gpu.capability_text}; use "int8"'
        )


def agree_on_dtype(
    dtype: Any, device: Any, config: ModelConfig, folder: Path | None = None, cpu_kernels: bool | None = None
) -> Any:
    """Return `compute_dtype`, equal in all processes of a group: rank 0 decides if a measurement decides.

    All processes of the group have to call it.
    """
    if normalise_dtype_name(dtype) != "auto" or device.platform != "cpu":
        return compute_dtype(dtype, device, config, folder)
    chosen = partial(compute_dtype, dtype, device, config, folder, cpu_kernels)
    is_narrow = is_chosen_by_rank_0(lambda: chosen() == jnp.bfloat16)
    return jnp.dtype("bfloat16" if is_narrow else "float32")


def checkpoint_dtype(folder: Path) -> Any:
    """Return the dtype in which a folder stores weights. Raises CheckpointError."""
    return orbax.read_orbax_dtype(folder) if orbax.is_orbax(folder) else huggingface.read_hf_dtype(folder)
