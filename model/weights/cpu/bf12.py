"""bfloat16 in 12 bits, without loss: a byte for sign and mantissa, and 4 bits for the exponent.

Most weights of a panel have one of 15 exponents; the others, its outliers, lie apart, and kernels put them
into their places. A step of few rows takes as long as its weights take to be read. That exponents have few
bits of information is DFloat11's observation (Zhang et al., 2025), whose codes differ in length; those of
one length are decoded in registers.

The array, of whole numbers of 16 bits, has room for the panels as they were, [panels, pairs of inputs,
COLUMNS, 2], and behind all of them for the panels' exponents, a pair of inputs more. Weights with more
outliers than kernels are fast with stay as they were. So the array's shape, which programs are compiled for,
does not depend on the weights.
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Bool, Int, UInt8, UInt16

LANES = 16  # outputs whose weights a kernel reads together
CODES = 15  # exponents of a panel, besides that of zeros
MOST_OUTLIERS = 1 / 512  # of all weights: with more, those in 16 bits are multiplied as fast
MOST_WEIGHTS = (1 << 31) - 1  # an outlier's place must fit int32


def can_be_narrowed(panels: Any) -> bool:
    return panels.dtype == jnp.bfloat16 and prod(panels.shape[-4:]) <= MOST_WEIGHTS


def narrowed(panels: Any) -> Any:
    """Return panels [*experts, panels, pairs, C, 2], or a ShapeDtypeStruct, in an array for 12 bits."""
    *experts, P, pairs, C, _ = panels.shape
    shape = *experts, P, pairs + 1, C, 2
    if isinstance(panels, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, jnp.uint16, sharding=panels.sharding)
    made = np.zeros(shape, np.uint16)
    for expert in np.ndindex(*experts):
        narrow(panels[expert], made[expert])
    return jax.device_put(made, panels.sharding)


def narrow(panels: BFloat16[Array, "panels pairs C 2"], made: UInt16[np.ndarray, "panels more C 2"]) -> None:
    """Write panels in 12 bits into an array, or in 16 if they have many outliers."""
    coded, before, are_outliers = coded_panels(panels)
    numbers, places = np.asarray(panels).view(np.uint16).reshape(-1), np.flatnonzero(are_outliers)
    body, rest = np.split(made.reshape(-1), [numbers.size])
    exponents = rest[: 4 * len(panels)].view(np.int32).reshape(-1, 2)
    if len(places) > MOST_OUTLIERS * numbers.size:
        body[:], exponents[:, 0] = numbers, -1
        return
    weights, room = np.split(body.view(np.uint8), [coded.size])
    weights[:] = np.asarray(coded).reshape(-1)
    exponents[:, 0] = before
    exponents[:, 1] = np.searchsorted(places, numbers.size // len(panels) * np.arange(1, len(panels) + 1))
    outliers = room[: 8 * len(places)].view(np.uint32).reshape(-1, 2)
    outliers[:, 0], outliers[:, 1] = places, numbers[places]


@jax.jit
def coded_panels(
    panels: BFloat16[Array, "panels pairs C 2"],
) -> tuple[UInt8[Array, "panels pairs groups bytes"], Int[Array, " panels"], Bool[Array, "panels pairs C 2"]]:
    """Return the bytes of weights, the exponent before each panel's, and which weights are outliers."""
    P, pairs = panels.shape[:2]
    bits = jax.lax.bitcast_convert_type(panels, jnp.uint16)
    exponents = bits >> 7 & 255
    before = jnp.maximum(jnp.max(exponents, (1, 2, 3), keepdims=True), CODES) - CODES
    are_outliers = (exponents > 0) & (exponents <= before)
    codes = jnp.maximum(exponents, before) - before
    rests = jnp.where(are_outliers, 0, bits >> 8 & 128 | bits & 127).reshape(P, pairs, -1, 2 * LANES)
    both = (codes[..., 0] | codes[..., 1] << 4).reshape(P, pairs, -1, LANES)
    coded = jnp.concatenate([rests, both], -1).astype(jnp.uint8)
    return coded, before[:, 0, 0, 0].astype(jnp.int32), are_outliers


def widened(array: UInt16[Array, "panels more C 2"]) -> BFloat16[Array, "panels pairs C 2"]:
    """Return the panels that were narrowed."""
    P, more, C, _ = array.shape
    size = P * (more - 1) * C * 2
    flat = array.reshape(-1)
    exponents = as_words(flat[size : size + 4 * P]).astype(jnp.int32).reshape(P, 2)
    before, count = exponents[:, 0], exponents[-1, 1]
    body = jax.lax.bitcast_convert_type(flat[: size * 3 // 4], jnp.uint8)
    coded = body.reshape(P, -1, 3 * LANES).astype(jnp.uint16)
    rests, both = coded[..., : 2 * LANES], coded[..., 2 * LANES :]
    codes = jnp.stack([both & 15, both >> 4], -1).reshape(rests.shape)
    found = jnp.where(codes > 0, codes + before.astype(jnp.uint16)[:, None, None], 0)
    bits = ((rests & 128) << 8 | rests & 127 | found << 7).reshape(-1)
    outliers = as_words(flat[size * 3 // 4 : size]).reshape(-1, 2)
    places = jnp.where(jnp.arange(len(outliers)) < count, outliers[:, 0].astype(jnp.int32), size)
    bits = bits.at[places].set(outliers[:, 1].astype(jnp.uint16), mode="drop")
    whole = jnp.where(before[0] < 0, flat[:size], bits)
    return jax.lax.bitcast_convert_type(whole, jnp.bfloat16).reshape(P, more - 1, C, 2)


def as_words(halves: Any) -> Any:
    return jax.lax.bitcast_convert_type(halves.reshape(-1, 2), jnp.uint32)
