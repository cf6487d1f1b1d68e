"""Attention over pages on CPUs, by a kernel of `duetto.cpu_kernels` that reads pages where they lie.

Each part of 256 keys, counted from position 0, has a running softmax of its own. Parts are added up in order
(flash-decoding, Dao et al., 2023). A query's sums run over its own keys in order, so its bits depend neither
on its neighbours, nor on the page size, nor on the widths of table and chunk. A tile of queries reads each
key once. Pools of 8 bits, latent rows and selected keys are left to the reference.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from ...cpu_kernels.library import library, target
from ...model.attention import AttentionParams
from ...model.config import GroupedQuery, LayerKind
from ..quantised import Kept, QuantisedPool, empty_pool
from .tiles import LayerPages

HEAD_SIZES = range(16, 257, 16)
BITS = {"bfloat16": ("bfloat16", "uint16"), "float32": ("float32",)}  # pools of each dtype of queries
Given = Array | jax.ShapeDtypeStruct  # arrays or shapes
GivenPool = Shaped[Given, "K P W H"] | QuantisedPool


def supported(
    q: Shaped[Given, "B T N H"], k: GivenPool, v: GivenPool | None, reading: AttentionParams
) -> bool:
    """True if the kernel reads these pools: plain keys and values of bfloat16 or float32."""
    if v is None or isinstance(k, QuantisedPool) or isinstance(v, QuantisedPool):
        return False
    plain = reading.expand is None and reading.rank is None and reading.selection is None
    alike = k.shape == v.shape and q.shape[-1] == k.shape[-1] and k.dtype == v.dtype
    return plain and alike and q.shape[-1] in HEAD_SIZES and k.dtype.name in BITS.get(q.dtype.name, ())


def layers_read(layers: Sequence[LayerKind], kept: Kept, dtype: Any) -> int:
    """Count the layers whose pages the kernel reads on a CPU, for a model that computes in `dtype` with a
    cache kept as `kept`."""

    def is_read(keys: Any) -> bool:
        if not isinstance(keys, GroupedQuery):
            return False
        shape, device = (keys.num_kv_heads, 1, 1, keys.head_size), jax.devices("cpu")[0]
        pool = jax.eval_shape(lambda: empty_pool(shape, kept, device))
        q = jax.ShapeDtypeStruct((1, 1, keys.num_heads, keys.head_size), dtype)
        return supported(q, pool, pool, AttentionParams(1.0))

    return sum(any(map(is_read, kind.mixers)) for kind in layers)


def attend_pages(
    q: Float[Array, "B T N H"], pages: LayerPages, reading: AttentionParams, isa: str
) -> Float[Array, "B T N H"]:
    """Attention of the rows' tokens over their pages by the kernel of an instruction set, in q's dtype.

    Tokens that are not real are zeros.
    """
    library()  # registers the handler that the program calls
    B, T, N, H = q.shape
    K, none = pages.k.shape[0], np.zeros(0, np.float32)
    grouped = jax.ShapeDtypeStruct((B, T, K, N // K, H), q.dtype)
    own = pages.own or (
        np.zeros((B, 0, K, H), q.dtype),
        np.zeros((B, 0, K, H), q.dtype),
        np.zeros(0, np.int32),
    )
    sinks = none if reading.sinks is None else reading.sinks.astype(jnp.float32)
    call = jax.ffi.ffi_call(target("attention", isa), grouped)
    found = call(q.reshape(grouped.shape), *pages[:5], sinks, *own, **scalars(reading))
    return found.reshape(q.shape)


def scalars(reading: AttentionParams) -> dict[str, Any]:
    """Attributes of a call. 0 stands for no cap and no window."""
    return {
        "scale": np.float32(reading.scale),
        "softcap": np.float32(reading.softcap or 0.0),
        "window": np.int64(reading.window or 0),
        "chunked": reading.chunked,
    }
