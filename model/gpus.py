"""The GPU or TPU that programs are compiled for, and the kernels that they may use there.

Rules are static where a compiler may abort the process on what it does not know, which nothing catches. What
they allow is checked on the device at a first start (serve/engine/startup/kernel_checks.py); programs are
traced `without` the kernels that fail there.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

KERNELS = "jax.experimental.pallas.ops.gpu"
TRITON = (8, 0)  # the least compute capability that Triton compiles for
HOPPER = (9, 0)  # the only one with the instructions that the Mosaic kernels are made of
E4M3 = (8, 9)  # the least with conversions of float8_e4m3fn
# Compute capabilities by a part of the name, of GPUs that are described and have only that.
CAPABILITIES = {
    "T4": (7, 5), "A100": (8, 0), "L4": (8, 9), "RTX 4090": (8, 9), "H100": (9, 0), "H200": (9, 0),
    "B200": (10, 0), "RTX 5090": (12, 0),
}  # fmt: skip
# Bytes of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, technical
# specifications); others have LEAST_SHARED.
SHARED = {
    (7, 5): 65_536,
    (8, 0): 166_912,
    (8, 7): 166_912,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
}
LEAST_SHARED = 101_376
# XLA's options that are not its defaults. Without a command buffer (CUDA graph) the host waits at each turn
# of a loop and at every conditional around it: XLA's own list, and loops. A product that is not split along
# its inner dimension (split-K) has the same bits for more numbers of rows, for 2 % of a step at most.
CAPTURED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
if jax.__version_info__ >= (0, 12):
    CAPTURED += ",COLLECTIVES_KERNEL"
OPTIONS = {"xla_gpu_enable_command_buffer": CAPTURED, "xla_gpu_experimental_force_split_k": "1"}
# cuBLAS splits sums all the same, of products with few rows, though not with 64 or fewer (on an H200). XLA's
# own kernels do not: a step of 256 rows of 8B takes 16 % longer with them.
SPLIT_BY_CUBLAS = range(65, 512)
WITHOUT_CUBLAS = {"xla_gpu_experimental_autotune_backends": "TRITON,NATIVE_EMITTER,BLOCK_LEVEL_EMITTER"}
# A GPU that is described without a name is a Hopper.
DESCRIBED = "NVIDIA H200"
REFUSED: ContextVar[frozenset[str]] = ContextVar("refused kernels", default=frozenset())


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU: its name and its compute capability."""

    name: str
    capability: tuple[int, int]

    @property
    def shared_memory(self) -> int:
        """Bytes that a block of threads may have."""
        return SHARED.get(self.capability, LEAST_SHARED)

    @property
    def version(self) -> str:
        return "{}.{}".format(*self.capability)

    @property
    def auto_dtype(self) -> str:
        """The 16-bit dtype that it multiplies fast."""
        return "bfloat16" if self.capability >= TRITON else "float16"

    def options(self, rows: int = 0) -> dict[str, str]:
        """Options of XLA's compiler for steps, except those that the user's XLA_FLAGS set; none if these name
        a file. Where products are cuBLAS's, merging those of one input would copy their weights side by side
        in each step.

        rows: of products whose sums must not depend on their number; 0 if they may.
        """
        given = os.environ.get("XLA_FLAGS", "").strip()
        if given and not given.startswith("-"):
            return {}
        own = WITHOUT_CUBLAS if rows in SPLIT_BY_CUBLAS else {}
        if self.capability < TRITON:
            own = {"xla_gpu_dot_merger_threshold_mb": "0"}
        return {
            name: value for name, value in (OPTIONS | own).items() if not re.search(rf"--{name}\b", given)
        }


class Kernel(NamedTuple):
    """A kernel by the name that reports show.

    backend: what compiles it: Triton, Mosaic GPU, or Mosaic for TPUs.
    replaced_by: what stands in, for messages.
    """

    name: str
    backend: Literal["triton", "mosaic", "tpu"]
    replaced_by: str


def gpu() -> Gpu | None:
    """The GPU that programs are compiled for, this machine's or one that is described; None elsewhere."""
    return gpu_of(target_device())


def target_device() -> Any:
    """The device that programs are compiled for, or its description."""
    here, described = jax.devices()[0], jax.sharding.get_abstract_mesh().abstract_device
    is_here = described is None or described.device_kind == here.device_kind  # it has no capability
    return here if is_here else described


def on_tpu() -> bool:
    """True if programs are compiled for a TPU."""
    return target_device().platform == "tpu"


def gpu_of(device: Any) -> Gpu | None:
    """The NVIDIA GPU that a device, or its description, is; None for another device."""
    if device.platform not in ("gpu", "cuda"):
        return None
    name, said = device.device_kind or DESCRIBED, getattr(device, "compute_capability", None)
    if said is None:
        return Gpu(name, next((found for part, found in CAPABILITIES.items() if part in name), TRITON))
    found = re.match(r"(\d+)\.(\d+)", str(said))  # AMD's begin with "gfx"
    return Gpu(name, (int(found[1]), int(found[2]))) if found else None


def may_use(kernel: Kernel) -> bool:
    """True if programs may use a kernel where they are compiled for; see `refusal`."""
    return refusal(kernel) is None


def refusal(kernel: Kernel, memory: int = 0, kept: Iterable[Any] = ()) -> str | None:
    """Return why programs may not use a kernel, or None.

    memory: bytes of shared memory that a block of it asks for.
    kept: dtypes that it converts.
    """
    if kernel.name in REFUSED.get():
        return "it did not pass its check on this device"
    if kernel.backend == "tpu":
        return None if on_tpu() else "it is a TPU's"
    device = gpu()
    if device is None or not compiles_for_gpus():
        return "no compiler for an NVIDIA GPU is here"
    has = f"{device.name} has {device.version}"
    if kernel.backend == "mosaic" and device.capability != HOPPER:
        return f"it needs compute capability 9.0, {has}"
    if device.capability < TRITON:
        return f"it needs compute capability 8.0, {has}"
    if device.capability < E4M3 and any(jnp.dtype(dtype) == jnp.float8_e4m3fn for dtype in kept):
        return f"float8_e4m3fn needs compute capability 8.9, {has}"
    if memory > device.shared_memory:
        return f"it needs {memory} bytes of shared memory a block, {device.name} has {device.shared_memory}"
    return None


@contextmanager
def without(kernels: Iterable[str]) -> Iterator[None]:
    """Trace programs of this block without the kernels of these names; threads have blocks of their own."""
    token = REFUSED.set(frozenset(kernels))
    try:
        yield
    finally:
        REFUSED.reset(token)


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
