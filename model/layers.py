"""Small pure functions that every decoder is made of."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .config import NormKind
from .gpus import has_gpu_compiler
from .tree import Spec, pytree
from .weights.grouped_matmul import choose_expert_kernel


@pytree
class Norm:
    """Gain and bias of a normalisation, or None for what it lacks."""

    gain: Any  # [D]
    bias: Any = None  # [D]


def norm_spec(kind: NormKind, size: int) -> Norm:
    """Return the specs of a norm of `size` numbers."""
    gain = Spec((size,), ("model",), mean=1.0 - kind.offset, scale=0.0) if kind.gain else None
    return Norm(gain, Spec((size,), ("model",), scale=0.0) if kind.bias else None)


@runtime_checkable
class Weight(Protocol):
    """A record that stands in the tree of parameters in place of an array, and multiplies in its place."""

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """Compute the product of x and this weight, in x's dtype or another."""
        ...

    def ragged_dot(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], row_experts: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Multiply consecutive rows by one expert's matrix each, as `ragged_dot`.

        sizes: number of rows of each expert.
        row_experts: expert of each row.
        """
        ...

    @property
    def ragged_dot_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays that `ragged_dot` multiplies rows by."""
        ...


@runtime_checkable
class JointWeight(Weight, Protocol):
    """A weight that multiplies the same rows together with other weights in one call."""

    def joint_einsum(
        self, equation: str, x: Float[Array, "..."], others: Sequence[Any]
    ) -> list[Float[Array, "..."]]:
        """Return the products of x with this weight and with the others."""
        ...


@runtime_checkable
class MappingWeight(Weight, Protocol):
    """A weight that multiplies a function of arrays, and may compute it where it reads them."""

    def mapped_einsum(
        self, equation: str, function: Callable[..., Any], inputs: Sequence[Float[Array, "..."]]
    ) -> Float[Array, "..."]:
        """Compute the product of a function of arrays, entry by entry.

        Of zeros it is 0, and Triton's compiler has all its operations.
        """
        ...


@runtime_checkable
class PerRowWeight(Weight, Protocol):
    """A weight that differs for each row of a batch. `base` is the part that all rows share."""

    base: Any

    def select_rows(self, rows: Int[Array, " rows"]) -> Weight:
        """Return the weight for a batch of these rows alone."""
        ...

    def select_tokens(self, tokens: Int[Array, " rows"], count: int) -> "PerRowWeight":
        """Return the weight for rows that are these tokens of a batch of `count` tokens."""
        ...

    def select_expert(self, e: Int[Array, ""]) -> "PerRowWeight":
        """Return the weight of expert e, if experts stand side by side."""
        ...


@runtime_checkable
class NormWeight(Protocol):
    """A record that stands in the tree in place of a norm or of its gain, and normalises in its place."""

    gain: Any

    def normalise(
        self, x: Float[Array, "*rows D"], kind: NormKind, axes: int | tuple[int, ...] = -1
    ) -> Float[Array, "*rows D"]:
        """Normalise x along the last axis or axes, as `normalise`."""
        ...


def einsum(
    equation: str, x: Float[Array, "..."], w: Float[Array, "..."] | Weight, dtype: Any = None
) -> Float[Array, "..."]:
    """Compute the product of x and a weight, in x's dtype or another. float32 stays float32 on every
    device."""
    if isinstance(w, Weight):
        return w.einsum(equation, x, dtype)
    dtype = dtype or x.dtype
    if x.dtype.itemsize == 2 and (dtype != jnp.float32 or is_single_row(equation, x)):
        return einsum_16bit(equation, x, w, dtype)
    return plain_einsum(equation, x, w, dtype)


def einsums(
    equation: str, x: Float[Array, "..."], weights: Sequence[Float[Array, "..."] | Weight | None]
) -> list[Any]:
    """Return the products of x with several weights, None for a weight that is None."""
    present = [w for w in weights if w is not None]
    if isinstance(present[0], JointWeight):
        products = iter(present[0].joint_einsum(equation, x, present[1:]))
    else:
        products = iter([einsum(equation, x, w) for w in present])
    return [None if w is None else next(products) for w in weights]


