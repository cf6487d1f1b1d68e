"""Quantisation schemes of weights and of their inputs, one record each: how numbers become codes and scales,
and codes numbers again.

A new scheme of weights is a new record in `SCHEMES`. Its name is a value of the option `quantization`, or the
scheme in which a format of `checkpoints/quantised` reads its codes. One of inputs is a record in
`ACTIVATION_SCHEMES`, and a value of the option `activations`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Num, UInt8

from .nibbles import FP4_NIBBLES, INT4_NIBBLES, ZERO_CODE, NibbleFormat, pack_nibbles

# numbers along the packed axis that share a four-bit scale: the largest that divides
GROUP_SIZES = (32, 16, 8, 4, 2)


class EncodedWeight(NamedTuple):
    """Codes and scales of a weight.

    values: codes; of four bits, two neighbours along an axis in a byte.
    scales: scales, in the weight's axes.
    packed: axis along which a byte holds two codes, counted from the last.
    """

    values: Any
    scales: Any
    packed: int = -1


@dataclass(frozen=True, eq=False)  # records are compared and hashed as objects
class WeightScheme:
    """Quantisation scheme of weights.

    name: key in `SCHEMES`.
    widen: converts codes, one in each entry, and the zeros of their blocks (or None) to the numbers that
        scales multiply.
    encode: encodes a float32 weight whose products sum over axes counted from the last; None if it cannot.
        A scheme without `encode` only comes in checkpoints.
    random_values: mean and deviation of the values of random weights.
    code_deviation: deviation of the codes of such values.
    nibble_format: how GPU kernels widen 4-bit codes, two in a byte. None: codes have 8 bits.
    has_cpu_kernel: True if duetto's CPU kernels multiply the codes.
    activations: schemes of inputs whose codes are multiplied by these codes.
    """

    name: str
    widen: Callable[[Num[Array, "..."], Num[Array, "..."] | None], Num[Array, "..."]]
    encode: Callable[[Float[Array, "..."], tuple[int, ...]], EncodedWeight | None] | None = None
    random_values: tuple[float, float] = (0.0, 1.0)
    code_deviation: float = 1.0
    nibble_format: NibbleFormat | None = None
    has_cpu_kernel: bool = False
    activations: tuple[str, ...] = ()

    @property
    def codes_per_byte(self) -> int:
        return 1 if self.nibble_format is None else 2


@dataclass(frozen=True)
class ActivationScheme:
    """Quantisation scheme of a product's input. Each row has a float32 scale of its own.

    name: key in `ACTIVATION_SCHEMES`.
    dtype: dtype of the codes.
    max_code: code of a row's largest magnitude.
    """

    name: str
    dtype: Any
    max_code: float

    @property
    def min_magnitude(self) -> float:
        """Return the largest magnitude of which `max_code` is no finite multiple in float32."""
        return self.max_code / float(jnp.finfo(jnp.float32).max)


def encode_by_channel(
    w: Float[Array, "*shape"], contracted: tuple[int, ...], dtype: Any, max_code: float
) -> EncodedWeight:
    """Encode a weight in codes of one byte, with a scale for each output channel."""
    scales = replace_zeros(jnp.max(jnp.abs(w), axis=contracted, keepdims=True) / max_code)
    codes = jnp.clip(w / scales, -max_code, max_code)
    return EncodedWeight(
        (jnp.round(codes) if jnp.issubdtype(dtype, jnp.integer) else codes).astype(dtype), scales
    )


def encode_by_group(w: Float[Array, "*shape"], contracted: tuple[int, ...]) -> EncodedWeight | None:
    """Encode a weight in integers of four bits, with a bfloat16 scale for each group along an axis.

    It is the last one of `contracted`. Returns None if its numbers cannot be paired.
    """
    axis = contracted[-1]
    group = next((g for g in GROUP_SIZES if w.shape[axis] % g == 0), None)
    if group is None:
        return None
    scales = compute_group_scales(w, axis % w.ndim, group)
    codes = jnp.clip(jnp.round(w / spread_blocks(scales.astype(jnp.float32), w.shape)) + 8, 0, 15)
    return EncodedWeight(pack_nibbles(codes.astype(jnp.uint8), axis), scales, axis)


def widen_bytes(codes: Num[Array, "*shape"], zeros: Num[Array, "*blocks"] | None) -> Num[Array, "*shape"]:
    """Return codes of one byte less their zeros, if there are any."""
    if zeros is None:
        return codes
    return codes.astype(jnp.int16) - spread_blocks(zeros.astype(jnp.int16), codes.shape)


def widen_int4(codes: UInt8[Array, "*shape"], zeros: Num[Array, "*blocks"] | None) -> Num[Array, "*shape"]:
    """Return codes 0..15 less their zeros, or less `ZERO_CODE`."""
    offsets = jnp.int8(ZERO_CODE) if zeros is None else spread_blocks(zeros.astype(jnp.int8), codes.shape)
    return codes.astype(jnp.int8) - offsets


def widen_fp4(codes: UInt8[Array, "*shape"], zeros: Num[Array, "*blocks"] | None) -> Num[Array, "*shape"]:
    """Decode 4-bit floats, which have no zeros."""
    return decode_e2m1(codes)


def replace_zeros(scales: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Replace scales of zero by one."""
    return jnp.where(scales == 0, 1, scales)


