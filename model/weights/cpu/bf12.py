"""bfloat16 in 12 bits, without loss: a byte for sign and mantissa, and 4 bits for the exponent.

Most weights of a panel have one of 15 exponents. The others, its outliers, are stored separately, and kernels
write them into their positions. A step of few rows takes as long as the read of its weights. That exponents
have few bits of information is DFloat11's observation (Zhang et al., 2025), whose codes differ in length.
Codes of one length are decoded in registers.

The array, of uint16, has room for the panels in 16 bits, [panels, pairs of inputs, PANEL_COLUMNS, 2]. Behind
these it has a pair of inputs more, for the panels' exponents. Weights with many outliers stay in 16 bits,
since kernels would be slow with them. So the array's shape, for which programs are compiled, does not depend
on the weights.
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Bool, Int, UInt8, UInt16

BF12_LANES = 16  # outputs whose weights a kernel reads together
EXPONENT_CODES = 15  # exponents of a panel, without the one of zeros
MAX_OUTLIER_SHARE = 1 / 512  # share of all weights; with more, 16 bits are as fast
MAX_WEIGHTS = (1 << 31) - 1  # the index of an outlier must fit int32


def can_encode_bf12(panels: Any) -> bool:
    """Return True if panels are of bfloat16, and few enough that the index of an outlier fits int32."""
    return panels.dtype == jnp.bfloat16 and prod(panels.shape[-4:]) <= MAX_WEIGHTS


def encode_bf12(panels: Any) -> Any:
    """Encode panels [*experts, panels, pairs, C, 2], or a ShapeDtypeStruct, in an array of 12-bit weights."""
    *experts, P, pairs, C, _ = panels.shape
    shape = *experts, P, pairs + 1, C, 2
    if isinstance(panels, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, jnp.uint16, sharding=panels.sharding)
    encoded = np.zeros(shape, np.uint16)
    for expert in np.ndindex(*experts):
        write_bf12_panels(panels[expert], encoded[expert])
    return jax.device_put(encoded, panels.sharding)


def write_bf12_panels(
    panels: BFloat16[Array, "panels pairs C 2"], encoded: UInt16[np.ndarray, "panels more C 2"]
) -> None:
    """Write panels in 12 bits into the array `encoded`, or in 16 bits if they have many outliers."""
    coded, before, are_outliers = encode_panels(panels)
    numbers, places = np.asarray(panels).view(np.uint16).reshape(-1), np.flatnonzero(are_outliers)
    body, rest = np.split(encoded.reshape(-1), [numbers.size])
    exponents = rest[: 4 * len(panels)].view(np.int32).reshape(-1, 2)
    if len(places) > MAX_OUTLIER_SHARE * numbers.size:
        body[:], exponents[:, 0] = numbers, -1
        return
    weights, room = np.split(body.view(np.uint8), [coded.size])
    weights[:] = np.asarray(coded).reshape(-1)
    exponents[:, 0] = before
    exponents[:, 1] = np.searchsorted(places, numbers.size // len(panels) * np.arange(1, len(panels) + 1))
    outliers = room[: 8 * len(places)].view(np.uint32).reshape(-1, 2)
    outliers[:, 0], outliers[:, 1] = places, numbers[places]


@jax.jit
def encode_panels(
    panels: BFloat16[Array, "panels pairs C 2"],
) -> tuple[UInt8[Array, "panels pairs groups bytes"], Int[Array, " panels"], Bool[Array, "panels pairs C 2"]]:
    """Return the bytes of weights, the exponent below each panel's range, and the mask of outliers."""
    P, pairs = panels.shape[:2]
    bits = jax.lax.bitcast_convert_type(panels, jnp.uint16)
    exponents = bits >> 7 & 255
    before = jnp.maximum(jnp.max(exponents, (1, 2, 3), keepdims=True), EXPONENT_CODES) - EXPONENT_CODES
    are_outliers = (exponents > 0) & (exponents <= before)
    codes = jnp.maximum(exponents, before) - before
    rests = jnp.where(are_outliers, 0, bits >> 8 & 128 | bits & 127).reshape(P, pairs, -1, 2 * BF12_LANES)
    both = (codes[..., 0] | codes[..., 1] << 4).reshape(P, pairs, -1, BF12_LANES)
    coded = jnp.concatenate([rests, both], -1).astype(jnp.uint8)
    return coded, before[:, 0, 0, 0].astype(jnp.int32), are_outliers


def decode_bf12(array: UInt16[Array, "panels more C 2"]) -> BFloat16[Array, "panels pairs C 2"]:
    """Decode panels of 12-bit weights to bfloat16."""
    P, more, C, _ = array.shape
    size = P * (more - 1) * C * 2
    flat = array.reshape(-1)
    exponents = join_halves(flat[size : size + 4 * P]).astype(jnp.int32).reshape(P, 2)
    before, count = exponents[:, 0], exponents[-1, 1]
    body = jax.lax.bitcast_convert_type(flat[: size * 3 // 4], jnp.uint8)
    coded = body.reshape(P, -1, 3 * BF12_LANES).astype(jnp.uint16)
    rests, both = coded[..., : 2 * BF12_LANES], coded[..., 2 * BF12_LANES :]
    codes = jnp.stack([both & 15, both >> 4], -1).reshape(rests.shape)
    exponent = jnp.where(codes > 0, codes + before.astype(jnp.uint16)[:, None, None], 0)
    bits = ((rests & 128) << 8 | rests & 127 | exponent << 7).reshape(-1)
    outliers = join_halves(flat[size * 3 // 4 : size]).reshape(-1, 2)
    places = jnp.where(jnp.arange(len(outliers)) < count, outliers[:, 0].astype(jnp.int32), size)
    bits = bits.at[places].set(outliers[:, 1].astype(jnp.uint16), mode="drop")
    whole = jnp.where(before[0] < 0, flat[:size], bits)
    return jax.lax.bitcast_convert_type(whole, jnp.bfloat16).reshape(P, more - 1, C, 2)


def join_halves(halves: Any) -> Any:
    """Join pairs of uint16 to uint32."""
    return jax.lax.bitcast_convert_type(halves.reshape(-1, 2), jnp.uint32)
