"""The GPU that programs are compiled for."""

import jax

HOPPER = ("H100", "H200", "H800", "H20")  # in the names of such devices


def gpu_name() -> str:
    """The name of the GPU that programs are compiled for, this machine's or one that is described; empty
    elsewhere."""
    device = jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    return device.device_kind if device.platform in ("gpu", "cuda") else ""


def on_hopper() -> bool:
    """Whether programs are compiled for a Hopper GPU."""
    return any(name in gpu_name() for name in HOPPER)
