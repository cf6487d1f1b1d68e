"""Weights whose products have one configuration for every number of rows, on NVIDIA's Hopper GPUs.

XLA chooses tiles, and the parts that an inner dimension is cut into, by the number of rows, so that a row's
bits depend on how many are beside it. Here they follow from the weight's own sizes: rows are padded to whole
tiles, and every number is one sum in the order of the inner dimension. The kernel is jax's
(`hopper_matmul_mgpu`, Mosaic GPU). On other devices, and for other weights, products are those of the array,
bit for bit.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..gpus import Kernel, may_use, shipped
from ..layers import einsum, ragged_product
from ..tree import holds, pytree, unwrapped
from .compress import CONTRACTED
from .quant import leading

T = TypeVar("T")
KERNEL = "hopper_matmul_mgpu"
FIXED = Kernel("fixed_product", "mosaic", "products are XLA's, and follow the number of rows")
LOGITS = "...d,vd->...v"  # the product with an output matrix
ROWS, WARPGROUPS = 64, 2  # rows of a tile, and the warpgroups that share a block, side by side in its columns
ENOUGH = 64  # blocks that keep the memory busy: about half of the 132 multiprocessors


class Tiles(NamedTuple):
    """Tiling of a kernel's product: columns of a warpgroup, inner numbers of a step, steps in flight."""

    columns: int
    depth: int
    stages: int

    @property
    def label(self) -> str:
        """The name under which a compiled program shows it."""
        return f"tiles_{ROWS}x{self.columns}x{self.depth}x{self.stages}"


WIDE, NARROW = Tiles(64, 64, 8), Tiles(32, 32, 16)
TALL = Tiles(64, 64, 6)  # of logits: the warpgroups share a block's columns, which are rows of x


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
        """The product of x and this weight; the array's own where it is none of rows with first axes, or of
        rows with a matrix's last axis in float32, as logits are."""
        w, plain = self.array, partial(einsum, equation, dtype=dtype)
        kernel = kernel_for(equation, x, w, dtype or x.dtype)
        return plain(x, w) if kernel is None else jax.lax.platform_dependent(x, w, cuda=kernel, default=plain)

    def ragged(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], owner: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Products of consecutive rows with one expert's weights each: the array's own."""
        return ragged_product(rows, self.array, sizes, owner)


def kernel_for(
    equation: str, x: Float[Array, "..."], w: Float[Array, "..."], dtype: Any
) -> Callable[..., Float[Array, "..."]] | None:
    """The kernel that multiplies x and w on the GPU that is compiled for, or None."""
    if x.dtype != w.dtype or not may_use(FIXED) or shipped(KERNEL) is None:
        return None
    if (inputs := leading(equation)) and dtype == x.dtype:
        tiles = tiles_of(prod(w.shape[:inputs]), prod(w.shape[inputs:]))
        return tiles and partial(in_rows, inputs=inputs, tiles=tiles)
    is_head = equation == LOGITS and dtype == jnp.float32
    fits = w.shape[0] % (WARPGROUPS * ROWS) == 0 == w.shape[-1] % TALL.depth
    return in_columns if is_head and fits else None


@partial(jax.jit, static_argnames=("inputs", "tiles"))  # layers share one trace and one kernel
def in_rows(x: Float[Array, "..."], w: Float[Array, "..."], inputs: int, tiles: Tiles) -> Float[Array, "..."]:
    """The product of matrices: x's rows, padded to whole tiles, by w's first axes."""
    inner = prod(w.shape[:inputs])
    rows = x.reshape(-1, inner)
    padded = jnp.pad(rows, ((0, -len(rows) % ROWS), (0, 0)))
    with jax.named_scope(tiles.label):
        product = multiply(padded, w.reshape(inner, -1), tiles)
    return product[: len(rows)].reshape(*x.shape[: x.ndim - inputs], *w.shape[inputs:])


@jax.jit
def in_columns(x: Float[Array, "*rows D"], w: Float[Array, "V D"]) -> Float[Array, "*rows V"]:
    """Products of rows with an output matrix, in float32: of that matrix with the rows as columns, since the
    kernel reads its second operand by rows."""
    rows = x.reshape(-1, x.shape[-1])
    columns = jnp.pad(rows, ((0, -len(rows) % TALL.columns), (0, 0))).T
    with jax.named_scope(f"turned_{TALL.label}"):
        product = multiply(w, columns, TALL, jnp.zeros((len(w), columns.shape[1]), jnp.float32))
    return product[:, : len(rows)].T.reshape(*x.shape[:-1], len(w))


def multiply(
    a: Float[Array, "rows D"], b: Float[Array, "D F"], tiles: Tiles, out: Float[Array, "rows F"] | None = None
) -> Float[Array, "rows F"]:
    """jax's kernel with these tiles, whose product is added to `out` in its dtype."""
    module = shipped(KERNEL)
    side = module.MatmulDimension.M if tiles == TALL else module.MatmulDimension.N
    config = module.TuningConfig(
        ROWS, tiles.columns, tiles.depth, tiles.stages, epi_tile_n=tiles.columns, wg_dimension=side
    )
    return module.matmul(a, b, out, config)


def fixed(params: T) -> T:
    """A tree of parameters, or of ShapeDtypeStructs, with projections as `Fixed`.

    Left as they are: experts, an embedding that is the output matrix too, records, weights of 32 bits and
    those that lie on several devices.
    """

    def leaf(key: Any, weight: Any) -> Any:
        name = jax.tree_util.keystr(key, simple=True, separator=".").rpartition(".")[2]
        return Fixed(weight) if can_be_fixed(name, weight) else weight

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_record)


def can_be_fixed(name: str, weight: Any) -> bool:
    if name not in CONTRACTED or not isinstance(weight, jax.Array | jax.ShapeDtypeStruct):
        return False
    several = weight.sharding is not None and weight.sharding.num_devices > 1
    is_projection = weight.ndim + CONTRACTED[name][0] == 0 or name == "head"
    is_narrow = jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize == 2
    return is_projection and is_narrow and not several


def unfixed(params: T) -> T:
    """The tree with arrays in place of `Fixed`: the same ones, without a copy; itself where it has none."""
    return unwrapped(params, Fixed, lambda x: x.array)


def is_fixed(params: Any) -> bool:
    return holds(params, Fixed)


def is_record(x: Any) -> bool:
    return isinstance(x, Fixed)