def mapped_einsum(
    equation: str,
    function: Callable[..., Any],
    inputs: Sequence[Float[Array, "..."]],
    w: Float[Array, "..."] | Weight,
) -> Float[Array, "..."]:
    """Compute the product of a function of arrays and a weight, as `MappingWeight`."""
    if isinstance(w, MappingWeight):
        return w.mapped_einsum(equation, function, inputs)
    return einsum(equation, function(*inputs), w)


def plain_einsum(
    equation: str, x: Float[Array, "..."], w: Float[Array, "..."], dtype: Any
) -> Float[Array, "..."]:
    """Compute the product with an array, contracted in an order that avoids a transpose of w."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(reorder_contraction(equation), x, w, precision=precision, preferred_element_type=dtype)


@partial(jax.jit, static_argnums=(0, 3), inline=True)  # layers share one trace
def einsum_16bit(
    equation: str, x: Float[Array, "..."], w: Float[Array, "..."], dtype: Any
) -> Float[Array, "..."]:
    """Compute a product of 16-bit floats.

    On a CPU, XLA uses the instructions for 16-bit floats only if there are two rows or more and sums are
    float32. Otherwise it widens x and w first, which takes up to ten times as long. On a GPU, XLA multiplies
    a single row by a small w element by element. It writes the terms to memory before it adds them up.
    """
    is_alone = is_single_row(equation, x)
    multiply = partial(einsum_one_row if is_alone else plain_einsum, equation)

    def multiply_on_cpu(x: Float[Array, "..."], w: Float[Array, "..."]) -> Float[Array, "..."]:
        return multiply(x, w, jnp.float32).astype(dtype)

    cuda = {"cuda": partial(multiply, dtype=dtype)} if is_alone and has_gpu_compiler() else {}
    default = partial(plain_einsum, equation, dtype=dtype)
    return jax.lax.platform_dependent(x, w, cpu=multiply_on_cpu, default=default, **cuda)


def einsum_one_row(
    equation: str, x: Float[Array, "..."], w: Float[Array, "..."], dtype: Any
) -> Float[Array, "..."]:
    """Compute the product of one row as the first of two equal rows."""
    return plain_einsum(equation, jnp.concatenate([x, x]), w, dtype)[:1]


def is_single_row(equation: str, x: Float[Array, "..."]) -> bool:
    """Return True if x [1,...,1,D] is one row of a product that begins with x's first axis."""
    operands, out = equation.split("->")
    x_axes, w_axes = operands.split(",")
    rows = x.shape[: x.ndim - sum(axis in w_axes for axis in x_axes)]
    return x_axes[0] not in w_axes and out[0] == x_axes[0] and len(rows) > 0 and max(rows) == 1


@cache
def reorder_contraction(equation: str) -> str:
    """Rename the equation's letters so that they are alphabetical along w's axes.

    `jnp.einsum` contracts in alphabetical order. Any other order makes a CPU transpose w in every step.
    """
    x, w = equation.partition("->")[0].split(",")
    letters = dict.fromkeys(c for c in w + x if c.isalpha())
    return equation.translate({ord(c): ord("a") + i for i, c in enumerate(letters)})


def ragged_dot(
    rows: Float[Array, "rows D"],
    w: Float[Array, "E D F"] | Weight,
    sizes: Int[Array, " E"],
    row_experts: Int[Array, " rows"],
) -> Float[Array, "rows F"]:
    """Multiply consecutive rows by one expert's matrix each. Expert e has the next sizes[e] rows.

    sizes: number of rows of each expert.
    row_experts: expert of each row.
    """
    if isinstance(w, Weight):
        return w.ragged_dot(rows, sizes, row_experts)
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    default_dot = partial(jax.lax.ragged_dot, precision=precision)
    kernel = choose_expert_kernel(w.dtype, w.shape) if rows.dtype == w.dtype else None
    if kernel is None:
        return default_dot(rows, w, sizes)
    return jax.lax.platform_dependent(rows, w, sizes, cuda=kernel, default=default_dot)


def rms_norm(x: Float[Array, "*rows D"], gain: Float[Array, " D"], kind: NormKind) -> Float[Array, "*rows D"]:
    """Normalise by the root mean square (Zhang and Sennrich, arXiv 1910.07467)."""
    return normalise(x, Norm(gain), kind)


