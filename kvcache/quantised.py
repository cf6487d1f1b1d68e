"""8-bit KV cache: every head of a token has codes and a scale of its own.

Codes and scale follow from the head's own numbers, so a token's bits depend neither on its neighbours in the
page nor on which step writes it. Scales are bfloat16: the range of float32, and an error that a code's hides.
Codes are decoded before they are multiplied; the product of a code and a scale is exact in float32.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from ..model.tree import pytree, static

SCALE = jnp.dtype(jnp.bfloat16)
SMALLEST = 1e-30  # scale; heads of zeros have it


class Scheme(NamedTuple):
    """The type of the codes, and the largest of them."""

    name: str
    dtype: Any
    most: float


SCHEMES = {
    "int8": Scheme("int8", jnp.dtype(jnp.int8), 127.0),
    "fp8_e4m3": Scheme("fp8_e4m3", jnp.dtype(jnp.float8_e4m3fn), 448.0),
    "fp8_e5m2": Scheme("fp8_e5m2", jnp.dtype(jnp.float8_e5m2), 57344.0),
}
SCHEMES["fp8"] = SCHEMES["fp8_e4m3"]  # vLLM's name for it
Kept = Any  # a Scheme, or the dtype of a pool that is an array


@pytree
class QuantisedPool:
    """Stands where a pool [K,P,W,H] stood: a number is its code times its head's scale.

    A piece of a pool, or new tokens, are the same record in another shape.
    """

    values: Any  # [K,P,W,H], codes; on CPUs the bits of float8
    scales: Any  # [K,P,W], bfloat16; on CPUs its bits
    scheme: str = static("int8")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


Pool = Shaped[Array, "K P W H"] | QuantisedPool  # on CPUs floats of 8 and 16 bits are their bits


def kept_as(kv_cache_dtype: str, dtype: Any) -> Kept:
    """Scheme or dtype of a cache for a value of `kv_cache_dtype`; "auto" is the computed dtype."""
    return SCHEMES.get(kv_cache_dtype, dtype)


def head_bytes(size: int, kept: Kept) -> int:
    """Bytes of one head of a token."""
    if isinstance(kept, Scheme):
        return size * kept.dtype.itemsize + SCALE.itemsize
    return size * jnp.dtype(kept).itemsize


def pool_dtype(dtype: Any, device: Any) -> Any:
    """The type of an array in a pool: a CPU keeps short floats as their bits, or XLA would widen the pool to
    write a token."""
    dtype = jnp.dtype(dtype)
    bits = {1: jnp.uint8, 2: jnp.uint16}.get(dtype.itemsize)
    if device is None or device.platform != "cpu" or bits is None or dtype.kind == "i":
        return dtype
    return jnp.dtype(bits)


def as_dtype(x: Shaped[Array, "*shape"], dtype: Any) -> Shaped[Array, "*shape"]:
    """Numbers as a pool's bits, or a pool's bits as numbers."""
    bits = (jnp.uint8, jnp.uint16)
    if x.dtype == dtype or not (x.dtype in bits or dtype in bits):
        return x.astype(dtype)
    return jax.lax.bitcast_convert_type(x, dtype)


def empty_pool(shape: tuple[int, ...], kept: Kept, device: Any = None) -> Pool:
    """A pool of zeros, as a device keeps it; without one, as the dtype says."""
    if not isinstance(kept, Scheme):
        return jnp.zeros(shape, pool_dtype(kept, device))
    values = jnp.zeros(shape, pool_dtype(kept.dtype, device))
    return QuantisedPool(values, jnp.zeros(shape[:-1], pool_dtype(SCALE, device)), kept.name)


def encoded(pool: Pool, x: Float[Array, "*heads H"]) -> Float[Array, "*heads H"] | QuantisedPool:
    """New numbers as the pool will keep them, but for their bits."""
    if not isinstance(pool, QuantisedPool):
        return x
    scheme, x = SCHEMES[pool.scheme], x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(x), axis=-1)
    scales = jnp.maximum(largest * jnp.float32(1 / scheme.most), SMALLEST).astype(SCALE)
    codes = jnp.clip(x / scales.astype(jnp.float32)[..., None], -scheme.most, scheme.most)
    codes = jnp.round(codes) if scheme.dtype.kind == "i" else codes
    return QuantisedPool(codes.astype(scheme.dtype), scales, pool.scheme)


def decoded(kept: Shaped[Array, "*heads H"] | QuantisedPool, dtype: Any) -> Float[Array, "*heads H"]:
    """Numbers of what was read from a pool."""
    if not isinstance(kept, QuantisedPool):
        return as_dtype(kept, dtype)
    codes = as_dtype(kept.values, SCHEMES[kept.scheme].dtype).astype(jnp.float32)
    return (codes * as_dtype(kept.scales, SCALE).astype(jnp.float32)[..., None]).astype(dtype)


def read_back(pool: Pool, x: Float[Array, "*heads H"]) -> Float[Array, "*heads H"]:
    """New numbers as they will be read from the pool."""
    return decoded(encoded(pool, x), x.dtype)
