"""Weights whose products have one configuration for every number of rows, on NVIDIA's Hopper GPUs.

XLA chooses tiles, and the parts that an inner dimension is cut into, by the number of rows, so that a row's
bits depend on how many are beside it. Here they follow from the weight's own sizes: rows are padded to whole
tiles, and every number is one sum in the order of the inner dimension. The kernel is jax's
(`hopper_matmul_mgpu`, Mosaic GPU). On other devices, and for other weights, products are those of the array,
bit for bit.
"""

from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..layers import einsum, ragged_product
from ..tree import pytree
from .compress import CONTRACTED
from .gpus import on_hopper
from .quant import leading

T = TypeVar("T")
ROWS, WARPGROUPS = 64, 2  # rows of a tile, and the warpgroups that share a block, side by side in its columns
ENOUGH = 64  # blocks that keep the memory busy: about half of the 132 multiprocessors


class Tiles(NamedTuple):
    """How a kernel cuts a product: columns of a warpgroup, inner numbers of a step, steps in flight."""

    columns: int
    depth: int
    stages: int

    @property
    def label(self) -> str:
        """The name under which a compiled program shows it."""
        return f"tiles_{ROWS}x{self.columns}x{self.depth}x{self.stages}"


WIDE, NARROW = Tiles(64, 64, 8), Tiles(32, 32, 16)


def tiles_of(inner: int, columns: int) -> Tiles | None:
    """The tiles for a weight [inner, columns]; None where there are none.

    Wide ones where their blocks are ENOUGH, as each reads all of the rows; else narrow ones, which make
    twice as many.
    """
    fitting = [
        tiles
        for tiles in (WIDE, NARROW)
        if columns % (WARPGROUPS * tiles.columns) == 0 and inner % tiles.depth == 0
    ]
    enough = (tiles for tiles in fitting if columns // (WARPGROUPS * tiles.columns) >= ENOUGH)
    return next(enough, fitting[-1] if fitting else None)


@pytree
class Fixed:
    """A weight [*inputs, *outputs] in 16 bits, as an array, whose products sum over its first axes."""

    array: Any

    @property
    def factors(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that `ragged` multiplies rows with."""
        return (self.array.shape,)

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """The product of x and this weight; the array's own where it does not sum over the first axes, or is
        asked for in another dtype."""
        inputs, w = leading(equation), self.array
        plain = partial(einsum, equation, dtype=dtype)
        if not inputs or not x.dtype == w.dtype == (dtype or x.dtype) or not on_hopper():
            return plain(x, w)
        tiles = tiles_of(prod(w.shape[:inputs]), prod(w.shape[inputs:]))
        if tiles is None:
            return plain(x, w)
        return jax.lax.platform_dependent(
            x, w, cuda=partial(in_rows, inputs=inputs, tiles=tiles), default=plain
        )

    def ragged(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], owner: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Products of consecutive rows with one expert's weights each: the array's own."""
        return ragged_product(rows, self.array, sizes, owner)


@partial(jax.jit, static_argnames=("inputs", "tiles"))  # layers share one trace and one kernel
def in_rows(x: Float[Array, "..."], w: Float[Array, "..."], inputs: int, tiles: Tiles) -> Float[Array, "..."]:
    """The product of matrices: x's rows, padded to whole tiles, by w's first axes."""
    inner = prod(w.shape[:inputs])
    rows = x.reshape(-1, inner)
    padded = jnp.pad(rows, ((0, -len(rows) % ROWS), (0, 0)))
    with jax.named_scope(tiles.label):
        product = multiply(padded, w.reshape(inner, -1), tiles)
    return product[: len(rows)].reshape(*x.shape[: x.ndim - inputs], *w.shape[inputs:])


def multiply(rows: Float[Array, "rows D"], w: Float[Array, "D F"], tiles: Tiles) -> Float[Array, "rows F"]:
    """jax's kernel with these tiles."""
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as kernel  # needs absl, and a GPU

    config = kernel.TuningConfig(ROWS, tiles.columns, tiles.depth, tiles.stages, epi_tile_n=tiles.columns)
    return kernel.matmul(rows, w, None, config)


def fixed(params: T) -> T:
    """A tree of parameters, or of ShapeDtypeStructs, with projections as `Fixed`.

    Left as they are: experts, the output matrix (its sums run over its last axis), records, weights of 32
    bits and those that lie on several devices.
    """

    def leaf(key: Any, weight: Any) -> Any:
        name = jax.tree_util.keystr(key, simple=True, separator=".").rpartition(".")[2]
        return Fixed(weight) if can_be_fixed(name, weight) else weight

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=lambda x: isinstance(x, Fixed))


def can_be_fixed(name: str, weight: Any) -> bool:
    if name not in CONTRACTED or not isinstance(weight, jax.Array | jax.ShapeDtypeStruct):
        return False
    several = weight.sharding is not None and weight.sharding.num_devices > 1
    first, last = CONTRACTED[name][0], CONTRACTED[name][-1]
    is_projection = weight.ndim + first == 0 and last < -1
    return (
        is_projection
        and not several
        and jnp.issubdtype(weight.dtype, jnp.floating)
        and weight.dtype.itemsize == 2
    )


def is_fixed(params: Any) -> bool:
    """Whether a tree has such weights."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Fixed))
    return any(isinstance(x, Fixed) for x in leaves)
