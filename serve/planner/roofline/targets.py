"""Accelerators that are not there: XLA compiles for a description of a device, and its memory plan and copies
are exact.

It does not predict how long a program takes; the peaks are the vendors' (dense products, no sparsity).
"""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from ....model.gpus import Gpu, gpu_from_device, target_gpu
from ...host.devices import (
    MEMORY_FRACTION,
    default_device,
    has_accelerator,
    memory_limit,
    time_calls,
)


class TargetError(ValueError):
    """A target that is unknown, or cannot be compiled for."""


class MissingCompiler(TargetError):
    """The packages that compile for a target are not installed."""


@dataclass(frozen=True)
class Peaks:
    """Peak rates of one device.

    flops16, flops32: FLOP/s in 16 and in 32 bits.
    bandwidth: bytes/s of its memory.
    link: bytes/s of its links.
    memory: bytes.
    host: bytes/s between the device and the host's memory, 0 if unknown.
    """

    flops16: float
    flops32: float
    bandwidth: float
    link: float
    memory: int
    host: float = 0.0

    def flops(self, dtype: Any) -> float:
        """Return the FLOP/s of matrix products of a dtype. Products in 32 bits are exact: without tensor
        cores, or in six passes of bfloat16."""
        return self.flops32 if jax.numpy.dtype(dtype).itemsize >= 4 else self.flops16


@dataclass(frozen=True)
class Target:
    """Devices that programs are compiled for.

    devices: of jax, or descriptions of absent ones.
    peaks: rates of each device, if known.
    memory: bytes of each device, if known; None for a host.
    kind: key of GPUS of an absent GPU, else "".
    """

    name: str
    devices: tuple[Any, ...]
    peaks: Peaks | None
    memory: int | None
    kind: str = ""


PCIE, PCIE4, PCIE3 = 64e9, 32e9, 16e9  # bytes/s of 16 lanes of PCIe 5.0, 4.0 and 3.0, one way
NVME = 7e9  # bytes/s read from a drive on four lanes of PCIe 4.0
GPUS = {
    "h100": Peaks(989e12, 67e12, 3.35e12, 450e9, 85_000_000_000, PCIE),
    "h200": Peaks(989e12, 67e12, 4.8e12, 450e9, 150_000_000_000, PCIE),
    "b200": Peaks(2250e12, 75e12, 7.672e12, 900e9, 191_514_411_008, PCIE),
    "a100": Peaks(312e12, 19.5e12, 2.039e12, 300e9, 85_000_000_000, PCIE4),
    "l4": Peaks(121e12, 30.3e12, 300e9, PCIE4, 23_696_000_000, PCIE4),
    "t4": Peaks(65e12, 8.1e12, 320e9, PCIE3, 15_655_829_504, PCIE3),
    "rtx4090": Peaks(165e12, 82.6e12, 1.008e12, PCIE4, 25_250_000_000, PCIE4),
    "rtx5090": Peaks(209e12, 104.8e12, 1.792e12, PCIE, 34_190_000_000, PCIE),
}
TPUS = {
    "v5e": Peaks(197e12, 197e12 / 6, 0.82e12, 200e9, 16 << 30),
    "v5p": Peaks(459e12, 459e12 / 6, 2.77e12, 600e9, 95 << 30),
    "v6e": Peaks(918e12, 918e12 / 6, 1.64e12, 448e9, 32 << 30),
    "tpu7x": Peaks(1153e12, 1153e12 / 6, 3.69e12, 300e9, 96 << 30),  # half of a chip
}
# Examples of slices; 1x1 is one chip.
SLICE_EXAMPLES = {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x4", "tpu7x": "2x2x1"}
DEVICES_PER_CHIP = {"tpu7x": 2}  # devices of a chip, if more than one


@dataclass(frozen=True)
class Chip:
    """Description of a GPU besides its peaks.

    kind: name, as the driver reports it.
    cores: number of multiprocessors.
    threads, lanes: threads and float32 lanes of each multiprocessor.
    cache: bytes of the second-level cache.
    clock: GHz.
    """

    kind: str
    cores: int
    threads: int
    lanes: int
    cache: int
    clock: float

    @property
    def gpu(self) -> Gpu:
        known_gpu = gpu_from_device(AbstractDevice(self.kind, self.cores, "gpu"))
        assert known_gpu is not None
        return known_gpu


CHIPS = {
    "h100": Chip("NVIDIA H100 80GB HBM3", 132, 2048, 128, 50 << 20, 1.98),
    "h200": Chip("NVIDIA H200", 132, 2048, 128, 60 << 20, 1.98),
    "b200": Chip("NVIDIA B200", 148, 2048, 128, 132_644_864, 1.965),
    "a100": Chip("NVIDIA A100-SXM4-80GB", 108, 2048, 64, 40 << 20, 1.41),
    "l4": Chip("NVIDIA L4", 58, 1536, 128, 48 << 20, 2.04),
    "t4": Chip("Tesla T4", 40, 1024, 64, 4 << 20, 1.59),
    "rtx4090": Chip("NVIDIA GeForce RTX 4090", 128, 1536, 128, 72 << 20, 2.52),
    "rtx5090": Chip("NVIDIA GeForce RTX 5090", 170, 1536, 128, 96 << 20, 2.41),
}
# XLA's description of a GPU (its GpuTargetConfigProto, as text). Without the versions XLA takes it for one
# that cannot capture conditionals, loops and library calls in command buffers.
GPU_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: {threads}
  shared_memory_per_block: 49152 shared_memory_per_core: {shared} shared_memory_per_block_optin: {block}
  core_count: {cores} fpus_per_core: {lanes} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock} device_memory_size: {memory}
  cuda_compute_capability {{ {capability} }}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA" device_description_str: "{kind}"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
