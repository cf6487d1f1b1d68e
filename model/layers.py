"""The small pure functions that every decoder is made of."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .config import NormKind
from .gpus import compiles_for_gpus
from .tree import Spec, pytree
from .weights.grouped import expert_kernel


@pytree
class Norm:
    """A normalisation's gain, and its bias, where it has them."""

    gain: Any  # [D]
    bias: Any = None  # [D]


def norm_spec(kind: NormKind, size: int) -> Norm:
    gain = Spec((size,), ("model",), mean=1.0 - kind.offset, scale=0.0) if kind.gain else None
    return Norm(gain, Spec((size,), ("model",), scale=0.0) if kind.bias else None)


@runtime_checkable
class Weight(Protocol):
    """A record that stands where a weight stood in the tree of parameters, and multiplies in its place."""

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]: ...

    def ragged(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], owner: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]: ...

    @property
    def factors(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that `ragged` multiplies rows with."""
        ...


@runtime_checkable
class JointWeight(Weight, Protocol):
    """A weight whose products are made in one call with those of others that multiply the same rows."""

    def joint_einsum(
        self, equation: str, x: Float[Array, "..."], others: Sequence[Any]
    ) -> list[Float[Array, "..."]]:
        """The products of x with this weight and with the others."""
        ...


@runtime_checkable
class RowWeight(Weight, Protocol):
    """A weight that is another one for each row of a batch; `base` is what it would be for all of them."""

    base: Any

    def of_rows(self, rows: Int[Array, " rows"]) -> Weight:
        """The weight for a batch of these rows alone."""
        ...

    def of_tokens(self, tokens: Int[Array, " rows"], count: int) -> "RowWeight":
        """The weight for rows that are these tokens of a batch of `count` tokens."""
        ...

    def of_expert(self, e: Int[Array, ""]) -> "RowWeight":
        """The weight of expert e, of experts side by side."""
        ...


@runtime_checkable
class NormWeight(Protocol):
    """A record that stands where a norm, or its gain, stood, and normalises in its place."""

    gain: Any

    def normalise(
        self, x: Float[Array, "*rows D"], kind: NormKind, axes: int | tuple[int, ...] = -1
    ) -> Float[Array, "*rows D"]: ...


def einsum(
    equation: str, x: Float[Array, "..."], w: Float[Array, "..."] | Weight, dtype: Any = None
) -> Float[Array, "..."]:
    """The one product of x and a weight, in x's dtype or another; float32 stays float32 on every device."""
    if isinstance(w, Weight):
        return w.einsum(equation, x, dtype)
    dtype = dtype or x.dtype
    if x.dtype.itemsize == 2 and (dtype != jnp.float32 or is_row(equation, x)):
        return narrow_product(equation, x, w, dtype)
    return product(equation, x, w, dtype)


def einsums(
    equation: str, x: Float[Array, "..."], weights: Sequence[Float[Array, "..."] | Weight | None]
) -> list[Any]:
    """The products of x with several weights, of None where the weight is None."""
    found = [w for w in weights if w is not None]
    if isinstance(found[0], JointWeight):
        made = iter(found[0].joint_einsum(equation, x, found[1:]))
    else:
        made = iter([einsum(equation, x, w) for w in found])
    return [None if w is None else next(made) for w in weights]


def product(equation: str, x: Float[Array, "..."], w: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(in_order(equation), x, w, precision=precision, preferred_element_type=dtype)


@partial(jax.jit, static_argnums=(0, 3), inline=True)  # layers share one trace
def narrow_product(
    equation: str, x: Float[Array, "..."], w: Float[Array, "..."], dtype: Any
) -> Float[Array, "..."]:
    """The product of 16-bit floats.

    A CPU has instructions for it that XLA uses only where there are two rows or more and their sums are
    float32; otherwise it widens x and w first, which takes up to ten times as long. For a GPU, XLA multiplies
    a single row by a small w number by number, and writes what it is to add up.
    """
    is_alone = is_row(equation, x)
    times = partial(row_product if is_alone else product, equation)

    def on_cpu(x: Float[Array, "..."], w: Float[Array, "..."]) -> Float[Array, "..."]:
        return times(x, w, jnp.float32).astype(dtype)

    cuda = {"cuda": partial(times, dtype=dtype)} if is_alone and compiles_for_gpus() else {}
    default = partial(product, equation, dtype=dtype)
    return jax.lax.platform_dependent(x, w, cpu=on_cpu, default=default, **cuda)


def row_product(
    equation: str, x: Float[Array, "..."], w: Float[Array, "..."], dtype: Any
) -> Float[Array, "..."]:
    """The product of one row, as the first of two."""
    return product(equation, jnp.concatenate([x, x]), w, dtype)[:1]


def is_row(equation: str, x: Float[Array, "..."]) -> bool:
    """True if x [1,...,1,D] is one row of a product that begins with it."""
    operands, out = equation.split("->")
    of_x, of_w = operands.split(",")
    rows = x.shape[: x.ndim - sum(axis in of_w for axis in of_x)]
    return of_x[0] not in of_w and out[0] == of_x[0] and len(rows) > 0 and max(rows) == 1


@cache
def in_order(equation: str) -> str:
    """The same product with letters that ascend along w.

    `jnp.einsum` contracts in the order of the letters; where that is not the axes' own, a CPU transposes w in
    every step.
    """
    x, w = equation.partition("->")[0].split(",")
    letters = dict.fromkeys(c for c in w + x if c.isalpha())
    return equation.translate({ord(c): ord("a") + i for i, c in enumerate(letters)})


def ragged_product(
    rows: Float[Array, "rows D"],
    w: Float[Array, "E D F"] | Weight,
    sizes: Int[Array, " E"],
    owner: Int[Array, " rows"],
) -> Float[Array, "rows F"]:
    """Products of consecutive rows with one expert's matrix each: expert e owns the next sizes[e] rows."""
    if isinstance(w, Weight):
        return w.ragged(rows, sizes, owner)
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else None
    plainly = partial(jax.lax.ragged_dot, precision=precision)
    kernel = expert_kernel(w.dtype, w.shape) if rows.dtype == w.dtype else None
    if kernel is None:
        return plainly(rows, w, sizes)
    return jax.lax.platform_dependent(rows, w, sizes, cuda=kernel, default=plainly)


def rms_norm(x: Float[Array, "*rows D"], gain: Float[Array, " D"], kind: NormKind) -> Float[Array, "*rows D"]:
    """Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467)."""
    return normalise(x, Norm(gain), kind)


def normalise(
    x: Float[Array, "*rows D"], w: Norm | NormWeight, kind: NormKind, axes: int | tuple[int, ...] = -1
) -> Float[Array, "*rows D"]:
    """Either normalisation of the numbers along some of the last axes, in float32; the layer's own is Ba et
    al.'s (arXiv 1607.06450)."""
    if isinstance(w, NormWeight):
        return w.normalise(x, kind, axes)
    x32 = x.astype(jnp.float32)
    if kind.kind == "layer":
        x32 = x32 - jnp.mean(x32, axis=axes, keepdims=True)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=axes, keepdims=True) + kind.eps)
    return biased(scaled_by(normed, w.gain, kind, x.dtype), w.bias)


