"""The weights of a running engine: whether its programs can take others, and this process alone move
them."""

from typing import Any

import jax

from ...model.transformer import Decoder
from ...model.tree import paths


def require_alike(old: Decoder, new: Decoder) -> None:
    """Raises ValueError where a shape, dtype or sharding differs, and in a group of processes."""
    require_own(old, "update_params")
    before, after = paths(old), paths(new)
    for path in before | after:
        a, b = before.get(path), after.get(path)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"update_params: {path} is {describe(b)}, expected {describe(a)}")
        if not b.sharding.is_equivalent_to(a.sharding, a.ndim):
            raise ValueError(f"update_params: {path} lies in {b.sharding}, expected {a.sharding}")


def require_own(params: Any, method: str) -> None:
    """Raises ValueError where other processes hold a part of the parameters, and would have to take part."""
    if any(isinstance(x, jax.Array) and not x.is_fully_addressable for x in jax.tree.leaves(params)):
        raise ValueError(f"{method} is not allowed with several processes (nnodes)")


def describe(x: jax.Array | None) -> str:
    return "missing" if x is None else f"{x.dtype}{list(x.shape)}"
