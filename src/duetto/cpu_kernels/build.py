"""Builds the CPU kernels, as one library.

An engine builds it at its first use, for the best instruction set of its processor, into the user's cache.
`python -m duetto.cpu_kernels.build` builds it beside the sources, for all instruction sets; wheels and images
have this one. Another jaxlib needs another build, because its headers define how XLA calls.
"""

import fcntl
import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from ..user_folders import cache_home, prepare_private_folder

SOURCE_FOLDER = Path(__file__).parent
LIBRARY_NAME = "kernels.so"
# Version of the bits, of the layout of packed weights and of the calls. It is part of the handlers' names, in
# the library and for XLA. A change of any of the three needs a new version.
VERSION = 8
AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
BF16 = (*AVX512, "-mavx512bf16", "-mavx512vnni")  # processors that have one have both
AMX = (*BF16, "-mamx-tile", "-mamx-bf16")
X86 = {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": BF16, "avx512_amx": AMX}
ARM = {"neon": ("-march=armv8-a",), "neon_bf16": ("-march=armv8.2-a+bf16+dotprod",)}
ALL_ISAS = X86 | ARM
MACHINES = {"x86_64": X86, "aarch64": ARM}
ISAS: dict[str, tuple[str, ...]] = MACHINES.get(platform.machine(), {})  # the best one last
KERNEL_FILES = ("products.cc", "attention.cc", "norm.cc")  # compiled for each instruction set
# Sources in the folder `handlers`.
HANDLER_FILES = ("supports.cc", "products_ffi.cc", "attention_ffi.cc", "norm_ffi.cc", "turn_ffi.cc")
COMPILER_FLAGS = (
    f"-DVERSION={VERSION}", "-std=c++17", "-O3", "-ffp-contract=off", "-g0", "-fPIC", "-Wall", "-Wno-psabi"
)  # fmt: skip

# Names in /proc/cpuinfo that differ from the compiler's options.
CPUINFO = Path("/proc/cpuinfo")
FEATURES = {
    "avx512bf16": "avx512_bf16", "avx512vnni": "avx512_vnni", "amx-tile": "amx_tile", "amx-bf16": "amx_bf16",
    "arch=armv8-a": "asimd", "arch=armv8.2-a+bf16+dotprod": "bf16 asimddp",
}  # fmt: skip
COMPILER_SECONDS = 120  # timeout of a compiler call in seconds; it takes a few
CHECKSUM_BYTES = hashlib.sha256().digest_size  # appended to the library: no loader reads there


class BuildError(Exception):
    """Error for kernels that cannot be built on this machine."""


def compiler_command() -> list[str]:
    """Return the command of the C++ compiler: CXX, or c++. Raises BuildError for a CXX that is no command."""
    try:
        return shlex.split(os.environ.get("CXX", "")) or ["c++"]
    except ValueError as error:
        raise BuildError(f"CXX is not a command: {error}") from error


def is_supported() -> bool:
    """Return True if there are kernels for this kind of machine."""
    return sys.platform == "linux" and platform.machine() in MACHINES


def jaxlib_headers() -> Path | None:
    """Return the folder of the installed jaxlib's headers, or None."""
    spec = find_spec("jaxlib")
    folder = Path(spec.origin).parent / "include" if spec and spec.origin else Path()
    return folder if (folder / "xla" / "ffi" / "api" / "ffi.h").exists() else None


def processor_isas() -> tuple[str, ...]:
    """Return the instruction sets to build for this processor: the best one that kernels exist for.

    With AMX it is the best two, because AMX cannot be used everywhere. It is all if the system hides the
    processor's features, and none if the processor lacks them.
    """
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    flags = next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), None)
    if flags is None:
        return tuple(ISAS)
    needed = {
        isa: set(" ".join(FEATURES.get(x := o.removeprefix("-m"), x) for o in options).split())
        for isa, options in ISAS.items()
    }
    options = tuple(isa for isa, features in needed.items() if features <= flags)
    return options[-2:] if "avx512_amx" in options else options[-1:]


@cache
def library_file() -> Path:
    """Return the path of the library that a process loads: the one beside the sources, else the one in the
    cache.

    The choice is kept for the process. Raises RuntimeError for a user without a home.
    """
    beside = SOURCE_FOLDER / LIBRARY_NAME
    return beside if beside.exists() else cached_library_file()


@cache
def cached_library_file() -> Path:
    """Return the path of the library in the user's cache. Its name is a hash of sources, flags and system."""
    parts = COMPILER_FLAGS, ISAS, processor_isas(), platform.machine(), platform.libc_ver()
    hasher = hashlib.sha256(repr(parts).encode())
    include = jaxlib_headers()
    api = [] if include is None else (include / "xla" / "ffi" / "api").glob("*.h")
    for file in sorted([*SOURCE_FOLDER.rglob("*.cc"), *SOURCE_FOLDER.rglob("*.h"), *api]):
        hasher.update(file.read_bytes())
    return cache_home("cpu_kernels") / f"{hasher.hexdigest()[:16]}.so"


