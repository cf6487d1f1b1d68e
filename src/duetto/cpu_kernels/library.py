"""The library of CPU kernels: loaded once, its handlers registered with XLA under names that say which bits
they make."""

import ctypes
import hashlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax

from ..user_folders import owned
from .build import ALL_ISAS, HERE, ISAS, VERSION, library_file

HANDLERS = ("product", "attention", "norm", "turn")
BUILD = "python -m duetto.cpu_kernels.build"


@dataclass(frozen=True)
class KernelLibrary:
    """The loaded library. isas: the instruction sets that this processor has kernels of, the best one first.
    refusal: why there is none, or not the best of the processor's."""

    isas: tuple[str, ...]
    refusal: str = ""

    @property
    def isa(self) -> str:
        """The best instruction set. Raises ValueError if there is none."""
        if not self.isas:
            raise ValueError(f"cpu_kernels=True is not allowed: {self.refusal}")
        return self.isas[0]

    @property
    def multiplies_bfloat16(self) -> bool:
        """True if the processor multiplies bfloat16 itself, twice as many numbers at once as of float32."""
        return any(isa.endswith("_bf16") for isa in self.isas)


def library(path: Path | None = None) -> KernelLibrary:
    """Load the kernels and register them with XLA."""
    try:
        path = path or library_file()
    except RuntimeError as error:
        return KernelLibrary((), f"the library of CPU kernels is not there: {error}")
    if not os.path.exists(path):  # or it may not be read
        how = f"{BUILD} builds it where there is a compiler of C++"
        return KernelLibrary((), f"the library of CPU kernels was not built; {how}")
    if path.parent != HERE and not owned(path.stat()):
        return KernelLibrary((), f"others own {path}, or can write to it")
    return loaded(path)


@cache
def loaded(path: Path) -> KernelLibrary:
    again = f"{BUILD} builds it again" if path.parent == HERE else f"delete {path} to build it again"
    try:
        if not is_whole(path):
            raise OSError(f"{path} is cut off, or no library")
        found = ctypes.CDLL(str(path))
        own = tuple(isa for isa in reversed(ISAS) if has(found, isa))
        isas = tuple(isa for isa in own if is_right(found, isa))
        for isa in isas:
            register(found, isa, path)
    except AttributeError as error:
        return KernelLibrary((), f"the library of CPU kernels is of another version: {again} ({error})")
    except (OSError, jax.errors.JaxRuntimeError) as error:  # of another machine, or jaxlib
        return KernelLibrary((), f"the library of CPU kernels cannot be used: {error}; {again}")
    if not own:
        return KernelLibrary((), f"this processor has none of {', '.join(ISAS)}")
    wrong = ", ".join(isa for isa in own if isa not in isas)
    return KernelLibrary(isas, f"not {wrong}: its products are wrong on this processor" if wrong else "")


def is_whole(path: Path) -> bool:
    """True if a library has all bytes that its header announces: a process that maps less ends by SIGBUS."""
    with path.open("rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:4] != b"\x7fELF":
        return False
    begin, size, count = struct.unpack("<40xQ10xHH2x", header)  # of the table at the end
    return path.stat().st_size >= begin + size * count


def has(loaded: ctypes.CDLL, isa: str) -> bool:
    """True if a library has kernels of an instruction set, and the processor has that."""
    is_supported = getattr(loaded, exported(f"supports_{isa}"))()
    return bool(is_supported) and hasattr(loaded, exported(f"product_{isa}"))


def is_right(loaded: ctypes.CDLL, isa: str) -> bool:
    """True if products of small numbers are right: the kernels have not run on every kind of processor."""
    return bool(getattr(loaded, exported(f"is_right_{isa}"))())


def register(loaded: ctypes.CDLL, isa: str, path: Path, handlers: Sequence[str] = HANDLERS) -> None:
    for handler in handlers:
        capsule = jax.ffi.pycapsule(getattr(loaded, exported(f"{handler}_{isa}")))
        jax.ffi.register_ffi_target(target(handler, isa, path), capsule, platform="cpu")


def exported(name: str) -> str:
    """The name of a function in a library of this version."""
    return f"duetto_{name}_{VERSION}"


def target(handler: str, isa: str, path: Path | None = None) -> str:
    """The name of a handler's kernels for XLA. Keys of programs, pages and audit logs have it."""
    path = path or library_file()
    return f"{exported(f'{handler}_{isa}')}_{digest(path) if os.path.exists(path) else ''}"


def isa_of(target: str) -> str:
    """The instruction set of a target."""
    name = target.rpartition("_")[0]
    return next(isa for isa in ALL_ISAS if name.endswith(f"_{isa}_{VERSION}"))


def reads_bf12(target: str) -> bool:
    """True for kernels that read bfloat16 in 12 bits. Those of AMX would not see the outliers."""
    return isa_of(target) == "avx512_bf16"


@cache
def digest(path: Path) -> str:
    """The first digits of the hash of a library as it was at the first call: compilers give other bits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
