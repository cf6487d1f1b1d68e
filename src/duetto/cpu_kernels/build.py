"""Compiles the kernels into one library.

An engine builds it at its first use, for the best instruction set of its processor, into the user's cache.
`python -m duetto.cpu_kernels.build` builds it beside the sources with code for each, for wheels and images;
again for another jaxlib, whose headers say how XLA calls.
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

from ..user_folders import cache_home, refusal

HERE = Path(__file__).parent
LIBRARY = "kernels.so"
# Of the bits, of the layout of packed weights and of the calls. A change of any needs another: the names of
# handlers have it, in the library and for XLA.
VERSION = 6
AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
BF16 = (*AVX512, "-mavx512bf16")
AMX = (*BF16, "-mamx-tile", "-mamx-bf16")
X86 = {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": BF16, "avx512_amx": AMX}
ARM = {"neon": ("-march=armv8-a",), "neon_bf16": ("-march=armv8.2-a+bf16",)}
ALL_ISAS = X86 | ARM
MACHINES = {"x86_64": X86, "aarch64": ARM}
ISAS: dict[str, tuple[str, ...]] = MACHINES.get(platform.machine(), {})  # the best one last
KERNELS = ("products.cc", "attention.cc", "norm.cc")  # compiled for each instruction set
# In the folder `handlers`.
HANDLERS = ("supports.cc", "products_ffi.cc", "attention_ffi.cc", "norm_ffi.cc", "turn_ffi.cc")
FLAGS = (
    f"-DVERSION={VERSION}", "-std=c++17", "-O3", "-ffp-contract=off", "-g0", "-fPIC", "-Wall", "-Wno-psabi"
)  # fmt: skip

# Names in /proc/cpuinfo where they are not those of the compiler's options.
CPUINFO = Path("/proc/cpuinfo")
FEATURES = {
    "avx512bf16": "avx512_bf16", "amx-tile": "amx_tile", "amx-bf16": "amx_bf16",
    "arch=armv8-a": "asimd", "arch=armv8.2-a+bf16": "bf16",
}  # fmt: skip
LONGEST = 120  # seconds of a compiler's call, which takes a few


class BuildError(Exception):
    """The kernels cannot be built here."""


def compiler() -> list[str]:
    """The command of the compiler: CXX, or c++. Raises BuildError for a CXX that is no command."""
    try:
        return shlex.split(os.environ.get("CXX", "")) or ["c++"]
    except ValueError as error:
        raise BuildError(f"CXX is not a command: {error}") from error


def is_supported() -> bool:
    """True if there are kernels for this kind of machine."""
    return sys.platform == "linux" and platform.machine() in MACHINES


def headers() -> Path | None:
    """The folder of the headers of the installed jaxlib."""
    found = find_spec("jaxlib")
    folder = Path(found.origin).parent / "include" if found and found.origin else Path()
    return folder if (folder / "xla" / "ffi" / "api" / "ffi.h").exists() else None


def own_isas() -> tuple[str, ...]:
    """The best instruction set that this processor has kernels of, with AMX the next one too, which takes its
    place where it cannot be used; all where the system hides which it has. Empty if it has none."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    flags = next((set(line.split()) for line in lines if line.startswith(("flags", "Features"))), None)
    if flags is None:
        return tuple(ISAS)
    needed = {isa: {FEATURES.get(x := o.removeprefix("-m"), x) for o in own} for isa, own in ISAS.items()}
    own = tuple(isa for isa, features in needed.items() if features <= flags)
    return own[-2:] if "avx512_amx" in own else own[-1:]


@cache
def library_file() -> Path:
    """The library that a process loads: that beside the sources, else that in the user's cache, also if one
    is built beside the sources later. Raises RuntimeError for a user without a home."""
    beside = HERE / LIBRARY
    return beside if beside.exists() else cached()


@cache
def cached() -> Path:
    """The library in the user's cache, named by what it is built from, and for which systems."""
    parts = FLAGS, ISAS, own_isas(), platform.machine(), platform.libc_ver()
    found = hashlib.sha256(repr(parts).encode())
    include = headers()
    api = [] if include is None else (include / "xla" / "ffi" / "api").glob("*.h")
    for file in sorted([*HERE.rglob("*.cc"), *HERE.rglob("*.h"), *api]):
        found.update(file.read_bytes())
    return cache_home("cpu_kernels") / f"{found.hexdigest()[:16]}.so"


def build_cached() -> None:
    """Compile the library into the user's cache, unless another process has done so meanwhile. Raises
    BuildError."""
    try:
        target = cached()
    except RuntimeError as error:
        raise BuildError(f"{error}, so the user has no cache") from error
    if reason := refusal(target.parent):
        raise BuildError(f"{target.parent} cannot hold it: {reason}")
    try:
        with one_process(target.with_suffix(".lock")):
            if not os.path.exists(target):
                build(target, isas=own_isas())
    except OSError as error:  # no room, or no locks
        raise BuildError(f"{target} cannot be written: {error}") from error


@contextmanager
def one_process(lock: Path) -> Iterator[None]:
    """Wait until no other process is in such a block."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(
    target: Path = HERE / LIBRARY, include: Path | None = None, isas: Sequence[str] = tuple(ISAS)
) -> None:
    """Compile the library to `target`. Raises BuildError."""
    include = include or headers()
    if not is_supported():
        raise BuildError(f"there are no kernels for {platform.machine()} on {sys.platform}")
    if include is None:
        raise BuildError("jaxlib, whose headers are needed, is not installed")
    if not isas:
        raise BuildError(f"this processor has none of {', '.join(ISAS)}")
    with tempfile.TemporaryDirectory() as folder:
        each = "-DFOR_EACH_ISA(X)=" + " ".join(f"X({isa})" for isa in isas)
        headers_too = [each, "-isystem", str(include)]
        *others, last = [str(HERE / "handlers" / name) for name in HANDLERS]
        at_once = [part for file in others for part in ("-include", file)]
        # one call for all: it spends most of its time on XLA's headers
        handlers = {f"{folder}/handlers.o": [*headers_too, *at_once, last]}
        objects = compiled(kernels(Path(folder), isas=isas) | handlers)
        made = f"{folder}/{LIBRARY}"
        run(["-shared", "-s", "-pthread", *objects, "-o", made])
        target.parent.mkdir(parents=True, exist_ok=True)
        place(Path(made), target)


def kernels(
    folder: Path, flags: Sequence[str] = (), isas: Sequence[str] = tuple(ISAS)
) -> dict[str, list[str]]:
    """Return the compiler's arguments for each source and each instruction set, by the object file."""
    hidden = "-fvisibility=hidden"
    return {
        f"{folder}/{name}-{isa}.o": [*ALL_ISAS[isa], *flags, f"-DISA={isa}", hidden, str(HERE / name)]
        for name, isa in product(KERNELS, isas)
    }


def compiled(objects: Mapping[str, Sequence[str]]) -> list[str]:
    """Compile object files, one on each core; returns their names. Raises BuildError."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda item: run([*FLAGS, *item[1], "-c", "-o", item[0]]), objects.items()))
    return [*objects]


def run(arguments: Sequence[str]) -> None:
    command = [*compiler(), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONGEST)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")


def place(made: Path, target: Path) -> None:
    """Put a file in the place of another that a process may have mapped, whole or not at all."""
    beside = target.with_suffix(f".{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(made.read_bytes())
            file.flush()
            os.fsync(file.fileno())
        beside.chmod(0o755)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


if __name__ == "__main__":
    build()
    print(HERE / LIBRARY)
