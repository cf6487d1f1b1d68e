"""The library of CPU kernels: loaded once, its handlers registered with XLA under names that say which bits
they make."""

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax

from .build import HERE, ISAS, LIBRARY

# Of the bits and of the layout of packed weights. A change of either needs another: programs that are kept on
# disk, and pages, have it in their keys.
VERSION = 1
HANDLERS = ("product", "attention")


@dataclass(frozen=True)
class KernelLibrary:
    """The loaded library. isas: the instruction sets that this processor has kernels of, the best one first.
    refusal: why there is none."""

    isas: tuple[str, ...]
    refusal: str = ""

    @property
    def isa(self) -> str:
        """The best instruction set. Raises ValueError if there is none."""
        if not self.isas:
            raise ValueError(f"cpu_kernels=True is not allowed: {self.refusal}")
        return self.isas[0]


@cache
def library(path: Path = HERE / LIBRARY) -> KernelLibrary:
    """Load the kernels and register them with XLA."""
    if not path.exists():
        how = "python -m duetto.cpu_kernels.build builds it where there is a compiler of C++"
        return KernelLibrary((), f"the library of CPU kernels was not built; {how}")
    try:
        loaded = ctypes.CDLL(str(path))
        isas = tuple(isa for isa in reversed(ISAS) if getattr(loaded, f"duetto_supports_{isa}")())
        for isa in isas:
            register(loaded, isa)
    except (OSError, AttributeError, jax.errors.JaxRuntimeError) as error:  # of another version, or jaxlib
        return KernelLibrary((), f"the library of CPU kernels cannot be used: {error}")
    return KernelLibrary(isas, "" if isas else f"this processor has none of {', '.join(ISAS)}")


def register(loaded: ctypes.CDLL, isa: str) -> None:
    for handler in HANDLERS:
        capsule = jax.ffi.pycapsule(getattr(loaded, f"duetto_{handler}_{isa}"))
        jax.ffi.register_ffi_target(target(handler, isa), capsule, platform="cpu")


def target(handler: str, isa: str) -> str:
    """The name of a handler's kernels for XLA."""
    return f"duetto_{handler}_{isa}_{VERSION}"


def isa_of(target: str) -> str:
    """The instruction set of a target."""
    return next(isa for isa in ISAS if target.endswith(f"_{isa}_{VERSION}"))
