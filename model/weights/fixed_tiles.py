"""Weights whose products have one tiling for every number of rows (batch invariance), on NVIDIA's Hopper
GPUs.

XLA chooses tiles, and the parts of the inner dimension (split-K), by the number of rows. So a row's bits
depend on that number. Here they follow from the weight's sizes: rows are padded to whole tiles, and every
number is one sum in the order of the inner dimension. The kernel is jax's (`hopper_matmul_mgpu`, Mosaic GPU).
On other devices, and for other weights, products are those of the array, bit for bit.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from ..gpus import Kernel, import_jax_kernel, may_use_kernel
from ..layers import einsum, ragged_dot
from ..tree import map_by_path, pytree
from .compression.compress import CONTRACTED_AXES
from .quant import count_contracted_axes

T = TypeVar("T")
HOPPER_MODULE = "hopper_matmul_mgpu"
FIXED_KERNEL = Kernel("fixed_product", "mosaic", "products are XLA's, and follow the number of rows")
LOGITS_EQUATION = "...d,vd->...v"  # the equation of the product with an output matrix
# Rows of a tile, and the warpgroups that share a block, side by side in its columns.
FIXED_TILE_ROWS, WARPGROUPS = 64, 2
MIN_FULL_BLOCKS = 64  # blocks that saturate the memory: about half of the 132 multiprocessors


class FixedTiles(NamedTuple):
    """Tiling of a kernel's product.

    columns: columns of a warpgroup.
    depth: inner numbers of a step.
    stages: steps in flight.
    """

    columns: int
    depth: int
    stages: int

    @property
    def label(self) -> str:
        """Return the name by which a compiled program shows the tiling. The planner reads it."""
        return f"tiles_{FIXED_TILE_ROWS}x{self.columns}x{self.depth}x{self.stages}"


WIDE_TILES, NARROW_TILES = FixedTiles(64, 64, 8), FixedTiles(32, 32, 16)
LOGITS_TILES = FixedTiles(
    64, 64, 6
)  # for logits: the warpgroups share a block's columns, which are rows of x


def choose_fixed_tiles(inner: int, columns: int) -> FixedTiles | None:
    """Return the tiles for a weight [inner, columns], or None.

    They are the wide ones if these make at least MIN_FULL_BLOCKS blocks, as each block reads all rows.
    Otherwise they are the narrow ones, which make twice as many blocks.
    """
    fitting = [
        tiles
        for tiles in (WIDE_TILES, NARROW_TILES)
        if columns % (WARPGROUPS * tiles.columns) == 0 and inner % tiles.depth == 0
    ]
    enough = (tiles for tiles in fitting if columns // (WARPGROUPS * tiles.columns) >= MIN_FULL_BLOCKS)
    return next(enough, fitting[-1] if fitting else None)


@pytree
class FixedTiled:
    """A 16-bit weight [*inputs, *outputs], whose products sum over its first axes in fixed tiles."""

    array: Any

    @property
    def original(self) -> Any:
        """Return the weight as an array, without a copy."""
        return self.array

    @property
    def ragged_dot_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays that `ragged_dot` multiplies rows by."""
        return (self.array.shape,)

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """Compute the product of x and this weight, by the kernel if it multiplies such products.

        The kernel takes products that sum over the weight's first axes, and logits in float32.
        """
        w, plain = self.array, partial(einsum, equation, dtype=dtype)
        kernel = choose_fixed_kernel(equation, x, w, dtype or x.dtype)
        return plain(x, w) if kernel is None else jax.lax.platform_dependent(x, w, cuda=kernel, default=plain)

    def ragged_dot(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], row_experts: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Multiply consecutive rows by one expert's matrix each, as with the array."""
        return ragged_dot(rows, self.array, sizes, row_experts)


