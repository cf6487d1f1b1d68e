"""Library of CPU kernels: loaded once, with handlers that are registered with XLA under names that identify
its bits."""

import ctypes
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax

from ..user_folders import is_user_owned
from .build import ALL_ISAS, ISAS, SOURCE_FOLDER, VERSION, is_intact, library_file

HANDLER_NAMES = ("product", "attention", "norm", "turn")
BUILD_COMMAND = "python -m duetto.cpu_kernels.build"


@dataclass(frozen=True)
class KernelLibrary:
    """Library that was loaded.

    isas: instruction sets that this processor has kernels of, the best one first.
    refusal: reason why there is none, or not the processor's best.
    """

    isas: tuple[str, ...]
    refusal: str = ""

    @property
    def isa(self) -> str:
        """Return the best instruction set. Raises ValueError if there is none."""
        if not self.isas:
            raise ValueError(f"cpu_kernels=True is not allowed: {self.refusal}")
        return self.isas[0]

    @property
    def has_bfloat16(self) -> bool:
        """Return True if the processor multiplies bfloat16 itself, at twice the rate of float32."""
        return any(isa.endswith("_bf16") for isa in self.isas)


def load_library(path: Path | None = None) -> KernelLibrary:
    """Load the kernels and register them with XLA; if that fails, `refusal` has the reason."""
    try:
        path = path or library_file()
    except RuntimeError as error:
        return KernelLibrary((), f"the library of CPU kernels is not there: {error}")
    if not os.path.exists(path):  # also False without permission to read
        how = f"{BUILD_COMMAND} builds it where there is a compiler of C++"
        return KernelLibrary((), f"the library of CPU kernels was not built; {how}")
    if path.parent != SOURCE_FOLDER and not is_user_owned(path.stat()):
        return KernelLibrary((), f"others own {path}, or can write to it")
    return register_library(path)


@cache
def register_library(path: Path) -> KernelLibrary:
    """Load a library at most once, and register the handlers of its instruction sets that work here."""
    again = (
        f"{BUILD_COMMAND} builds it again"
        if path.parent == SOURCE_FOLDER
        else f"delete {path} to build it again"
    )
    try:
        if not is_intact(path):
            raise OSError(f"{path} is damaged")
        cdll = ctypes.CDLL(str(path))
        present = tuple(isa for isa in reversed(ISAS) if has_isa(cdll, isa))
        isas = tuple(isa for isa in present if has_correct_products(cdll, isa))
        for isa in isas:
            register_handlers(cdll, isa, path)
    except AttributeError as error:
        return KernelLibrary((), f"the library of CPU kernels is of another version: {again} ({error})")
    except (OSError, jax.errors.JaxRuntimeError) as error:  # built for another machine or jaxlib
        return KernelLibrary((), f"the library of CPU kernels cannot be used: {error}; {again}")
    if not present:
        return KernelLibrary((), f"this processor has none of {', '.join(ISAS)}")
    wrong = ", ".join(isa for isa in present if isa not in isas)
    return KernelLibrary(isas, f"not {wrong}: its products are wrong on this processor" if wrong else "")


def has_isa(cdll: ctypes.CDLL, isa: str) -> bool:
    """Return True if the library has kernels of an instruction set, and the processor supports it."""
    is_supported = getattr(cdll, symbol_name(f"supports_{isa}"))()
    return bool(is_supported) and hasattr(cdll, symbol_name(f"product_{isa}"))


def has_correct_products(cdll: ctypes.CDLL, isa: str) -> bool:
    """Return True if products of small numbers are right: the kernels have not run on every kind of
    processor."""
    return bool(getattr(cdll, symbol_name(f"is_right_{isa}"))())


def register_handlers(
    cdll: ctypes.CDLL, isa: str, path: Path, handlers: Sequence[str] = HANDLER_NAMES
) -> None:
    """Register the handlers of an instruction set with XLA."""
    for handler in handlers:
        capsule = jax.ffi.pycapsule(getattr(cdll, symbol_name(f"{handler}_{isa}")))
        jax.ffi.register_ffi_target(ffi_target_name(handler, isa, path), capsule, platform="cpu")


def symbol_name(name: str) -> str:
    """Return the name of a C function in a library of this version."""
    return f"duetto_{name}_{VERSION}"


def ffi_target_name(handler: str, isa: str, path: Path | None = None) -> str:
    """Return the name under which XLA calls a handler. It is part of keys of programs, pages and audit
    logs."""
    path = path or library_file()
    return f"{symbol_name(f'{handler}_{isa}')}_{library_digest(path) if os.path.exists(path) else ''}"


def target_isa(target: str) -> str:
    """Return the instruction set of a handler's name."""
    name = target.rpartition("_")[0]
    return next(isa for isa in ALL_ISAS if name.endswith(f"_{isa}_{VERSION}"))


def supports_bf12(target: str) -> bool:
    """Return True if a handler's kernels read bfloat16 in 12 bits. AMX kernels would not see the outliers."""
    return target_isa(target) == "avx512_bf16"


@cache
def library_digest(path: Path) -> str:
    """Return 12 hex digits of a library's hash. They are part of its handlers' names, because compilers
    change bits.

    The hash is kept from the first call.
    """
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
