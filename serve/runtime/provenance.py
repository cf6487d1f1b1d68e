"""Facts of a machine that decide the bits of an answer, besides the model and the request."""

import os
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from ..host.devices import processor
from .compiled import kept

# Whose versions decide which tokens a prompt has, and the bits of what is computed of them.
PACKAGES = ("jax", "jaxlib", "tokenizers", "sentencepiece", "jinja2", "llguidance")
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_threefry_partitionable",
)


def device(device: Any) -> dict[str, str]:
    """Return a device's facts: the runtime that drives it, and for a CPU its processor and cores."""
    found = {"device": device.device_kind, "runtime": " ".join(device.client.platform_version.split())}
    return found | (
        {"cores": str(kept.cores()), "processor": processor_name()} if device.platform == "cpu" else {}
    )


@cache
def processor_name() -> str:
    """Return the processor's name, and a hash of its instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except (FileNotFoundError, PermissionError):  # another system, or a container that hides it
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, 'unknown')} ({sha256(processor().encode()).hexdigest()[:8]})"


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def settings() -> dict[str, str]:
    """Return the settings of jax and of its compiler that are set."""
    environment = {name: os.environ[name] for name in ENVIRONMENT if os.environ.get(name)}
    chosen = {name: str(jax.config.values[name]) for name in SETTINGS if name in jax.config.values}
    return environment | chosen
