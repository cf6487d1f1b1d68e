"""RoPE of a layer's new heads, and the writes of keys and values to their pages, by a kernel of
`duetto.cpu_kernels`.

XLA makes five calls of it, and its scatters run on one thread.
"""

from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ...cpu_kernels.library import ffi_target_name, load_library
from ...model.attention import AttentionParams, NewHeads
from .cpu_attention import fits_cpu_kernel


def has_cpu_rope(q: Float[Array, "B T N H"], pools: tuple[Any, Any]) -> bool:
    """True if the kernel takes heads like these queries, and writes to these pools."""
    return fits_cpu_kernel(q, *pools, AttentionParams(1.0))


def cpu_rope_and_write(
    new_heads: NewHeads,
    pools: tuple[Any, Any],
    slot_mapping: tuple[Int[Array, "B T"], Int[Array, "B T"]],
    isa: str,
) -> tuple[Float[Array, "B T N H"], tuple[Any, Any]]:
    """Norm and rotate new heads, and write keys and values to their pages in place. Returns the queries and
    the pools."""
    load_library()  # registers the handler that the program calls
    q, k = new_heads.normed_qk
    out_types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, *pools)]
    call = jax.ffi.ffi_call(ffi_target_name("turn", isa), out_types, input_output_aliases={7: 1, 8: 2})
    q, keys, values = call(q, k, new_heads.v, *new_heads.rotary[:2], *slot_mapping, *pools)
    return q, (keys, values)
