"""Searches and sums over a whole vocabulary, by chunks in a fixed order, so that a batch's shape changes no
bit."""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Num

from ..model.gpus import target_device
from ..model.sharding import automatic_axes, is_multi_device, num_splits
from .params import NAN_TOKEN

INFINITY_BITS = 0x7F800000  # bits of float32's infinity
FLOAT_BITS, DIGIT_BITS = 31, 4  # bits of a non-negative float32; bits that one pass over a vocabulary finds
T = TypeVar("T")
# lowest and highest border that each row's search has left
SearchEnds = tuple[Int[Array, " B"], Int[Array, " B"]]


def argmax(x: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Return the id of each row's first largest logit, or NAN_TOKEN. Several devices each search the part
    that they hold."""
    return map_vocab_parts(argmax_over_devices, x) if can_split_vocab(x) else argmax_unsharded(x)


def argmax_unsharded(x: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Return the id of each row's first largest logit, of rows that are whole on each device. NAN_TOKEN where
    the largest is NaN or infinite."""
    return id_or_nan_token(*argmax_and_value(x))


def argmax_and_value(x: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Return the id of each row's first largest logit, and that logit. In a row with NaN the value is
    infinite or NaN, the id arbitrary.

    First the chunk with the largest logit is found, then the place in this chunk. Both are plain reductions,
    without temporaries of x's size. XLA's own reduction of (value, index) pairs is several times slower on a
    CPU.
    """
    B, V = x.shape
    width = chunk_width(V)
    chunks = x.reshape(B, V // width, width)
    tops = max_or_nonfinite(chunks)
    chunk = first_max_index(tops)
    place = first_max_index(jnp.take_along_axis(chunks, chunk[:, None, None], axis=1)[:, 0])
    return chunk * width + place, jnp.max(tops, axis=-1)


def max_or_nonfinite(x: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Return the largest number of each row; infinity or NaN where one is NaN.

    XLA's reduction on a CPU drops NaN, so infinity takes its place; the selection is fused into the
    reduction. On a GPU XLA would write a mask of x's size. Reductions of GPUs and TPUs propagate NaN.
    """
    if target_device().platform == "cpu":
        x = jnp.where(jnp.isnan(x), jnp.inf, x)
    return jnp.max(x, axis=-1)


def id_or_nan_token(ids: Int[Array, " B"], largest: Float[Array, " B"]) -> Int[Array, " B"]:
    """Return the ids, or NAN_TOKEN where a row's largest logit is infinite or NaN."""
    return jnp.where(jnp.isfinite(largest), ids, NAN_TOKEN)


def top_logits(x: Float[Array, "B V"], n: int) -> tuple[Float[Array, "B {n}"], Int[Array, "B {n}"]]:
    """Return the n largest numbers and their ids; equal numbers are in order of their ids. They are in the n
    chunks with the largest maxima. So no whole row is sorted, as `lax.top_k` does on a GPU."""
    B, V = x.shape
    width = chunk_width(V)
    chunks = x.reshape(B, V // width, width)
    _, best = jax.lax.top_k(jnp.max(chunks, axis=-1), min(n, V // width))
    best = jnp.sort(best, axis=-1)
    values, place = jax.lax.top_k(jnp.take_along_axis(chunks, best[:, :, None], axis=1).reshape(B, -1), n)
    return values, jnp.take_along_axis(best, place // width, axis=1) * width + place % width


def first_max_index(x: Float[Array, "B chunk"]) -> Int[Array, " B"]:
    """Return the index of the first largest number of each row."""
    n = x.shape[1]
    ids = jnp.where(
        x == jnp.max(x, axis=-1, keepdims=True), jax.lax.broadcasted_iota(jnp.int32, x.shape, 1), n
    )
    return jnp.minimum(jnp.min(ids, axis=-1), n - 1)  # the last if all are NaN


def chunk_width(V: int) -> int:
    """Return the divisor of V nearest to its square root from below; 1 for a prime."""
    return max(width for width in range(1, math.isqrt(V) + 1) if V % width == 0)


# ---------------------------------------------------------------- on several devices


def gather_vocab(x: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """All-gather the vocabulary on each device, before a computation that would gather it again and again. A
    sharding constraint would propagate back to the matrix product that x is, and gather the weight."""

    def gather_parts(x: Float[Array, "B part"], axes: tuple[str, ...]) -> Float[Array, "B V"]:
        """All-gather the parts of the devices."""
        return jax.lax.all_gather(x, axes, axis=1, tiled=True)

    return map_vocab_parts(gather_parts, x) if can_split_vocab(x) else x


def argmax_over_devices(x: Float[Array, "B part"], axes: tuple[str, ...]) -> Int[Array, " B"]:
    """Return the argmax over devices: each finds its part's first largest logit, and the first largest of
    these wins."""
    ids_here, value = argmax_and_value(x)
    ids = ids_here + jax.lax.axis_index(axes).astype(jnp.int32) * x.shape[1]
    bits = jax.lax.bitcast_convert_type(value, jnp.int32)
    gathered = jax.lax.all_gather(jnp.stack([bits, ids]), axes)  # [devices,2,B]
    values = jax.lax.bitcast_convert_type(gathered[:, 0], jnp.float32)
    first = jnp.take_along_axis(gathered[:, 1], first_max_index(values.T)[None], axis=0)[0]
    return id_or_nan_token(first, jnp.max(values, axis=0))


def can_split_vocab(x: Float[Array, "B V"]) -> bool:
    """True if several devices can each hold an equal part of the vocabulary."""
    mesh = jax.typeof(x).sharding.mesh
    return is_multi_device(x) and x.shape[1] % num_splits(mesh, automatic_axes(mesh)) == 0


def map_vocab_parts(
    work: Callable[[Float[Array, "B part"], tuple[str, ...]], T], x: Float[Array, "B V"]
) -> T:
    """Run `work` on every device's part of the vocabulary. `work` must exchange results itself."""
    mesh = jax.typeof(x).sharding.mesh
    axes, replicated = automatic_axes(mesh), PartitionSpec()
    parts_spec = PartitionSpec(None, axes)

    def run_on_part(x: Float[Array, "B part"]) -> T:
        return work(x, axes)

    mapped = jax.shard_map(
        run_on_part,
        mesh=mesh,
        in_specs=parts_spec,
        out_specs=replicated,
        axis_names=set(axes),
        check_vma=False,
    )
    return mapped(x)


# ---------------------------------------------------------------- borders of the tokens that are kept


def threshold_by_bisection(
    distance: Int[Array, "B V"], weight: Num[Array, "B V"], goal: Num[Array, " B"]
) -> Int[Array, " B"]:
    """Return the smallest border within which the weights reach each row's goal; `INFINITY_BITS` where none
    does. Distances and borders are the bits of non-negative floats. Bisection: a loop reads the vocabulary
    once for each bit."""

    def halve(_, ends: SearchEnds) -> SearchEnds:
        """Halve the range of each row's border."""
        low, high = ends
        middle = low + (high - low) // 2
        inside = distance <= middle[:, None]
        enough = jnp.sum(jnp.where(inside, weight, jnp.zeros_like(weight)), axis=-1) >= goal
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    nearest = jnp.zeros(len(goal), jnp.int32)
    return jax.lax.fori_loop(0, FLOAT_BITS, halve, (nearest, nearest + INFINITY_BITS))[1]


def threshold_by_radix(
    distance: Int[Array, "B V"], weight: Num[Array, "B V"], goal: Num[Array, " B"]
) -> Int[Array, " B"]:
    """Return the result of `threshold_by_bisection` without a loop, by radix select. Each pass finds
    `DIGIT_BITS` more bits: it counts the candidate borders whose weight is below the goal."""
    border, left = jnp.zeros(len(goal), jnp.int32), FLOAT_BITS
    while left:
        digit = (left - 1) % DIGIT_BITS + 1
        left -= digit
        tried = [border + (i << left) - 1 for i in range(1, 1 << digit)]
        near = [total < goal for total in weight_sums_within(distance, weight, tried)]
        border += jnp.sum(jnp.stack(near), axis=0, dtype=jnp.int32) << left
    return jnp.minimum(border, INFINITY_BITS)


def weight_sums_within(
    distance: Int[Array, "B V"], weight: Num[Array, "B V"], borders: Sequence[Int[Array, " B"]]
) -> Sequence[Num[Array, " B"]]:
    """Return the sums of the weights within several borders. One reduction reads the vocabulary once."""
    zero = jnp.zeros((), weight.dtype)
    parts = tuple(jnp.where(distance <= border[:, None], weight, zero) for border in borders)
    return jax.lax.reduce(parts, (zero,) * len(parts), lambda a, b: tuple(map(jnp.add, a, b)), (1,))


# ---------------------------------------------------------------- sums that no batch's shape changes


def fixed_point_probs(x: Float[Array, "B V"]) -> Int[Array, "B V"]:
    """Convert log-weights to probabilities in units of 2**-30, rounded."""
    weight = jnp.exp(x)
    return jnp.round(weight * (2.0**30 / pairwise_sum(weight))).astype(jnp.int32)


def pairwise_sum(x: Float[Array, "B V"]) -> Float[Array, "B 1"]:
    """Add up each row, in an order that depends on V alone. XLA's own reduction may depend on B too."""
    while x.shape[1] > 1:
        half = (x.shape[1] + 1) // 2
        x = x[:, :half] + jnp.pad(x[:, half:], ((0, 0), (0, 2 * half - x.shape[1])))
    return x
