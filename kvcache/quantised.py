"""8-bit KV cache: every head of a token has codes and a scale of its own.

Codes and scale follow from the head's own numbers. So a token's bits depend neither on its neighbours in the
page nor on the step that writes it. Scales are bfloat16, which has the range of float32. Its rounding error
is smaller than that of a code. Codes are decoded before they are multiplied; the product of a code and a
scale is exact in float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from ..model.tree import pytree, static

SCALE_DTYPE = jnp.dtype(jnp.bfloat16)
MIN_SCALE = 1e-30  # scale of a head of zeros


class Scheme(NamedTuple):
    """8-bit format of a cache.

    name: value of `kv_cache_dtype`
    dtype: type of the codes
    max_code: largest code
    """

    name: str
    dtype: Any
    max_code: float


SCHEMES = {
    "int8": Scheme("int8", jnp.dtype(jnp.int8), 127.0),
    "fp8_e4m3": Scheme("fp8_e4m3", jnp.dtype(jnp.float8_e4m3fn), 448.0),
    "fp8_e5m2": Scheme("fp8_e5m2", jnp.dtype(jnp.float8_e5m2), 57344.0),
}
SCHEMES["fp8"] = SCHEMES["fp8_e4m3"]  # vLLM's name for it
CacheFormat = Any  # a Scheme, or the dtype of a pool without codes


@pytree
class QuantisedPool:
    """Pool of 8-bit codes with one scale per head and token, in place of an array [K,P,W,H]. A number is its
    code times its head's scale.

    A part of a pool, or new tokens, are this record in another shape.
    """

    values: Any  # [K,P,W,H], codes; on CPUs float8 is uint8
    scales: Any  # [K,P,W], bfloat16; on CPUs uint16
    scheme: str = static("int8")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the codes."""
        return self.values.shape


Pool = Shaped[Array, "K P W H"] | QuantisedPool  # on CPUs, 8-bit and 16-bit floats are unsigned integers


def choose_cache_format(kv_cache_dtype: str, dtype: Any) -> CacheFormat:
    """Return the format of a cache for an option value `kv_cache_dtype`: a Scheme, or a dtype; "auto" is the
    dtype of the computation."""
    return SCHEMES.get(kv_cache_dtype, dtype)


def head_bytes(size: int, cache_format: CacheFormat) -> int:
    """Return the bytes of one head of a token with `size` numbers."""
    if isinstance(cache_format, Scheme):
        return size * cache_format.dtype.itemsize + SCALE_DTYPE.itemsize
    return size * jnp.dtype(cache_format).itemsize


def pool_dtype(dtype: Any, device: Any) -> Any:
    """Return the dtype of a pool's array. A CPU keeps 8-bit and 16-bit floats as unsigned integers. Otherwise
    XLA would convert the whole pool to float32 to write a token."""
    dtype = jnp.dtype(dtype)
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(dtype.itemsize)
    if device is None or device.platform != "cpu" or bits is None or dtype.kind == "i":
        return dtype
    return jnp.dtype(bits)


def cast_bits(x: Shaped[Array, "*shape"], dtype: Any) -> Shaped[Array, "*shape"]:
    """Convert numbers to a dtype. To or from a pool's unsigned integers, this is a bitcast."""
    bits = (jnp.uint8, jnp.uint16)
    if x.dtype == dtype or not (x.dtype in bits or dtype in bits):
        return x.astype(dtype)
    return jax.lax.bitcast_convert_type(x, dtype)


def empty_pool(shape: tuple[int, ...], cache_format: CacheFormat, device: Any = None) -> Pool:
    """Make a pool of zeros in the layout of a device; without a device, in the dtype itself."""
    if not isinstance(cache_format, Scheme):
        return jnp.zeros(shape, pool_dtype(cache_format, device))
    values = jnp.zeros(shape, pool_dtype(cache_format.dtype, device))
    return QuantisedPool(values, jnp.zeros(shape[:-1], pool_dtype(SCALE_DTYPE, device)), cache_format.name)


def quantise_heads(pool: Pool, x: Float[Array, "*heads H"]) -> Float[Array, "*heads H"] | QuantisedPool:
    """Quantise new heads as their pool keeps them; a pool without codes leaves them as they are. The bitcast
    to a CPU's integers comes later."""
    if not isinstance(pool, QuantisedPool):
        return x
    scheme, x = SCHEMES[pool.scheme], x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    scales = jnp.maximum(largest * jnp.float32(1 / scheme.max_code), MIN_SCALE).astype(SCALE_DTYPE)
    codes = jnp.clip(x / scales.astype(jnp.float32)[..., None], -scheme.max_code, scheme.max_code)
    codes = jnp.round(codes) if scheme.dtype.kind == "i" else codes
    return QuantisedPool(codes.astype(scheme.dtype), scales, pool.scheme)


def dequantise_heads(
    pool_part: Shaped[Array, "*heads H"] | QuantisedPool, dtype: Any
) -> Float[Array, "*heads H"]:
    """Return the numbers of a part of a pool, in `dtype`."""
    if not isinstance(pool_part, QuantisedPool):
        return cast_bits(pool_part, dtype)
    codes = cast_bits(pool_part.values, SCHEMES[pool_part.scheme].dtype).astype(jnp.float32)
    return (codes * cast_bits(pool_part.scales, SCALE_DTYPE).astype(jnp.float32)[..., None]).astype(dtype)


def round_to_pool(pool: Pool, x: Float[Array, "*heads H"]) -> Float[Array, "*heads H"]:
    """Round new heads to the numbers that will later be read from the pool."""
    return dequantise_heads(quantise_heads(pool, x), x.dtype)
