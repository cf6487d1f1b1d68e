"""Searches and sums of a whole vocabulary that no batch's shape changes: by chunks, in a fixed order."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Num

INFINITY = 0x7F800000  # the bits of float32's infinity
BITS, DIGIT = 31, 4  # of a non-negative float32, and of one pass over a vocabulary on a GPU
Ends = tuple[Int[Array, " B"], Int[Array, " B"]]  # of what each row's search has left


def argmax(x: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The first of the largest: the first chunk that holds it, then its place there. Plain reductions without
    temporaries of x's size; XLA's own reduction of (value, index) pairs is several times slower on a CPU."""
    B, V = x.shape
    width = chunk_width(V)
    chunks = x.reshape(B, V // width, width)
    chunk = first_largest(jnp.max(chunks, axis=-1))
    return chunk * width + first_largest(jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0])


def largest(x: Float[Array, "B V"], n: int) -> tuple[Float[Array, "B {n}"], Int[Array, "B {n}"]]:
    """The n largest and their ids, equal ones in order of their ids: they lie in the n chunks of the largest
    maxima, so that no row is sorted as a whole (what `lax.top_k` does on a GPU)."""
    B, V = x.shape
    width = chunk_width(V)
    chunks = x.reshape(B, V // width, width)
    _, best = jax.lax.top_k(jnp.max(chunks, axis=-1), min(n, V // width))
    best = jnp.sort(best, axis=-1)
    values, place = jax.lax.top_k(jnp.take_along_axis(chunks, best[:, :, None], axis=1).reshape(B, -1), n)
    return values, jnp.take_along_axis(best, place // width, axis=1) * width + place % width


def first_largest(x: Float[Array, "B chunk"]) -> Int[Array, " B"]:
    n = x.shape[1]
    ids = jnp.where(
        x == jnp.max(x, axis=-1, keepdims=True), jax.lax.broadcasted_iota(jnp.int32, x.shape, 1), n
    )
    return jnp.minimum(jnp.min(ids, axis=-1), n - 1)  # where all are NaN, the last


def chunk_width(V: int) -> int:
    """The divisor of V that splits it most evenly; 1 for a prime."""
    return max(width for width in range(1, math.isqrt(V) + 1) if V % width == 0)


# ---------------------------------------------------------------- the nearest ids that weigh enough


def by_halves(
    distance: Int[Array, "B V"], weight: Num[Array, "B V"], goal: Num[Array, " B"]
) -> Int[Array, " B"]:
    """The smallest border within which the weights reach each row's goal, INFINITY where none does; distances
    are the bits of non-negative floats. A loop halves what is left, a pass over the vocabulary for each
    bit."""

    def halve(_, ends: Ends) -> Ends:
        low, high = ends
        middle = low + (high - low) // 2
        inside = distance <= middle[:, None]
        enough = jnp.sum(jnp.where(inside, weight, jnp.zeros_like(weight)), axis=-1) >= goal
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    nearest = jnp.zeros(len(goal), jnp.int32)
    return jax.lax.fori_loop(0, BITS, halve, (nearest, nearest + INFINITY))[1]


def by_digits(
    distance: Int[Array, "B V"], weight: Num[Array, "B V"], goal: Num[Array, " B"]
) -> Int[Array, " B"]:
    """The same without a loop, DIGIT bits a pass (a radix select): of the borders that these bits tell apart,
    so many are too near as the digit says."""
    border, left = jnp.zeros(len(goal), jnp.int32), BITS
    while left:
        digit = (left - 1) % DIGIT + 1
        left -= digit
        tried = [border + (i << left) - 1 for i in range(1, 1 << digit)]
        near = [found < goal for found in weights_within(distance, weight, tried)]
        border += jnp.sum(jnp.stack(near), axis=0, dtype=jnp.int32) << left
    return jnp.minimum(border, INFINITY)


def weights_within(
    distance: Int[Array, "B V"], weight: Num[Array, "B V"], borders: Sequence[Int[Array, " B"]]
) -> Sequence[Num[Array, " B"]]:
    """Sums of the weights within several borders: one reduction, which reads the vocabulary once."""
    zero = jnp.zeros((), weight.dtype)
    parts = tuple(jnp.where(distance <= border[:, None], weight, zero) for border in borders)
    return jax.lax.reduce(parts, (zero,) * len(parts), lambda a, b: tuple(map(jnp.add, a, b)), (1,))


# ---------------------------------------------------------------- sums that no batch's shape changes


def fixed_point(x: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """Probabilities of log-weights in units of 2**-30."""
    weight = jnp.exp(x)
    return jnp.round(weight * (2.0**30 / pairwise_sum(weight))).astype(jnp.int32)


def pairwise_sum(x: Float[Array, "B V"]) -> Float[Array, "B 1"]:
    """Sums of the rows, added in an order that V alone decides; a device's own may depend on B too."""
    while x.shape[1] > 1:
        half = (x.shape[1] + 1) // 2
        x = x[:, :half] + jnp.pad(x[:, half:], ((0, 0), (0, 2 * half - x.shape[1])))
    return x
