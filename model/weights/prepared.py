"""The forms in which an engine multiplies weights on its device, whatever form they came in."""

from typing import Any, TypeVar

import jax

from ...cpu_kernels.library import library
from ..experts import parted, unparted
from .fixed import fixed, is_fixed, unfixed
from .lanes import in_lanes, out_of_lanes
from .packed import packed, packed_as, unpacked
from .transposed import is_transposed, transposed, untransposed

T = TypeVar("T")


def laid_out(params: T, cpu_kernels: bool, donate: bool = False) -> T:
    """Parameters, or ShapeDtypeStructs, as products of their device read them; with `donate` each weight is
    deleted when its copy is ready. Raises ValueError where a CPU is to have kernels that are not there."""
    if cpu_kernels and is_on_cpu(params):
        params = packed(params, library().isa, donate)
    return transposed(params, donate)


def is_on_cpu(params: Any) -> bool:
    shardings = (x.sharding for x in jax.tree.leaves(params))
    return any(device.platform == "cpu" for where in shardings if where for device in where.device_set)


def prepared(params: T, batch_invariant_matmul: bool, cpu_kernels: bool = False) -> T:
    """Parameters, or ShapeDtypeStructs, as their device multiplies them."""
    params = in_lanes(parted(laid_out(params, cpu_kernels)))
    return fixed(params) if batch_invariant_matmul else params


def prepared_as(served: Any, params: T) -> T:
    """Parameters in the forms that those of a running engine have."""
    params = packed_as(served, params)
    params = in_lanes(parted(transposed(params) if is_transposed(served) else params))
    return fixed(params) if is_fixed(served) else params


def unprepared(params: T) -> T:
    """An engine's parameters as arrays in the forms that they came in."""
    return unparted(untransposed(unpacked(unfixed(out_of_lanes(params)))))