def build_cached_library() -> None:
    """Compile the library into the user's cache, unless another process has done so meanwhile. Raises
    BuildError."""
    try:
        target = cached_library_file()
    except RuntimeError as error:
        raise BuildError(f"{error}, so the user has no cache") from error
    if reason := prepare_private_folder(target.parent):
        raise BuildError(f"{target.parent} cannot hold it: {reason}")
    try:
        with exclusive_lock(target.with_suffix(".lock")):
            if needs_build(target):
                build_library(target, isas=processor_isas())
    except OSError as error:  # the disk is full, or the file system has no locks
        raise BuildError(f"{target} cannot be written: {error}") from error


def needs_build(path: Path) -> bool:
    """Return True if there is no library, or a damaged one. Raises OSError."""
    return not os.path.exists(path) or not is_intact(path)


def is_intact(path: Path) -> bool:
    """Return True if a library ends with the checksum of its content. Raises OSError.

    A process that maps a damaged library may be ended by a signal.
    """
    content = path.read_bytes()
    return content == with_checksum(content[:-CHECKSUM_BYTES])


def with_checksum(content: bytes) -> bytes:
    """Return a library's content followed by its checksum."""
    return content + hashlib.sha256(content).digest()


@contextmanager
def exclusive_lock(lock_path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, which other processes wait for."""
    with lock_path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_library(
    target: Path = SOURCE_FOLDER / LIBRARY_NAME,
    include: Path | None = None,
    isas: Sequence[str] = tuple(ISAS),
) -> None:
    """Compile the library to `target`. Raises BuildError."""
    include = include or jaxlib_headers()
    if not is_supported():
        raise BuildError(f"there are no kernels for {platform.machine()} on {sys.platform}")
    if include is None:
        raise BuildError("jaxlib, whose headers are needed, is not installed")
    if not isas:
        raise BuildError(f"this processor has none of {', '.join(ISAS)}")
    with tempfile.TemporaryDirectory() as folder:
        isa_list = "-DFOR_EACH_ISA(X)=" + " ".join(f"X({isa})" for isa in isas)
        common = [isa_list, "-isystem", str(include)]
        *others, last = [str(SOURCE_FOLDER / "handlers" / name) for name in HANDLER_FILES]
        includes = [part for file in others for part in ("-include", file)]
        # one call for all: it spends most of its time on XLA's headers
        handlers = {f"{folder}/handlers.o": [*common, *includes, last]}
        objects = compile_objects(kernel_compiler_arguments(Path(folder), isas=isas) | handlers)
        library = f"{folder}/{LIBRARY_NAME}"
        run_compiler(["-shared", "-s", "-pthread", *objects, "-o", library])
        target.parent.mkdir(parents=True, exist_ok=True)
        install_library(Path(library), target)


def kernel_compiler_arguments(
    folder: Path, flags: Sequence[str] = (), isas: Sequence[str] = tuple(ISAS)
) -> dict[str, list[str]]:
    """Return the compiler's arguments for each source and instruction set, by object file."""
    hidden = "-fvisibility=hidden"
    return {
        f"{folder}/{name}-{isa}.o": [
            *ALL_ISAS[isa],
            *flags,
            f"-DISA={isa}",
            hidden,
            str(SOURCE_FOLDER / name),
        ]
        for name, isa in product(KERNEL_FILES, isas)
    }


def compile_objects(objects: Mapping[str, Sequence[str]]) -> list[str]:
    """Compile object files, one on each core, and return their paths. Raises BuildError."""
    with ThreadPoolExecutor(os.cpu_count(), "duetto-kernel-build") as pool:
        list(
            pool.map(
                lambda item: run_compiler([*COMPILER_FLAGS, *item[1], "-c", "-o", item[0]]), objects.items()
            )
        )
    return [*objects]


def run_compiler(arguments: Sequence[str]) -> None:
    """Run the compiler. Raises BuildError with its output."""
    command = [*compiler_command(), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILER_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")


def install_library(library_path: Path, target_path: Path) -> None:
    """Write a library with its checksum to `target_path`, by a rename: a process may have mapped the old
    file."""
    partial = target_path.with_suffix(f".{os.getpid()}")
    try:
        with partial.open("wb") as file:
            file.write(with_checksum(library_path.read_bytes()))
            file.flush()
            os.fsync(file.fileno())
        partial.chmod(0o755)
        partial.replace(target_path)
    finally:
        partial.unlink(missing_ok=True)


if __name__ == "__main__":
    build_library()
    print(SOURCE_FOLDER / LIBRARY_NAME)
