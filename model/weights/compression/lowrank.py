"""Weights as the product of two thin matrices, the best of their rank (Eckart and Young, 1936)."""

from math import prod
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...layers import einsum, ragged_dot
from ...tree import pytree


@pytree
class LowRank:
    """A weight [*inputs, *outputs] as a [*inputs, rank] times b [rank, *outputs]. Experts come first."""

    a: Any
    b: Any

    @property
    def ragged_dot_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays that `ragged_dot` multiplies rows by."""
        return self.a.shape, self.b.shape

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """Compute two products of x, the first with the factor whose letters it sums over. "Z" is the
        rank."""
        operands, out = equation.split("->")
        left, right = operands.split(",")
        inputs = self.a.ndim - 1
        factors = [(right[:inputs] + "Z", self.a), ("Z" + right[inputs:], self.b)]
        if not any(letter in left and letter not in out for letter in right[:inputs]):
            factors.reverse()
        (first, first_factor), (second, second_factor) = factors
        between = "".join(letter for letter in left if letter in out or letter not in right) + "Z"
        return einsum(
            f"{between},{second}->{out}",
            einsum(f"{left},{first}->{between}", x, first_factor),
            second_factor,
            dtype,
        )

    def ragged_dot(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], row_experts: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Multiply consecutive rows by one expert's two factors each."""
        return ragged_dot(ragged_dot(rows, self.a, sizes, row_experts), self.b, sizes, row_experts)


def factorise_weight(
    weight: Float[Array, "..."], contracted: tuple[int, ...], share: float
) -> LowRank | None:
    """Return a weight's best approximation with at most `share` of its numbers, split evenly between the
    factors.

    Products sum over the axes `contracted` (counted from the last). Those before them are experts. Returns
    None if even rank 1 has more numbers, and for weights without outputs after those axes.
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
