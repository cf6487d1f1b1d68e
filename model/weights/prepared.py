"""The forms in which an engine multiplies weights on its device, whatever form they came in."""

from typing import Any, TypeVar

from ..experts import parted, unparted
from .fixed import fixed, is_fixed, unfixed
from .transposed import is_transposed, transposed, untransposed

T = TypeVar("T")


def prepared(params: T, batch_invariant_matmul: bool) -> T:
    """Parameters, or ShapeDtypeStructs, as their device multiplies them."""
    params = parted(transposed(params))
    return fixed(params) if batch_invariant_matmul else params


def prepared_as(served: Any, params: T) -> T:
    """Parameters in the forms that those of a running engine have."""
    params = parted(transposed(params) if is_transposed(served) else params)
    return fixed(params) if is_fixed(served) else params


def unprepared(params: T) -> T:
    """An engine's parameters as arrays in the forms that they came in."""
    return unparted(untransposed(unfixed(params)))
