"""Dtype of a model's computation: that of the option, and for "auto" one that is fast on the device."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ....checkpoints import huggingface, orbax
from ....model.config import ModelConfig
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


def compute_dtype(dtype: Any, device: Any, config: ModelConfig, folder: Path | None = None) -> Any:
    """The dtype to load the weights of a folder in, or random ones, which are as if stored in bfloat16.

    "auto" is the checkpoint's own. On CPUs it is float32, which holds every checkpoint's numbers, unless
    these are bfloat16 and the processor multiplies that faster, as a first start measures (`trial`): no CPU
    has a product of float16 that XLA uses.
    """
    name = dtype_name(dtype)
    if name != "auto":
        return jnp.dtype(name)
    if device.platform != "cpu":
        return "auto"
    is_own = folder is None or stored_dtype(folder) == jnp.bfloat16
    return jnp.dtype("bfloat16" if is_own and bfloat16_gain(device, config) >= LEAST_GAIN else "float32")


def shared_dtype(dtype: Any, device: Any, config: ModelConfig, folder: Path | None = None) -> Any:
    """The same in all processes of a group: where it is measured, rank 0's. A collective of all of them."""
    if dtype_name(dtype) != "auto" or device.platform != "cpu":
        return compute_dtype(dtype, device, config, folder)
    is_narrow = of_rank_0(lambda: compute_dtype(dtype, device, config, folder) == jnp.bfloat16)
    return jnp.dtype("bfloat16" if is_narrow else "float32")


def stored_dtype(folder: Path) -> Any:
    """The checkpoint's own dtype. Raises CheckpointError."""
    return (orbax if orbax.is_orbax(folder) else huggingface).stored_dtype(folder)
