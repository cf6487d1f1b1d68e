"""The GPU that programs are compiled for, and the kernels for it that jax ships."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax

KERNELS = "jax.experimental.pallas.ops.gpu"
# A GPU that is described has no name, and is a Hopper (serve/planner/roofline/targets.py).
DESCRIBED = "NVIDIA H200"
HOPPER = ("H100", "H200", "H800", "H20")  # in the names of such devices


def gpu_name() -> str:
    """The name of the GPU that programs are compiled for, this machine's or one that is described; empty
    elsewhere."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return device.device_kind or DESCRIBED if device.platform in ("gpu", "cuda") else ""


def on_hopper() -> bool:
    return any(name in gpu_name() for name in HOPPER)


@cache
def compiles_for_gpus() -> bool:
    """True if jax has a compiler for NVIDIA GPUs; without one their kernels need not even be traced."""
    return any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


@cache
def shipped(name: str) -> Any:
    """The module of a kernel that jax ships; None where this jax does not, or cannot compile it, or lacks
    absl, which these modules import."""
    if not compiles_for_gpus():
        return None
    try:
        return import_module(f"{KERNELS}.{name}")
    except ImportError:
        return None
