"""The GPU or TPU that programs are compiled for, and the kernels that they may use there.

Rules are static: a compiler may abort the process on a kernel that the device cannot run, and nothing catches
that. Kernels that the rules allow are checked on the device at a first start
(serve/engine/startup/kernel_checks.py). `disable_kernels` keeps kernels that fail out of traced programs.
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

JAX_KERNELS_PACKAGE = "jax.experimental.pallas.ops.gpu"
TRITON_CAPABILITY = (8, 0)  # the lowest compute capability that Triton compiles for
HOPPER_CAPABILITY = (9, 0)  # the only one with the instructions of the Mosaic kernels
E4M3_CAPABILITY = (8, 9)  # the lowest with conversions of float8_e4m3fn
# Compute capabilities by a part of the name, for described GPUs: they have only a name.
CAPABILITIES = {
    "T4": (7, 5), "A100": (8, 0), "L4": (8, 9), "RTX 4090": (8, 9), "H100": (9, 0), "H200": (9, 0),
    "B200": (10, 0), "RTX 5090": (12, 0),
}  # fmt: skip
# Bytes of shared memory that a block may have, by compute capability (CUDA C++ Programming Guide, technical
# specifications); others have MIN_SHARED_BYTES.
SHARED_BYTES = {
    (7, 5): 65_536,
    (8, 0): 166_912,
    (8, 7): 166_912,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
}
MIN_SHARED_BYTES = 101_376
# Options that differ from XLA's defaults. A command buffer (CUDA graph) takes XLA's own list, and loops.
# Without it the host waits in each iteration of a loop and at every conditional around it. Without split-K a
# product has the same bits for more numbers of rows. That costs 2 % of a step at most.
COMMAND_BUFFER_OPS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
if jax.__version_info__ >= (0, 12):
    COMMAND_BUFFER_OPS += ",COLLECTIVES_KERNEL"
XLA_GPU_OPTIONS = {
    "xla_gpu_enable_command_buffer": COMMAND_BUFFER_OPS,
    "xla_gpu_experimental_force_split_k": "1",
}
# Numbers of rows for which cuBLAS splits sums all the same (on an H200). XLA's own kernels do not, but a step
# of 256 rows of an 8B model takes 16 % longer with them.
CUBLAS_SPLIT_ROWS = range(65, 512)
NO_CUBLAS_OPTIONS = {"xla_gpu_experimental_autotune_backends": "TRITON,NATIVE_EMITTER,BLOCK_LEVEL_EMITTER"}
# A GPU that is described without a name is a Hopper.
DEFAULT_GPU_NAME = "NVIDIA H200"
DISABLED_KERNELS: ContextVar[frozenset[str]] = ContextVar("refused kernels", default=frozenset())


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU.

    name: the device kind, as "NVIDIA H200".
    capability: compute capability, major and minor.
    """

    name: str
    capability: tuple[int, int]

    @property
    def shared_memory(self) -> int:
        """Return the bytes of shared memory that a block of threads may use."""
        return SHARED_BYTES.get(self.capability, MIN_SHARED_BYTES)

    @property
    def capability_text(self) -> str:
        """Return the compute capability as text, such as "9.0"."""
        return "{}.{}".format(*self.capability)

    @property
    def auto_dtype(self) -> str:
        """Return the 16-bit dtype that the GPU multiplies fast."""
        return "bfloat16" if self.capability >= TRITON_CAPABILITY else "float16"

    def compiler_options(self, rows: int = 0, has_code_products: bool = False) -> dict[str, str]:
        """Return XLA compiler options for steps, without options that the user's XLA_FLAGS set.

        The options are empty if XLA_FLAGS name a file. Dot merging copies the weights of one input side by
        side in each step. It is off on GPUs whose products run in cuBLAS, and for products of codes, whose
        weights are small enough for it.

        rows: number of rows whose sums must not depend on that number; 0 if they may.
        has_code_products: True if steps multiply codes by codes.
        """
        user_flags = os.environ.get("XLA_FLAGS", "").strip()
        if user_flags and not user_flags.startswith("-"):
            return {}
        has_triton = self.capability >= TRITON_CAPABILITY
        options = NO_CUBLAS_OPTIONS if has_triton and rows in CUBLAS_SPLIT_ROWS else {}
        if has_code_products or not has_triton:
            options = options | {"xla_gpu_dot_merger_threshold_mb": "0"}
        return {
            name: value
            for name, value in (XLA_GPU_OPTIONS | options).items()
            if not re.search(rf"--{name}\b", user_flags)
        }


