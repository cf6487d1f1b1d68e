"""New weights for a running engine: the checks that its programs can take them."""

from typing import Any

import jax
import jax.numpy as jnp

from ....kvcache.page_hash import root
from ....model.transformer import Decoder
from ....model.tree import paths
from ....model.weights.adapted import adapted, stacks_of, unadapted
from ....model.weights.prepared import prepared_as, split_qkv


def root_of(config: Any, params: Any, kv_cache_dtype: str) -> bytes:
    """Return the name before the first page of an engine."""
    shapes = split_qkv(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))
    return root(str(config), str(jax.tree.map(lambda x: x.dtype, shapes)), kv_cache_dtype)


def exchanged(served: Decoder, given: Decoder) -> Decoder:
    """Return other parameters in the forms of an engine's own, with its adapters. Raises ValueError as
    `require_alike` does."""
    weights = unadapted(served)
    given = prepared_as(weights, given)
    require_alike(weights, given)
    stacks = stacks_of(served)
    return (
        adapted(given, {path: (there(a), there(b)) for path, (a, b) in stacks.items()}) if stacks else given
    )


def there(x: Any) -> jax.Array:
    """Return an array; zeros for one that sleep has taken off the device."""
    return jnp.zeros(x.shape, x.dtype, device=x.sharding) if isinstance(x, jax.ShapeDtypeStruct) else x


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
