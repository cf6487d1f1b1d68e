"""Compiles the kernels: one library, with code for each instruction set.

Run `python -m duetto.cpu_kernels.build` once, and again for another jaxlib, whose headers say how XLA calls.
"""

import os
import platform
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
LIBRARY = "kernels.so"
# Of the bits, of the layout of packed weights and of the calls. A change of any needs another: the names of
# handlers have it, in the library and for XLA.
VERSION = 2
AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
ISAS = {"avx2": AVX2, "avx512": AVX512, "avx512_bf16": (*AVX512, "-mavx512bf16")}
KERNELS = ("products.cc", "attention.cc")  # compiled for each instruction set
HANDLERS = ("products_ffi.cc", "attention_ffi.cc")
FLAGS = (
    f"-DVERSION={VERSION}", "-std=c++17", "-O3", "-ffp-contract=off", "-g0", "-fPIC", "-Wall", "-Wno-psabi"
)  # fmt: skip


class BuildError(Exception):
    """The kernels cannot be built here."""


def compiler() -> list[str]:
    """The command of the compiler: CXX, or c++."""
    return shlex.split(os.environ.get("CXX", "c++"))


def is_supported() -> bool:
    """True if there are kernels for this kind of machine."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def headers() -> Path | None:
    """The folder of the headers of the installed jaxlib."""
    found = find_spec("jaxlib")
    folder = Path(found.origin).parent / "include" if found and found.origin else Path()
    return folder if (folder / "xla" / "ffi" / "api" / "ffi.h").exists() else None


def build(target: Path = HERE / LIBRARY, include: Path | None = None) -> None:
    """Compile the library to `target`. Raises BuildError."""
    include = include or headers()
    if not is_supported():
        raise BuildError(f"there are no kernels for {platform.machine()} on {sys.platform}")
    if include is None:
        raise BuildError("jaxlib, whose headers are needed, is not installed")
    with tempfile.TemporaryDirectory() as folder:
        objects = compiled_kernels(Path(folder))
        for name in HANDLERS:
            objects.append(f"{folder}/{name}.o")
            run([*FLAGS, "-isystem", str(include), "-c", str(HERE / name), "-o", objects[-1]])
        made = f"{folder}/{LIBRARY}"
        run(["-shared", "-s", "-pthread", *objects, "-o", made])
        target.parent.mkdir(parents=True, exist_ok=True)
        place(Path(made), target)


def compiled_kernels(folder: Path, flags: Sequence[str] = ()) -> list[str]:
    """Compile each source for each instruction set; returns the object files. Raises BuildError."""
    objects = []
    for name in KERNELS:
        for isa, own in ISAS.items():
            objects.append(str(folder / f"{name}-{isa}.o"))
            command = [*FLAGS, *own, *flags, f"-DISA={isa}", "-fvisibility=hidden", "-c", str(HERE / name)]
            run([*command, "-o", objects[-1]])
    return objects


def run(arguments: Sequence[str]) -> None:
    command = [*compiler(), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{done.stderr.strip()}")


def place(made: Path, target: Path) -> None:
    """Put a file in the place of another that a process may have mapped."""
    beside = target.with_suffix(f".{os.getpid()}")
    beside.write_bytes(made.read_bytes())
    beside.chmod(0o755)
    beside.replace(target)


if __name__ == "__main__":
    build()
    print(HERE / LIBRARY)
