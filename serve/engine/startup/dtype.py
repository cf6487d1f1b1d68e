"""Dtype of a model's computation: that of the option, and for "auto" one that is fast on the device; and the
caches that a device can keep."""

from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ....checkpoints import huggingface, orbax
from ....cpu_kernels.library import library
from ....model.config import ModelConfig
from ....model.gpus import E4M3, Gpu, gpu_of
from ...options.engine import EngineOptions
from ...runtime.multihost.rendezvous import of_rank_0
from .trial import bfloat16_gain

LEAST_GAIN = 1.1  # of bfloat16 on a host: below it float32 is chosen, which loses nothing
DTYPES = ("auto", "float32", "bfloat16", "float16")
SHORT_NAMES = {"half": "float16", "float": "float32"}


def dtype_name(dtype: Any) -> str:
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
    """The dtype to load the weights of a folder in, or random ones, which are as if stored in bfloat16.

    "auto" is the checkpoint's own; float16 in place of bfloat16 on GPUs that do not multiply that. On CPUs it
    is float32, which holds every checkpoint's numbers, unless these are bfloat16 and the processor multiplies
    that faster: by `cpu_kernels`, or as a first start measures (`trial`). No CPU has a product of float16
    that XLA uses.

    Raises ValueError for "auto" where the model overflows float16.
    """
    name = dtype_name(dtype)
    if name != "auto":
        return jnp.dtype(name)
    found = gpu_of(device)
    if device.platform != "cpu" and (found is None or found.auto_dtype == "bfloat16"):
        return "auto"
    is_own = folder is None or stored_dtype(folder) == jnp.bfloat16
    if found is not None:
        return narrow_dtype(found, config) if is_own else "auto"
    is_faster = is_own and (
        (cpu_kernels and library().multiplies_bfloat16) or bfloat16_gain(device, config) >= LEAST_GAIN
    )
    return jnp.dtype("bfloat16" if is_faster else "float32")


def narrow_dtype(found: Gpu, config: ModelConfig) -> Any:
    """The dtype in place of bfloat16. Raises ValueError for Gemma, which scales its embeddings by the root of
    the model's width: float16 does not hold the numbers of its layers."""
    if config.embedding_scale == config.hidden_size**0.5:
        raise ValueError(
            f'dtype "auto" is not allowed on {found.name}: it multiplies no bfloat16, and numbers of this '
            'model are too large for float16; use "float32"'
        )
    return jnp.dtype(found.auto_dtype)


def check_cache(options: EngineOptions, device: Any) -> None:
    """Raise ValueError if the device's compiler cannot keep the cache in the type of the options: XLA may
    abort the process on it."""
    found, kept = gpu_of(device), options.kv_cache_dtype
    if found is not None and found.capability < E4M3 and kept in ("fp8", "fp8_e4m3"):
        raise ValueError(
            f'kv_cache_dtype "{kept}" is not allowed: float8_e4m3fn needs compute capability 8.9, '
            f'{found.name} has {found.version}; use "int8"'
        )


def shared_dtype(
    dtype: Any, device: Any, config: ModelConfig, folder: Path | None = None, cpu_kernels: bool | None = None
) -> Any:
    """The same in all processes of a group: where it is measured, rank 0's. A collective of all of them."""
    if dtype_name(dtype) != "auto" or device.platform != "cpu":
        return compute_dtype(dtype, device, config, folder)
    chosen = partial(compute_dtype, dtype, device, config, folder, cpu_kernels)
    is_narrow = of_rank_0(lambda: chosen() == jnp.bfloat16)
    return jnp.dtype("bfloat16" if is_narrow else "float32")


def stored_dtype(folder: Path) -> Any:
    """The checkpoint's own dtype. Raises CheckpointError."""
    return (orbax if orbax.is_orbax(folder) else huggingface).stored_dtype(folder)
