"""Which device an engine runs on, on machines that can compile for accelerators which they do not have, and
what a host's processor can do; and what XLA is told before it looks for one."""

import os
import platform
import re
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

# Where a kernel shows the accelerators that jax's plugins drive: NVIDIA (also under WSL), TPU, AMD.
NVIDIA_FILES = ("nvidia[0-9]*", "dxg")
DEVICE_FILES = (*NVIDIA_FILES, "accel[0-9]*", "vfio/[0-9]*", "kfd")
# XLA's flags for NVIDIA GPUs that are not its defaults: what is captured in command buffers (CUDA graphs). A
# loop that is not makes the host wait at each turn, and so does every conditional around it.
GPU_FLAGS = {"xla_gpu_enable_command_buffer": "+WHILE"}

# Of a GPU's memory that jax takes at the start, unless the user has said; jax's own default is 0.75. The rest
# is the CUDA context's and its libraries'.
MEMORY_FRACTION = 0.95
MEMORY_SETTINGS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # one of the two at most


def default_device() -> Any:
    """The device that jax chooses; the CPU, without looking further, where only the plugins of
    `duetto[targets]` are. With an NVIDIA GPU, XLA is told GPU_FLAGS first.

    Those plugins compile for an accelerator that is not there (`duetto plan --target`), and complain at
    length when jax looks for one. A platform that the user chose (JAX_PLATFORMS) stays. Where nobody has
    asked jax for a device before, a GPU's memory is taken as duetto asks.
    """
    if not jax.config.values["jax_platforms"] and has_plugin() and not has_accelerator():
        jax.config.update("jax_platforms", "cpu")
    if exists(NVIDIA_FILES):
        set_gpu_flags()
        set_memory_fraction()
    return jax.local_devices()[0]


def has_plugin() -> bool:
    names = ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin")
    return any(find_spec(name) is not None for name in names)


def has_accelerator() -> bool:
    return exists(DEVICE_FILES)


def exists(files: Iterable[str]) -> bool:
    return any(True for pattern in files for _ in Path("/dev").glob(pattern))


def set_gpu_flags() -> None:
    """Add GPU_FLAGS to XLA_FLAGS, but none that the user has set; nothing once XLA has read them, which it
    does when jax first looks for devices."""
    given = os.environ.get("XLA_FLAGS", "")
    names_a_file = bool(given) and not given.lstrip().startswith("-")
    if is_started() or names_a_file:
        return
    ours = [f"--{name}={value}" for name, value in GPU_FLAGS.items() if not re.search(rf"--{name}\b", given)]
    os.environ["XLA_FLAGS"] = " ".join([*given.split(), *ours])


def set_memory_fraction() -> None:
    """Let jax take MEMORY_FRACTION of a GPU's memory, unless the user has said, or jax has taken it."""
    if not is_started() and not any(name in os.environ for name in MEMORY_SETTINGS):
        os.environ[MEMORY_SETTINGS[0]] = str(MEMORY_FRACTION)


def is_started() -> bool:
    """Whether jax has looked for devices."""
    bridge: Any = import_module("jax._src.xla_bridge")  # nothing public says so
    return bridge.backends_are_initialized()


@cache
def processor() -> str:
    """The host's processor, with its instruction sets where the system reports them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except (FileNotFoundError, PermissionError):  # another system, or a container that hides it
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def memory_limit(device: Any) -> int | None:
    """Bytes of an accelerator's memory; None for a host, and where the device does not say."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats.get("bytes_limit") if stats else None
