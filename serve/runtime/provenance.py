"""Facts of a machine that decide the bits of an answer, besides the model and the request."""

import os
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from ..host.devices import cpuinfo, processor
from .compiled import executable_cache

# Whose versions decide which tokens a prompt has, and the bits of what is computed of them.
PACKAGES = ("jax", "jaxlib", "tokenizers", "sentencepiece", "jinja2", "llguidance")
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
        {"cores": str(executable_cache.cores()), "processor": processor_name()}
        if device.platform == "cpu"
        else {}
    )


@cache
def processor_name() -> str:
    """Return the processor's name, and a hash of its instruction sets."""
    names = (line.partition(":")[2].strip() for line in cpuinfo() if line.startswith("model name"))
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
    environment = {name: os.environ[name] for name in executable_cache.FLAGS if os.environ.get(name)}
    chosen = {name: str(jax.config.values[name]) for name in SETTINGS if name in jax.config.values}
    return environment | chosen
