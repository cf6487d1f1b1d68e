"""Searches and sums of a whole vocabulary that no batch's shape changes: by chunks, in a fixed order."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from ..model.sharding import automatic_axes, on_several_devices, ways

INFINITY = 0x7F800000  # the bits of float32's infinity
BITS, DIGIT = 31, 4  # of a non-negative float32, and of one pass over a vocabulary on a GPU
T = TypeVar("T")
Ends = tuple[Int[Array, " B"], Int[Array, " B"]]  # of what each row's search has left


def argmax(x: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The first of the largest; on several devices each looks through the part that it holds."""
    return by_parts(argmax_of_parts, x) if can_part(x) else argmax_here(x)


def argmax_here(x: Float[Array, "B V"]) -> Int[Array, " B"]:
    """The same of what is whole on each device: first the chunk that holds the largest, then its place there.
    Plain reductions without temporaries of x's size; XLA's own reduction of (value, index) pairs is several
    times slower on a CPU."""
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


# ---------------------------------------------------------------- on several devices


def whole(x: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """x with all of V on each device, before what would exchange it again and again. A constraint on its
    sharding would reach back to the product that x is, and gather the weight."""

    def gathered(x: Float[Array, "B part"], axes: tuple[str, ...]) -> Float[Array, "B V"]:
        return jax.lax.all_gather(x, axes, axis=1, tiled=True)

    return by_parts(gathered, x) if can_part(x) else x


def argmax_of_parts(x: Float[Array, "B part"], axes: tuple[str, ...]) -> Int[Array, " B"]:
    """Argmax over devices: the first largest of the devices' own."""
    own = argmax_here(x)
    value = jnp.take_along_axis(x, own[:, None], axis=1)[:, 0]
    ids = own + jax.lax.axis_index(axes).astype(jnp.int32) * x.shape[1]
    bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    found = jax.lax.all_gather(jnp.stack([bits, ids]), axes)  # [devices,2,B]
    values = jax.lax.bitcast_convert_type(found[:, 0], jnp.float32)
    return jnp.take_along_axis(found[:, 1], first_largest(values.T)[None], axis=0)[0]


def can_part(x: Float[Array, "B V"]) -> bool:
    mesh = jax.typeof(x).sharding.mesh
    return on_several_devices(x) and x.shape[1] % ways(mesh, automatic_axes(mesh)) == 0


def by_parts(work: Callable[[Float[Array, "B part"], tuple[str, ...]], T], x: Float[Array, "B V"]) -> T:
    """Run `work` on every device's part of V; it exchanges results itself."""
    mesh = jax.typeof(x).sharding.mesh
    axes, everywhere = automatic_axes(mesh), PartitionSpec()
    split = PartitionSpec(None, axes)

    def local(x: Float[Array, "B part"]) -> T:
        return work(x, axes)

    apart = jax.shard_map(
        local, mesh=mesh, in_specs=split, out_specs=everywhere, axis_names=set(axes), check_vma=False
    )
    return apart(x)


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
    """`by_halves` without a loop: a radix select, DIGIT bits a pass. A digit is the number of borders, among
    those that its bits tell apart, that are too near."""
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
