"""Weights as the product of two thin matrices, the best of their rank (Eckart and Young, 1936)."""

from math import prod
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..layers import einsum, ragged_product
from ..tree import pytree


@pytree
class LowRank:
    """A weight [*inputs, *outputs] as a [*inputs, rank] times b [rank, *outputs]; experts come first."""

    a: Any
    b: Any

    @property
    def factors(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that `ragged` multiplies rows with."""
        return self.a.shape, self.b.shape

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """Two products of x, the first with the factor whose letters it sums over; "Z" is the rank."""
        operands, out = equation.split("->")
        left, right = operands.split(",")
        inputs = self.a.ndim - 1
        factors = [(right[:inputs] + "Z", self.a), ("Z" + right[inputs:], self.b)]
        if not any(letter in left and letter not in out for letter in right[:inputs]):
            factors.reverse()
        (first, one), (second, other) = factors
        between = "".join(letter for letter in left if letter in out or letter not in right) + "Z"
        return einsum(
            f"{between},{second}->{out}", einsum(f"{left},{first}->{between}", x, one), other, dtype
        )

    def ragged(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], owner: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Products of consecutive rows with one expert's weights each."""
        return ragged_product(ragged_product(rows, self.a, sizes, owner), self.b, sizes, owner)


def low_rank(weight: Float[Array, "..."], contracted: tuple[int, ...], share: float) -> LowRank | None:
    """A weight's best approximation with at most `share` of its numbers, split evenly between the factors.

    Products sum over the axes `contracted` (counted from the last); those before them are experts. Returns
    None where even rank 1 has more numbers, and for weights without outputs after those axes.
    """
    first, after = weight.ndim + contracted[0], weight.ndim + contracted[-1] + 1
    experts, inputs, outputs = weight.shape[:first], weight.shape[first:after], weight.shape[after:]
    m, n = prod(inputs), prod(outputs)
    rank = int(share * m * n / (m + n))
    if not outputs or rank < 1:
        return None
    matrix = weight.reshape(*experts, m, n).astype(jnp.float32)
    u, s, v = jnp.linalg.svd(matrix, full_matrices=False)
    root = jnp.sqrt(s[..., :rank])
    a = (u[..., :rank] * root[..., None, :]).reshape(*experts, *inputs, rank)
    b = (root[..., None] * v[..., :rank, :]).reshape(*experts, rank, *outputs)
    return LowRank(a.astype(weight.dtype), b.astype(weight.dtype))