def compute_group_scales(w: Float[Array, "..."], axis: int, group: int) -> Float[Array, "..."]:
    """Return a bfloat16 scale for each group of numbers along an axis: its largest number, signed, becomes
    -8."""
    shape = (*w.shape[:axis], w.shape[axis] // group, group, *w.shape[axis + 1 :])
    groups = w.reshape(shape)
    low, high = groups.min(axis + 1), groups.max(axis + 1)
    return replace_zeros(jnp.where(-low > high, low, high) / -8).astype(jnp.bfloat16)


def spread_blocks(blocks: Num[Array, "..."], shape: tuple[int, ...]) -> Num[Array, "..."]:
    """Repeat each entry over its block of an array of this shape."""
    if blocks.shape == shape:
        return blocks
    pairs = [(n, size // n) for n, size in zip(blocks.shape, shape, strict=True)]
    single = blocks.reshape([size for n, _ in pairs for size in (n, 1)])
    return jnp.broadcast_to(single, [size for pair in pairs for size in pair]).reshape(shape)


def decode_e2m1(codes: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Decode 4-bit floats: a sign, two bits of exponent, one of mantissa. They are 0, 0.5, 1, 1.5, 2, 3, 4,
    6."""
    size, exponent = codes & jnp.uint8(7), (codes & jnp.uint8(7)) >> jnp.uint8(1)
    normal = ((size & jnp.uint8(1)) | jnp.uint8(2)) << (jnp.maximum(exponent, jnp.uint8(1)) - jnp.uint8(1))
    halves = jnp.where(exponent == 0, size, normal).astype(jnp.float32)
    return jnp.where(codes < 8, halves, -halves) * 0.5


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        WeightScheme(
            "int8",
            widen_bytes,
            partial(encode_by_channel, dtype=jnp.int8, max_code=127.0),
            random_values=(0.0, 32.0),
            code_deviation=32.0,
            has_cpu_kernel=True,
            activations=("int8",),
        ),
        WeightScheme(
            "int4",
            widen_int4,
            encode_by_group,
            random_values=(128.0, 32.0),
            code_deviation=4.0,
            nibble_format=INT4_NIBBLES,
            has_cpu_kernel=True,
            activations=("int8",),
        ),
        WeightScheme(
            "fp8",
            widen_bytes,
            partial(encode_by_channel, dtype=jnp.float8_e4m3fn, max_code=448.0),
            random_values=(0.0, 64.0),
            code_deviation=64.0,
            activations=("fp8",),
        ),
        WeightScheme("fp4", widen_fp4, nibble_format=FP4_NIBBLES),
    )
}
ACTIVATION_SCHEMES = {
    scheme.name: scheme
    for scheme in (
        ActivationScheme("int8", jnp.int8, 127.0),
        ActivationScheme("fp8", jnp.float8_e4m3fn, 448.0),
    )
}
# Schemes in which weights can be quantised; the others only come in checkpoints.
ENCODED_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if scheme.encode is not None)