def choose_fixed_kernel(
    equation: str, x: Float[Array, "..."], w: Float[Array, "..."], dtype: Any
) -> Callable[..., Float[Array, "..."]] | None:
    """Return the kernel that multiplies x and w on the GPU that programs are compiled for, or None."""
    if x.dtype != w.dtype or not may_use_kernel(FIXED_KERNEL) or import_jax_kernel(HOPPER_MODULE) is None:
        return None
    if (inputs := count_contracted_axes(equation)) and dtype == x.dtype:
        tiles = choose_fixed_tiles(prod(w.shape[:inputs]), prod(w.shape[inputs:]))
        return tiles and partial(multiply_fixed_rows, inputs=inputs, tiles=tiles)
    is_head = equation == LOGITS_EQUATION and dtype == jnp.float32
    fits = w.shape[0] % (WARPGROUPS * FIXED_TILE_ROWS) == 0 == w.shape[-1] % LOGITS_TILES.depth
    return multiply_fixed_head if is_head and fits else None


@partial(jax.jit, static_argnames=("inputs", "tiles"))  # layers share one trace and one kernel
def multiply_fixed_rows(
    x: Float[Array, "..."], w: Float[Array, "..."], inputs: int, tiles: FixedTiles
) -> Float[Array, "..."]:
    """Multiply x's rows, padded to whole tiles, by w's first axes."""
    inner = prod(w.shape[:inputs])
    rows = x.reshape(-1, inner)
    padded = jnp.pad(rows, ((0, -len(rows) % FIXED_TILE_ROWS), (0, 0)))
    with jax.named_scope(tiles.label):
        product = hopper_matmul(padded, w.reshape(inner, -1), tiles)
    return product[: len(rows)].reshape(*x.shape[: x.ndim - inputs], *w.shape[inputs:])


@jax.jit
def multiply_fixed_head(x: Float[Array, "*rows D"], w: Float[Array, "V D"]) -> Float[Array, "*rows V"]:
    """Multiply rows by an output matrix, in float32.

    The matrix is the first operand and the rows are columns, since the kernel reads its second operand by
    rows.
    """
    rows = x.reshape(-1, x.shape[-1])
    columns = jnp.pad(rows, ((0, -len(rows) % LOGITS_TILES.columns), (0, 0))).T
    with jax.named_scope(f"transposed_{LOGITS_TILES.label}"):
        product = hopper_matmul(w, columns, LOGITS_TILES, jnp.zeros((len(w), columns.shape[1]), jnp.float32))
    return product[:, : len(rows)].T.reshape(*x.shape[:-1], len(w))


def hopper_matmul(
    a: Float[Array, "rows D"],
    b: Float[Array, "D F"],
    tiles: FixedTiles,
    out: Float[Array, "rows F"] | None = None,
) -> Float[Array, "rows F"]:
    """Run jax's kernel with these tiles. The product is added to `out` in its dtype."""
    module = import_jax_kernel(HOPPER_MODULE)
    side = module.MatmulDimension.M if tiles == LOGITS_TILES else module.MatmulDimension.N
    config = module.TuningConfig(
        FIXED_TILE_ROWS, tiles.columns, tiles.depth, tiles.stages, epi_tile_n=tiles.columns, wg_dimension=side
    )
    return module.matmul(a, b, out, config)


def with_fixed_tiles(params: T) -> T:
    """Return parameters, or ShapeDtypeStructs, with projections as `FixedTiled`, without copies.

    Unchanged are: experts, an embedding that is the output matrix too, records, weights of 32 bits and those
    on several devices.
    """

    def fix_weight(path: str, weight: Any) -> Any:
        return FixedTiled(weight) if can_fix_tiles(path.rpartition(".")[2], weight) else weight

    return map_by_path(params, FixedTiled, fix_weight)


def can_fix_tiles(name: str, weight: Any) -> bool:
    """Return True for a projection or output matrix of 16 bits on one device."""
    if name not in CONTRACTED_AXES or not isinstance(weight, jax.Array | jax.ShapeDtypeStruct):
        return False
    sharding = None if isinstance(weight, Tracer) else weight.sharding
    several = sharding is not None and sharding.num_devices > 1
    is_projection = weight.ndim + CONTRACTED_AXES[name][0] == 0 or name == "head"
    is_narrow = jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize == 2
    return is_projection and is_narrow and not several