class Kernel(NamedTuple):
    """A kernel, by the name that reports show.

    name: name in reports.
    backend: its compiler: Triton, Mosaic GPU, or Mosaic for TPUs.
    fallback: description of its fallback, for messages.
    """

    name: str
    backend: Literal["triton", "mosaic", "tpu"]
    fallback: str


def target_gpu() -> Gpu | None:
    """Return the GPU that programs are compiled for, here or described. None if it is no NVIDIA GPU."""
    return gpu_from_device(target_device())


def target_device() -> Any:
    """Return the device that programs are compiled for, or its description."""
    local_device, described = jax.devices()[0], jax.sharding.get_abstract_mesh().abstract_device
    is_local = (
        described is None or described.device_kind == local_device.device_kind
    )  # which has no capability
    return local_device if is_local else described


def is_tpu_target() -> bool:
    """Return True if programs are compiled for a TPU."""
    return target_device().platform == "tpu"


def gpu_from_device(device: Any) -> Gpu | None:
    """Return the NVIDIA GPU of a device or of its description. None for another device."""
    if device.platform not in ("gpu", "cuda"):
        return None
    name, reported = device.device_kind or DEFAULT_GPU_NAME, getattr(device, "compute_capability", None)
    if reported is None:
        return Gpu(
            name,
            next(
                (capability for part, capability in CAPABILITIES.items() if part in name), TRITON_CAPABILITY
            ),
        )
    capability = re.match(r"(\d+)\.(\d+)", str(reported))  # AMD's begin with "gfx"
    return Gpu(name, (int(capability[1]), int(capability[2]))) if capability else None


def may_use_kernel(kernel: Kernel) -> bool:
    """Return True if programs may use a kernel where they are compiled for. See `refusal_reason`."""
    return refusal_reason(kernel) is None


def refusal_reason(kernel: Kernel, memory: int = 0, converted_dtypes: Iterable[Any] = ()) -> str | None:
    """Return why programs may not use a kernel, or None.

    memory: bytes of shared memory that a block of it needs.
    converted_dtypes: dtypes that it converts.
    """
    if kernel.name in DISABLED_KERNELS.get():
        return "it did not pass its check on this device"
    if kernel.backend == "tpu":
        return None if is_tpu_target() else "it is a TPU's"
    device = target_gpu()
    if device is None or not has_gpu_compiler():
        return "no compiler for an NVIDIA GPU is here"
    has = f"{device.name} has {device.capability_text}"
    if kernel.backend == "mosaic" and device.capability != HOPPER_CAPABILITY:
        return f"it needs compute capability 9.0, {has}"
    if device.capability < TRITON_CAPABILITY:
        return f"it needs compute capability 8.0, {has}"
    if device.capability < E4M3_CAPABILITY and any(
        jnp.dtype(dtype) == jnp.float8_e4m3fn for dtype in converted_dtypes
    ):
        return f"float8_e4m3fn needs compute capability 8.9, {has}"
    if memory > device.shared_memory:
        return f"it needs {memory} bytes of shared memory a block, {device.name} has {device.shared_memory}"
    return None


@contextmanager
def disable_kernels(kernels: Iterable[str]) -> Iterator[None]:
    """Trace programs of this block without the kernels of these names. Each thread has its own set."""
    token = DISABLED_KERNELS.set(frozenset(kernels))
    try:
        yield
    finally:
        DISABLED_KERNELS.reset(token)


@cache
def has_gpu_compiler() -> bool:
    """Return True if jax has a compiler for NVIDIA GPUs. Without one their kernels need not be traced."""
    return any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


@cache
def import_jax_kernel(name: str) -> Any:
    """Import the module of a kernel that jax ships.

    Returns None if this jax does not ship or cannot compile it, or if absl is missing, which these modules
    import.
    """
    if not has_gpu_compiler():
        return None
    try:
        return import_module(f"{JAX_KERNELS_PACKAGE}.{name}")
    except ImportError:
        return None
