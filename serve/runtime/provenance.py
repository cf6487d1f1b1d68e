"""Facts of a machine that decide the bits of an answer, besides the model and the request."""

import os
from functools import cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax

from ..host.devices import processor_flags, read_cpuinfo
from .compiled import executable_cache

# Packages whose versions decide which tokens a prompt has, and the bits that are computed from them.
RECORDED_PACKAGES = ("jax", "jaxlib", "tokenizers", "sentencepiece", "jinja2", "llguidance")
RECORDED_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_threefry_partitionable",
)


def device_facts(device: Any) -> dict[str, str]:
    """Return a device's facts by name: kind and runtime; for a CPU also processor and number of cores."""
    facts = {"device": device.device_kind, "runtime": " ".join(device.client.platform_version.split())}
    return facts | (
        {"cores": str(executable_cache.num_cores()), "processor": processor_name()}
        if device.platform == "cpu"
        else {}
    )


@cache
def processor_name() -> str:
    """Return the processor's name, and a hash of its instruction sets."""
    names = (line.partition(":")[2].strip() for line in read_cpuinfo() if line.startswith("model name"))
    return f"{next(names, 'unknown')} ({sha256(processor_flags().encode()).hexdigest()[:8]})"


def package_versions() -> dict[str, str]:
    """Return the installed versions of `RECORDED_PACKAGES`."""
    installed = {}
    for package in RECORDED_PACKAGES:
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def jax_settings() -> dict[str, str]:
    """Return the settings of jax and of its compiler, by name; without environment variables that are not
    set."""
    environment = {name: os.environ[name] for name in executable_cache.FLAG_VARIABLES if os.environ.get(name)}
    configured = {
        name: str(jax.config.values[name]) for name in RECORDED_SETTINGS if name in jax.config.values
    }
    return environment | configured
