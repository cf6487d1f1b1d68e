"""Rotary embedding of a layer's new queries and keys, and the writes of keys and values into their pages, by
a kernel of `duetto.cpu_kernels`.

XLA makes five calls of it, and its scatters run on one thread.
"""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ...cpu_kernels.library import library, target
from ...model.attention import AttentionParams, NewHeads
from .cpu_attention import supported


def has_turn(q: Float[Array, "B T N H"], pools: tuple[Any, Any]) -> bool:
    """True if the kernel takes heads like these queries, and writes to these pools."""
    return supported(q, *pools, AttentionParams(1.0))


def turn_and_write(
    new: NewHeads, pools: tuple[Any, Any], place: tuple[Int[Array, "B T"], Int[Array, "B T"]], isa: str
) -> tuple[Float[Array, "B T N H"], tuple[Any, Any]]:
    """Queries as attention takes them, and the pools with keys and values, which are written in place."""
    library()  # registers the handler that the program calls
    q, k = new.normed
    made = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *pools)]
    call = jax.ffi.ffi_call(target("turn", isa), made, input_output_aliases={7: 1, 8: 2})
    q, keys, values = call(q, k, new.v, *new.rotary[:2], *place, *pools)
    return q, (keys, values)