def scaled_by(
    normed: Float[Array, "*rows D"], gain: Float[Array, "..."] | None, kind: NormKind, dtype: Any
) -> Float[Array, "*rows D"]:
    """Normed numbers in float32 times their gain, in a dtype."""
    if gain is None:
        return normed.astype(dtype)
    gain = jnp.expand_dims(gain, range(normed.ndim - gain.ndim))
    if kind.offset:
        return (normed * (kind.offset + gain.astype(jnp.float32))).astype(dtype)
    return normed.astype(dtype) * gain


def biased(x: Float[Array, "*shape"], bias: Float[Array, "..."] | None) -> Float[Array, "*shape"]:
    return x if bias is None else x + jnp.expand_dims(bias, range(x.ndim - bias.ndim))


def rounded(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """A product in float32 that is to be rounded before it is added to something: a compiler may round the
    two only once, where it likes. The bound limits nothing; it stands in the way."""
    return jnp.maximum(x, jnp.finfo(x.dtype).min)


def softcapped(x: Float[Array, "*shape"], cap: float | None) -> Float[Array, "*shape"]:
    """Values pressed into (-cap, cap)."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def scaled(x: Float[Array, "*shape"], factor: float) -> Float[Array, "*shape"]:
    return x if factor == 1 else x * jnp.asarray(factor, x.dtype)


# ---------------------------------------------------------------- unique indices of scatters

# Flags that make a GPU's results reproducible (`xla_gpu_exclude_nondeterministic_ops`) turn a scatter whose
# indices may collide into sorts of them; one with unique indices stays one kernel.


def apart(index: Int[Array, "*shape"], write: Bool[Array, "*shape"], size: int) -> Int[Array, "*shape"]:
    """The index where it is to `write`; elsewhere one past `size`, no two alike, which mode="drop" leaves
    out."""
    beyond = size + jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape)
    return jnp.where(write, index, beyond)


def first_of_each(ids: Int[Array, "B ids"]) -> Bool[Array, "B ids"]:
    """True at the first occurrence of each id in its row."""
    n = ids.shape[1]
    before = jnp.tril(jnp.ones((1, n, n), bool), -1)
    return ~jnp.any((ids[:, :, None] == ids[:, None, :]) & before, axis=2)