def normalise(
    x: Float[Array, "*rows D"], w: Norm | NormWeight, kind: NormKind, axes: int | tuple[int, ...] = -1
) -> Float[Array, "*rows D"]:
    """Normalise numbers along the last axis or axes, in float32.

    Layer normalisation also subtracts the mean (Ba et al., arXiv 1607.06450).
    """
    if isinstance(w, NormWeight):
        return w.normalise(x, kind, axes)
    x32 = x.astype(jnp.float32)
    if kind.kind == "layer":
        x32 = x32 - jnp.mean(x32, axis=axes, keepdims=True)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axes, keepdims=True) + kind.eps)
    return add_bias(apply_gain(normed, w.gain, kind, x.dtype), w.bias)


def wrap_gain(gain: Any) -> Norm | NormWeight:
    """Return a gain as something that norms: wrap an array in a `Norm`."""
    return gain if isinstance(gain, NormWeight) else Norm(gain)


def apply_gain(
    normed: Float[Array, "*rows D"], gain: Float[Array, "..."] | None, kind: NormKind, dtype: Any
) -> Float[Array, "*rows D"]:
    """Multiply normed float32 numbers by their gain, and cast them to a dtype."""
    if gain is None:
        return normed.astype(dtype)
    gain = jnp.expand_dims(gain, range(normed.ndim - gain.ndim))
    if kind.offset:
        return (normed * (kind.offset + gain.astype(jnp.float32))).astype(dtype)
    return normed.astype(dtype) * gain


def add_bias(x: Float[Array, "*shape"], bias: Float[Array, "..."] | None) -> Float[Array, "*shape"]:
    """Add a bias along the last axes, if there is one."""
    return x if bias is None else x + jnp.expand_dims(bias, range(x.ndim - bias.ndim))


def prevent_fma(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Round a float32 product before it is added to something: keeps XLA from fusing both into an FMA.

    An FMA rounds once, and XLA would choose where to use one. The maximum with the smallest float changes
    nothing, but XLA does not know that. Products of other dtypes are rounded anyway.
    """
    return jnp.maximum(x, jnp.finfo(x.dtype).min) if x.dtype == jnp.float32 else x


def apply_softcap(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """Bound values to (-cap, cap) by tanh, if there is a cap."""
    return x if cap is None else prevent_fma(cap * jnp.tanh(x / cap))


def clip_to_magnitude(x: Any, limit: float | None) -> Any:
    """Clip an array to numbers of at most this magnitude, if there are an array and a limit."""
    return x if x is None or limit is None else jnp.clip(x, -limit, limit)


def add_alibi(
    scores: Float[Array, "*shape"],
    slopes: tuple[float, ...] | None,
    shape: tuple[int, ...],
    query: Any,
    key: Any,
) -> Float[Array, "*shape"]:
    """Add ALiBi's bias to scores, if heads have slopes.

    shape: of the slopes. query, key: positions. All broadcast to the scores.
    """
    if slopes is None:
        return scores
    distance = jnp.asarray(key, jnp.float32) - jnp.asarray(query, jnp.float32)
    distance = jnp.expand_dims(distance, range(scores.ndim - distance.ndim))
    bias = jnp.asarray(slopes, jnp.float32).reshape(shape) * distance
    return prevent_fma(scores) + prevent_fma(bias)


def apply_scale(x: Float[Array, "*shape"], factor: float) -> Float[Array, "*shape"]:
    """Multiply x by a factor in x's dtype. A factor of 1 adds no operation."""
    return x if factor == 1 else prevent_fma(x * jnp.asarray(factor, x.dtype))


# ---------------------------------------------------------------- unique indices of scatters

# Flags that make a GPU's results reproducible (`xla_gpu_exclude_nondeterministic_ops`) turn a scatter whose
# indices may collide into sorts. One with unique indices stays one kernel.


def index_or_drop(
    index: Int[Array, "*shape"], write: Bool[Array, "*shape"], size: int
) -> Int[Array, "*shape"]:
    """Replace indices that must not be written by different ones beyond `size`.

    A scatter with mode="drop" skips these, and unique_indices=True stays true.
    """
    dropped = size + jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape)
    return jnp.where(write, index, dropped)


def mark_first_occurrences(ids: Int[Array, "B ids"]) -> Bool[Array, "B ids"]:
    """Mark the first occurrence of each id in its row."""
    n = ids.shape[1]
    is_before = jnp.tril(jnp.ones((1, n, n), bool), -1)
    return ~jnp.any((ids[:, :, None] == ids[:, None, :]) & is_before, axis=2)
