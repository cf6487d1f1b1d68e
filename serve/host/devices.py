"""Devices of this machine: the one that an engine runs on, its memory before it is chosen, the host's
processor, and the time of a device's work."""

import os
import platform
import time
from collections.abc import Callable, Iterable
from functools import cache
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

# Files in /dev of the accelerators that jax's plugins drive: NVIDIA (also under WSL), TPU, AMD.
NVIDIA_FILES = ("nvidia[0-9]*", "dxg")
DEVICE_FILES = (*NVIDIA_FILES, "accel[0-9]*", "vfio/[0-9]*", "kfd")
# Fraction of a GPU's memory that jax takes at the start; its own default is 0.75. The rest is for the CUDA
# context and its libraries.
MEMORY_FRACTION = 0.95
MEMORY_SETTINGS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # one of the two at most


def default_device() -> Any:
    """Return the device that jax chooses; the CPU at once if there are only the plugins of `duetto[targets]`.

    Those plugins compile for an accelerator that is not there (`duetto plan --target`), and log errors at
    length when jax looks for one. A platform that the user chose (JAX_PLATFORMS) stays. With an NVIDIA GPU,
    MEMORY_FRACTION is set first, unless jax has started. Raises RuntimeError if the chosen platform has no
    plugin.
    """
    if not jax.config.values["jax_platforms"] and has_accelerator_plugin() and not has_accelerator():
        jax.config.update("jax_platforms", "cpu")
    if exists_in_dev(NVIDIA_FILES):
        set_memory_fraction()
    try:
        return jax.local_devices()[0]
    except AssertionError:  # jax's only sign of a platform that no installed plugin serves
        chosen = jax.config.values["jax_platforms"]
        raise RuntimeError(
            f"jax finds no device of JAX_PLATFORMS={chosen}: install its plugin (for NVIDIA GPUs pip install "
            "'duetto[cuda]'), or unset JAX_PLATFORMS"
        ) from None


def has_accelerator_plugin() -> bool:
    names = ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin")
    return any(find_spec(name) is not None for name in names)


def has_accelerator() -> bool:
    return exists_in_dev(DEVICE_FILES)


def exists_in_dev(files: Iterable[str]) -> bool:
    """Return True if /dev has a file of one of these patterns."""
    return any(True for pattern in files for _ in Path("/dev").glob(pattern))


def set_memory_fraction() -> None:
    """Let jax take MEMORY_FRACTION of a GPU's memory, unless the user has set a fraction or jax has
    started."""
    if not is_jax_initialized() and not any(name in os.environ for name in MEMORY_SETTINGS):
        os.environ[MEMORY_SETTINGS[0]] = str(MEMORY_FRACTION)


def is_jax_initialized() -> bool:
    """Return True if jax has looked for devices."""
    bridge: Any = import_module("jax._src.xla_bridge")  # jax has no public name for it
    return bridge.backends_are_initialized()


@cache
def processor_flags() -> str:
    """Return the line of the host's instruction sets; the processor's name if the system reports none."""
    flags = (line for line in read_cpuinfo() if line.startswith(("flags", "Features")))
    return next(flags, platform.processor())


@cache
def processor_name() -> str:
    """Return the processor's name, and a hash of its instruction sets."""
    names = (line.partition(":")[2].strip() for line in read_cpuinfo() if line.startswith("model name"))
    return f"{next(names, 'unknown')} ({sha256(processor_flags().encode()).hexdigest()[:8]})"


def num_cores() -> int | None:
    """Return the number of cores that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def read_cpuinfo() -> list[str]:
    """Return the lines in which the system describes its processors, if it does."""
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except (FileNotFoundError, PermissionError):  # another system, or a container that hides it
        return []


def memory_limit(device: Any) -> int | None:
    """Return the bytes of an accelerator's memory; None for a host, and for a device that reports none."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats.get("bytes_limit") if stats else None


def time_calls(call: Callable[[], Any], times: int) -> list[float]:
    """Return the seconds of each of `times` calls, each until its result is computed."""
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - begin)
    return seconds
