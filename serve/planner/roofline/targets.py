"""Accelerators that are not there: XLA compiles for a description of a device, and its memory plan and copies
are exact.

What it cannot say is how long a program takes; the peaks are the vendors' (dense products, no sparsity).
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

from ....model.gpus import Gpu, gpu, gpu_of
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
    host: bytes/s between it and the host's memory, 0 if unknown.
    """

    flops16: float
    flops32: float
    bandwidth: float
    link: float
    memory: int
    host: float = 0.0

    def flops(self, dtype: Any) -> float:
        """FLOP/s of matrix products of a dtype; 32 bits are exact ones, without tensor cores or in six passes
        of bfloat16."""
        return self.flops32 if jax.numpy.dtype(dtype).itemsize >= 4 else self.flops16


@dataclass(frozen=True)
class Target:
    """Devices that programs are compiled for, and what is known of each: its peaks, its bytes of memory (not
    a host's), and which of GPUS it is, if that is absent."""

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
SLICES = {"v5e": "2x2", "v5p": "2x2x1", "v6e": "2x4", "tpu7x": "2x2x1"}  # for example; 1x1 is one chip
HALVES = {"tpu7x": 2}  # devices of a chip, where it is not one


@dataclass(frozen=True)
class Chip:
    """Description of a GPU besides its peaks: its name as the driver reports it, multiprocessors, threads and
    float32 lanes of each, bytes of the second-level cache, and GHz."""

    kind: str
    cores: int
    threads: int
    lanes: int
    cache: int
    clock: float

    @property
    def gpu(self) -> Gpu:
        found = gpu_of(AbstractDevice(self.kind, self.cores, "gpu"))
        assert found is not None
        return found


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
DESCRIPTION = """
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
# What libtpu would ask the cloud, and complain of on a machine without a TPU; there, processes have none to
# fight for.
ABSENT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}
KINDS = {
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
        return gpu_target(name, gpu[2], int(gpu[1] or 1))
    kind = name.partition(":")[0]
    if kind in TPUS and re.fullmatch(r"\w+:\d+(x\d+)+", name):
        return tpu_target(name, kind)
    tpus = ", ".join(f"{kind}:{slice}" for kind, slice in SLICES.items())
    raise TargetError(
        f"target {name!r} is unknown: {', '.join(GPUS)}, 8xh200 and the like, or a slice such as {tpus}"
    )


@dataclass(frozen=True)
class Known:
    """A target as far as it is known without its compiler.

    memory: bytes that jax takes of each device.
    """

    name: str
    platform: str
    count: int
    peaks: Peaks
    memory: int


def known_target(name: str) -> Known:
    """Return the facts of `h200`, `8xh200`, `v6e`, `8xv6e` or `v6e:2x4`. Raises TargetError for others."""
    found = re.fullmatch(r"(?:(\d+)x)?(\w+)(?::(\d+(?:x\d+)+))?", name)
    kind = found[2] if found else ""
    count = prod(map(int, (found[1] or found[3] or "1").split("x"))) if found else 0
    if found and count and kind in GPUS and not found[3]:
        peaks = GPUS[kind]
        return Known(name, "gpu", count, peaks, int(peaks.memory * MEMORY_FRACTION))
    if found and count and kind in TPUS and not (found[1] and found[3]):
        count *= HALVES.get(kind, 1) if found[3] else 1
        return Known(name, "tpu", count, TPUS[kind], TPUS[kind].memory)
    kinds = ", ".join((*GPUS, *TPUS))
    raise TargetError(f"target {name!r} is unknown: one of {kinds}, 8xh200 and the like, or v6e:2x4")


def here(measure: bool = False) -> Target:
    """The device that programs run on by default; its peaks are known for the kinds above, or measured."""
    device = default_device()
    kind = next(
        (ours for theirs, ours in KINDS.items() if re.search(rf"{theirs}(?!\d)", device.device_kind)), None
    )
    peaks = measured_peaks() if measure else {**GPUS, **TPUS}.get(kind or "")
    return Target(device.device_kind, (device,), peaks, memory_limit(device))


def options_of(target: Target) -> dict[str, str]:
    """Options of XLA's compiler for a target's steps."""
    found = gpu_of(device_of(target))
    return found.options() if found else {}


@contextmanager
def described(target: Target) -> Iterator[None]:
    """While this is entered, kernels are lowered for a target's GPU or TPU, where jax would ask the machine's
    own what it is, and nothing warns of what compiling for an absent device brings along."""
    with warnings.catch_warnings(), kernels_for(target):
        # jax stores what it compiled for an absent device, and cannot read it back.
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        yield


def kernels_for(target: Target) -> AbstractContextManager[Any]:
    device = device_of(target)
    if device.platform == "tpu":
        device = AbstractDevice(device.device_kind, device.num_cores, "tpu")
    if not isinstance(device, AbstractDevice):
        return nullcontext()
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def device_of(target: Target) -> Any:
    """A target's first device; of a GPU that is absent a description that has its name, which `gpu_of`
    reads."""
    if not target.kind:
        return target.devices[0]
    return AbstractDevice(CHIPS[target.kind].kind, CHIPS[target.kind].cores, "gpu")


def gpu_target(name: str, kind: str, count: int) -> Target:
    need("jax-cuda13-plugin", "jax-cuda13-pjrt", "absl-py")
    peaks, chip = GPUS[kind], CHIPS[kind]
    major, minor = chip.gpu.capability
    config = DESCRIPTION.format(
        **vars(chip), shared=chip.gpu.shared_memory + 1024, block=chip.gpu.shared_memory,
        bandwidth=int(peaks.bandwidth), memory=peaks.memory, capability=f"major: {major} minor: {minor}",
    )  # fmt: skip
    described = topologies.get_topology_desc(kind, "cuda", target_config=config, topology=f"1x1x{count}")
    return Target(name, tuple(described.devices), peaks, int(peaks.memory * MEMORY_FRACTION), kind)


def tpu_target(name: str, kind: str) -> Target:
    need("libtpu")
    if not has_accelerator():
        for variable, value in ABSENT_TPU.items():
            os.environ.setdefault(variable, value)
    chip = {"chips_per_host_bounds": [1, 1, 1]} if set(name.partition(":")[2].split("x")) == {"1"} else {}
    try:
        devices = topologies.get_topology_desc(name, "tpu", **chip).devices
    except jax.errors.JaxRuntimeError as error:
        raise TargetError(f"target {name!r} cannot be described: {str(error).splitlines()[0]}") from error
    return Target(name, tuple(devices), TPUS[kind], TPUS[kind].memory)


def need(*packages: str) -> None:
    """Raises MissingCompiler, with the command that installs them, unless all packages are there."""
    for package in packages:
        try:
            version(package)
        except PackageNotFoundError:
            raise MissingCompiler(
                f"compiling for this target needs {package}: "
                f"pip install 'duetto[targets]' 'jax=={version('jax')}'"
            ) from None


def measured_peaks() -> Peaks:
    """This device's rates: a large product in 16 bits and in float32, and one that reads weights for a single
    row. On a GPU both are larger, since a product of 1024^3 takes no longer than a launch; the row and its
    weights have 16 bits, as XLA reads float32 at a third of the rate."""
    found = gpu()
    n, inner = (8192, 1 << 16) if found else (1024, 8192)
    square = jax.numpy.ones((n, n))
    narrow = square.astype(found.auto_dtype if found else "bfloat16")
    flops = {x.dtype.itemsize: 2 * n**3 / fastest(x, x) for x in (narrow, square)}
    dtype = narrow.dtype if found else square.dtype
    del square, narrow
    row, weights = jax.numpy.ones((1, inner), dtype), jax.numpy.ones((inner, 8192), dtype)
    return Peaks(flops[2], flops[4], weights.nbytes / fastest(row, weights), 0.0, 0)


def fastest(a: jax.Array, b: jax.Array, times: int = 10) -> float:
    """Seconds of a product at its best; those of float32 are exact."""
    exact = jax.lax.Precision.HIGHEST if a.dtype == jax.numpy.float32 else None
    matmul = partial(jax.numpy.matmul, precision=exact, preferred_element_type=jax.numpy.float32)
    product = jax.jit(matmul).lower(a, b).compile()
    return min(time_calls(lambda: product(a, b), times))
