"""Other weights for a running engine: whether its programs can take them."""

import jax

from ...model.transformer import Decoder
from ...model.tree import paths


def require_alike(old: Decoder, new: Decoder) -> None:
    """Raises ValueError where a shape, dtype or sharding differs."""
    before, after = paths(old), paths(new)
    for path in before | after:
        a, b = before.get(path), after.get(path)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"update_params: {path} is {describe(b)}, expected {describe(a)}")
        if not b.sharding.is_equivalent_to(a.sharding, a.ndim):
            raise ValueError(f"update_params: {path} lies in {b.sharding}, expected {a.sharding}")


def describe(x: jax.Array | None) -> str:
    return "missing" if x is None else f"{x.dtype}{list(x.shape)}"
