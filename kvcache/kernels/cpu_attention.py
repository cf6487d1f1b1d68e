"""Attention over pages on CPUs, by a kernel of `duetto.cpu_kernels` that reads pages in place.

Each part of 256 keys, counted from position 0, has its own running softmax. Parts are added up in order
(flash-decoding, Dao et al., 2023). A query's sums run over its own keys in order. So its bits depend neither
on its neighbours, nor on the page size, nor on the widths of table and chunk. A tile of queries reads each
key once. The reference handles 8-bit pools, latent rows and selected keys.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from ...cpu_kernels.library import ffi_target_name, load_library
from ...model.attention import AttentionParams
from ...model.config import GroupedQuery, LayerKind
from ..quantised import CacheFormat, QuantisedPool, empty_pool
from .tiles import LayerPages

CPU_HEAD_SIZES = range(16, 257, 16)
# dtypes of pools, by dtype of queries
POOL_DTYPES = {"bfloat16": ("bfloat16", "uint16"), "float32": ("float32",)}
CpuInput = Array | jax.ShapeDtypeStruct  # arrays or shapes
CpuPool = Shaped[CpuInput, "K P W H"] | QuantisedPool


def fits_cpu_kernel(
    q: Shaped[CpuInput, "B T N H"], k: CpuPool, v: CpuPool | None, attention: AttentionParams
) -> bool:
    """True if the kernel reads these pools: plain keys and values of bfloat16 or float32."""
    if v is None or isinstance(k, QuantisedPool) or isinstance(v, QuantisedPool):
        return False
    plain = attention.expand is None and attention.rank is None and attention.selection is None
    plain &= attention.alibi is None
    alike = k.shape == v.shape and q.shape[-1] == k.shape[-1] and k.dtype == v.dtype
    return (
        plain
        and alike
        and q.shape[-1] in CPU_HEAD_SIZES
        and k.dtype.name in POOL_DTYPES.get(q.dtype.name, ())
    )


def count_kernel_layers(layers: Sequence[LayerKind], cache_format: CacheFormat, dtype: Any) -> int:
    """Count the layers whose pages the kernel reads on a CPU. The model computes in `dtype`, its cache has
    the format `cache_format`."""

    def is_supported(keys: Any) -> bool:
        """True if the kernel reads the pages of a mixer."""
        if not isinstance(keys, GroupedQuery) or keys.alibi is not None:
            return False
        shape, device = (keys.num_kv_heads, 1, 1, keys.head_size), jax.devices("cpu")[0]
        pool = jax.eval_shape(lambda: empty_pool(shape, cache_format, device))
        q = jax.ShapeDtypeStruct((1, 1, keys.num_heads, keys.head_size), dtype)
        return fits_cpu_kernel(q, pool, pool, AttentionParams(1.0))

    return sum(any(map(is_supported, kind.mixers)) for kind in layers)


def attend_cpu(
    q: Float[Array, "B T N H"], pages: LayerPages, attention: AttentionParams, isa: str
) -> Float[Array, "B T N H"]:
    """Attend with the kernel of an instruction set to the pages of each row. Returns outputs in q's dtype.

    Tokens that are not real get zeros.
    """
    load_library()  # registers the handler that the program calls
    B, T, N, H = q.shape
    K, empty_sinks = pages.k.shape[0], np.zeros(0, np.float32)
    grouped = jax.ShapeDtypeStruct((B, T, K, N // K, H), q.dtype)
    tail = pages.tail or (
        np.zeros((B, 0, K, H), q.dtype),
        np.zeros((B, 0, K, H), q.dtype),
        np.zeros(0, np.int32),
    )
    sinks = empty_sinks if attention.sinks is None else attention.sinks.astype(jnp.float32)
    call = jax.ffi.ffi_call(ffi_target_name("attention", isa), grouped)
    out = call(q.reshape(grouped.shape), *pages[:5], sinks, *tail, **call_attributes(attention))
    return out.reshape(q.shape)


def call_attributes(attention: AttentionParams) -> dict[str, Any]:
    """Return the attributes of a kernel call. 0 stands for no cap and no window."""
    return {
        "scale": np.float32(attention.scale),
        "softcap": np.float32(attention.softcap or 0.0),
        "window": np.int64(attention.window or 0),
        "chunked": attention.chunked,
    }