"""
# Variables for a machine without a TPU. With them libtpu neither asks the cloud's metadata server nor locks
# the TPU for one process.
ABSENT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
TARGET_KINDS = {
    "H100": "h100", "H200": "h200", "B200": "b200", "A100-SXM4-80GB": "a100", "NVIDIA L4": "l4",
    "Tesla T4": "t4", "RTX 4090": "rtx4090", "RTX 5090": "rtx5090", "TPU v5 lite": "v5e", "TPU v5": "v5p",
    "TPU v6 lite": "v6e", "TPU7x": "tpu7x",
}  # fmt: skip


def find_target(name: str) -> Target:
    """Return the devices of `h200`, `8xh200` (8 GPUs of one host) or `v6e:2x4` (a TPU slice).

    Raises TargetError for another name, and if the compiler for it is not installed.
    """
    gpu = re.fullmatch(r"(?:(\d+)x)?(\w+)", name)
    # jax looks for devices before it describes others, and must not look for those that are absent
    default_device()
    if gpu and gpu[2] in GPUS:
        return describe_gpus(name, gpu[2], int(gpu[1] or 1))
    kind = name.partition(":")[0]
    if kind in TPUS and re.fullmatch(r"\w+:\d+(x\d+)+", name):
        return describe_tpus(name, kind)
    tpus = ", ".join(f"{kind}:{slice}" for kind, slice in SLICE_EXAMPLES.items())
    raise TargetError(
        f"target {name!r} is unknown: {', '.join(GPUS)}, 8xh200 and the like, or a slice such as {tpus}"
    )


@dataclass(frozen=True)
class TargetFacts:
    """Facts of a target that are known without its compiler.

    platform: "gpu" or "tpu".
    count: number of devices.
    memory: bytes that jax takes of each device.
    """

    name: str
    platform: str
    count: int
    peaks: Peaks
    memory: int


def target_facts(name: str) -> TargetFacts:
    """Return the facts of `h200`, `8xh200`, `v6e`, `8xv6e` or `v6e:2x4`. Raises TargetError for others."""
    match = re.fullmatch(r"(?:(\d+)x)?(\w+)(?::(\d+(?:x\d+)+))?", name)
    kind = match[2] if match else ""
    count = prod(map(int, (match[1] or match[3] or "1").split("x"))) if match else 0
    if match and count and kind in GPUS and not match[3]:
        peaks = GPUS[kind]
        return TargetFacts(name, "gpu", count, peaks, int(peaks.memory * MEMORY_FRACTION))
    if match and count and kind in TPUS and not (match[1] and match[3]):
        count *= DEVICES_PER_CHIP.get(kind, 1) if match[3] else 1
        return TargetFacts(name, "tpu", count, TPUS[kind], TPUS[kind].memory)
    kinds = ", ".join((*GPUS, *TPUS))
    raise TargetError(f"target {name!r} is unknown: one of {kinds}, 8xh200 and the like, or v6e:2x4")


def local_target(measure: bool = False) -> Target:
    """Return the device that programs run on by default. Its peaks are measured, or known for the kinds
    above."""
    device = default_device()
    kind = next(
        (ours for theirs, ours in TARGET_KINDS.items() if re.search(rf"{theirs}(?!\d)", device.device_kind)),
        None,
    )
    peaks = measure_peaks() if measure else {**GPUS, **TPUS}.get(kind or "")
    return Target(device.device_kind, (device,), peaks, memory_limit(device))


def compiler_options(target: Target) -> dict[str, str]:
    """Return the options of XLA's compiler for a target's steps."""
    known_gpu = gpu_from_device(first_device(target))
    return known_gpu.compiler_options() if known_gpu else {}


@contextmanager
def target_lowering(target: Target) -> Iterator[None]:
    """Lower kernels for a target's GPU or TPU while this is entered. Else jax would ask the machine's own
    device what it is. Warnings that compiling for an absent device brings are ignored."""
    with warnings.catch_warnings(), abstract_device_mesh(target):
        # jax stores what it compiled for an absent device, and cannot read it back.
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        yield


def abstract_device_mesh(target: Target) -> AbstractContextManager[Any]:
    """Return a context in which kernels see an absent device's description; for a present one it does
    nothing."""
    device = first_device(target)
    if device.platform == "tpu":
        device = AbstractDevice(device.device_kind, device.num_cores, "tpu")
    if not isinstance(device, AbstractDevice):
        return nullcontext()
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def first_device(target: Target) -> Any:
    """Return a target's first device. For an absent GPU return a description with its name, which
    `gpu_from_device` reads."""
    if not target.kind:
        return target.devices[0]
    return AbstractDevice(CHIPS[target.kind].kind, CHIPS[target.kind].cores, "gpu")


def describe_gpus(name: str, kind: str, count: int) -> Target:
    """Describe absent GPUs of one host. Raises MissingCompiler without the packages that compile for them."""
    require_packages("jax-cuda13-plugin", "jax-cuda13-pjrt", "absl-py")
    peaks, chip = GPUS[kind], CHIPS[kind]
    major, minor = chip.gpu.capability
    config = GPU_DESCRIPTION.format(
        **vars(chip), shared=chip.gpu.shared_memory + 1024, block=chip.gpu.shared_memory,
        bandwidth=int(peaks.bandwidth), memory=peaks.memory, capability=f"major: {major} minor: {minor}",
    )  # fmt: skip
    topology = topologies.get_topology_desc(kind, "cuda", target_config=config, topology=f"1x1x{count}")
    return Target(name, tuple(topology.devices), peaks, int(peaks.memory * MEMORY_FRACTION), kind)


def describe_tpus(name: str, kind: str) -> Target:
    """Describe an absent TPU slice. Raises MissingCompiler without the packages that compile for it."""
    require_packages("libtpu")
    if not has_accelerator():
        for variable, value in ABSENT_TPU.items():
            os.environ.setdefault(variable, value)
    chip = {"chips_per_host_bounds": [1, 1, 1]} if set(name.partition(":")[2].split("x")) == {"1"} else {}
    try:
        devices = topologies.get_topology_desc(name, "tpu", **chip).devices
    except jax.errors.JaxRuntimeError as error:
        raise TargetError(f"target {name!r} cannot be described: {str(error).splitlines()[0]}") from error
    return Target(name, tuple(devices), TPUS[kind], TPUS[kind].memory)


def require_packages(*packages: str) -> None:
    """Check that packages are installed. Raises MissingCompiler with the command that installs them."""
    for package in packages:
        try:
            version(package)
        except PackageNotFoundError:
            raise MissingCompiler(
                f"compiling for this target needs {package}: "
                f"pip install 'duetto[targets]' 'jax=={version('jax')}'"
            ) from None


def measure_peaks() -> Peaks:
    """Measure this device's rates: a large product in 16 bits and in float32, and one of a single row that
    reads weights.

    On a GPU the products are larger, because one of 1024^3 takes no longer than a launch. The row and its
    weights have 16 bits there: XLA reads float32 at a third of the rate.
    """
    known_gpu = target_gpu()
    n, inner = (8192, 1 << 16) if known_gpu else (1024, 8192)
    square = jax.numpy.ones((n, n))
    narrow = square.astype(known_gpu.auto_dtype if known_gpu else "bfloat16")
    flops = {x.dtype.itemsize: 2 * n**3 / time_matmul(x, x) for x in (narrow, square)}
    dtype = narrow.dtype if known_gpu else square.dtype
    del square, narrow
    row, weights = jax.numpy.ones((1, inner), dtype), jax.numpy.ones((inner, 8192), dtype)
    return Peaks(flops[2], flops[4], weights.nbytes / time_matmul(row, weights), 0.0, 0)


def time_matmul(a: jax.Array, b: jax.Array, repeats: int = 10) -> float:
    """Return the least seconds of a product in `repeats` tries. Products in float32 are exact."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jax.numpy.float32 else None
    matmul = partial(jax.numpy.matmul, precision=exact, preferred_element_type=jax.numpy.float32)
    product = jax.jit(matmul).lower(a, b).compile()
    return min(time_calls(lambda: product(a, b), repeats))
