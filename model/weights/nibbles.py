"""Products with weights of four bits on NVIDIA GPUs: codes are widened inside the kernel, so that only their
bytes are read (Pallas, Triton backend).

XLA widens them into memory first: it does not fuse scales of groups into a product. The two codes of a byte
multiply x's even and odd numbers. Tiles, and the parts that the inner dimension is cut into, follow from the
weight alone, so a row's bits do not depend on how many rows are beside it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import triton
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from ..gpus import Kernel
from ..sharding import in_shards, ways

ROWS, BYTES = 64, 64  # of a tile: rows of x, and bytes of a column that a step takes
COLUMNS = (128, 64)  # the most that divide
BLOCKS, PARTS = 128, 8  # most blocks, and most parts of the inner dimension
ZERO = 8  # the code of zero where there are no others
NIBBLES = Kernel("int4_product", "triton", "XLA widens weights into memory")
SCALES = ("bfloat16", "float16", "float32")


class NibbleCodes(NamedTuple):
    """A matrix as bytes of two codes each, neighbours of a column, and scales and zeros of groups of them."""

    values: Any  # uint8 [D/2, F]
    scales: Any  # [groups, F]
    zeros: Any  # like scales, or None


class NibbleTiles(NamedTuple):
    """Tiling of a product. `columns`: of a block. `parts`: pieces of the inner dimension. `group`: bytes of a
    column that share a scale."""

    columns: int
    parts: int
    group: int

    @property
    def label(self) -> str:
        """The name under which a compiled program shows it."""
        return f"tiles_{ROWS}x{self.columns}x{2 * BYTES}x{self.parts}"


def cut_of(inner: int, columns: int, groups: int) -> NibbleTiles | None:
    """Tiling for a weight of [inner, columns] numbers with `groups` groups, or None if the kernel cannot
    multiply it."""
    group, width = inner // 2 // groups, next((n for n in COLUMNS if columns % n == 0), 0)
    if not width or not group or inner % (2 * BYTES) or (group % BYTES and BYTES % group):
        return None
    steps, parts = inner // (2 * BYTES), 1
    while 2 * parts <= PARTS and steps % (2 * parts) == 0 and 2 * parts * (columns // width) <= BLOCKS:
        parts *= 2
    return NibbleTiles(width, parts, group)


def grouped(shape: tuple[int, ...], scales: tuple[int, ...], inputs: int) -> bool:
    """True if each output has its own scales, for consecutive groups of inputs."""
    split = next((i for i in range(inputs) if scales[i] != shape[i]), inputs)
    return scales[inputs:] == shape[inputs:] and set(scales[split + 1 : inputs]) <= {1}


@partial(jax.jit, static_argnames=("dtype", "interpret"))  # layers share one trace
def multiply(
    rows: Float[Array, "rows D"], codes: NibbleCodes, dtype: Any, interpret: bool = False
) -> Float[Array, "rows F"]:
    """The product with a matrix of codes that has a cut."""
    padded = jnp.pad(rows, ((0, -len(rows) % ROWS), (0, 0)))
    product = partitioned.fun if in_shards(padded) else partitioned
    return product(padded, codes, dtype, interpret)[: len(rows)]


@partial(custom_partitioning, static_argnums=(2, 3))
def partitioned(
    rows: Float[Array, "rows D"], codes: NibbleCodes, dtype: Any, interpret: bool
) -> Float[Array, "rows F"]:
    (M, D), F = rows.shape, codes.values.shape[1]
    cut = cut_of(D, F, len(codes.scales))
    if cut is None:  # a device's part of a matrix that has one
        return jnp.dot(rows, widened(codes, rows.dtype), preferred_element_type=jnp.float32).astype(dtype)
    even, odd = (rows.reshape(M, D // 2, 2)[..., i] for i in range(2))
    with jax.named_scope(cut.label):
        sums = pl.pallas_call(
            partial(kernel, cut=cut, steps=D // (2 * BYTES * cut.parts)),
            grid=(F // cut.columns, M // ROWS, cut.parts),
            out_shape=jax.ShapeDtypeStruct((cut.parts, M, F), jnp.float32 if cut.parts > 1 else dtype),
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=4),
            interpret=interpret,
            name="multiply_nibbles",
        )(even, odd, codes)
    return sums[0] if cut.parts == 1 else sums.sum(0).astype(dtype)


def kernel(even: Any, odd: Any, codes: NibbleCodes, out: Any, *, cut: NibbleTiles, steps: int):
    columns = pl.ds(pl.program_id(0) * cut.columns, cut.columns)
    rows, part = pl.ds(pl.program_id(1) * ROWS, ROWS), pl.program_id(2)

    def step(i: Any, total: Float[Array, "rows F"]) -> Float[Array, "rows F"]:
        first = (part * steps + i) * BYTES
        inner, pairs = pl.ds(first, BYTES), codes.values[pl.ds(first, BYTES), columns]
        scales = of_groups(codes.scales, first, columns, cut).astype(jnp.float32)
        zeros = jnp.int8(ZERO)
        if codes.zeros is not None:
            zeros = of_groups(codes.zeros, first, columns, cut).astype(jnp.int8)
        for x, nibbles in ((even, pairs & jnp.uint8(15)), (odd, pairs >> jnp.uint8(4))):
            w = ((nibbles.astype(jnp.int8) - zeros).astype(jnp.float32) * scales).astype(x.dtype)
            total += jnp.dot(x[rows, inner], w, preferred_element_type=jnp.float32)
        return total

    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((ROWS, cut.columns), jnp.float32))
    out[part, rows, columns] = total.astype(out.dtype)


def of_groups(ref: Any, first: Any, columns: Any, cut: NibbleTiles) -> Any:
    """The entries of a step's groups, each as often as the group has bytes in it."""
    n = max(BYTES // cut.group, 1)
    own = ref[pl.ds(first // cut.group, n), columns]
    return jnp.broadcast_to(own[:, None], (n, BYTES // n, cut.columns)).reshape(BYTES, cut.columns)


def widened(codes: NibbleCodes, dtype: Any) -> Float[Array, "D F"]:
    """The matrix as an array."""
    pairs, scales = codes.values, codes.scales.astype(jnp.float32)
    nibbles = jnp.stack([pairs & jnp.uint8(15), pairs >> jnp.uint8(4)], 1)
    nibbles = nibbles.reshape(len(scales), -1, scales.shape[1])
    zeros = jnp.int8(ZERO) if codes.zeros is None else codes.zeros.astype(jnp.int8)[:, None]
    numbers = (nibbles.astype(jnp.int8) - zeros).astype(jnp.float32) * scales[:, None]
    return numbers.astype(dtype).reshape(-1, scales.shape[1])


def on_each_device(dtype: Any, interpret: bool, mesh: Any, shapes: Any, result: Any) -> Any:
    """Every device of a mesh multiplies with the codes that it holds; sums over an inner dimension that is
    split are added up."""
    groups, F = shapes[1].scales.shape
    inner, columns, *_ = (*shapes[1].values.sharding.spec, None, None)
    inner = inner if (shapes[1].values.shape[0] if groups == 1 else groups) % ways(mesh, inner) == 0 else None
    columns = columns if F % ways(mesh, columns) == 0 else None
    specs = (None, inner), (inner, columns), (inner if groups > 1 else None, columns), (None, columns)
    whole, own, each, out = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in specs)

    def local(rows: Float[Array, "rows D"], codes: NibbleCodes) -> Float[Array, "rows F"]:
        if inner is None:
            return partitioned.fun(rows, codes, dtype, interpret)
        return jax.lax.psum(partitioned.fun(rows, codes, dtype, interpret), inner)

    return mesh, local, out, (whole, NibbleCodes(own, each, None if shapes[1].zeros is None else each))


def axes(dtype: Any, interpret: bool, mesh: Any, values: Any, results: Any) -> tuple[str, dict[str, int]]:
    """The sharding rule for XLA's partitioner: columns may be split, and groups, or bytes where all share a
    scale."""
    (D, groups), zeros = (values[0].shape[1], values[2].shape[0]), len(values) == 4
    if groups == 1:
        return ", ".join(["m (p d)", "p f", *["g f"] * (1 + zeros)]) + " -> m f", {"d": 2}
    sizes = {"d": D // groups, "p": D // groups // 2}
    return ", ".join(["m (g d)", "(g p) f", *["g f"] * (1 + zeros)]) + " -> m f", sizes


partitioned.def_partition(on_each_device, sharding_rule=axes)
