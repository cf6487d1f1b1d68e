"""The forms in which an engine multiplies weights on its device, whatever form they came in.

An embedding's rows fill whole lanes of a TPU: a row that is no multiple of 128 numbers can take more memory
than a column. A TPU then lays the matrix out by columns, and a step copies all of it to look up its tokens'
rows.

Projections to queries, keys and values are one array on one GPU. XLA makes one product of three too: on an
H200, with 64 rows of the 8B shape, it takes 38 us of a layer, and that of one array 16.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...cpu_kernels.library import library
from ..attention import Attention, FusedQKV
from ..experts import parted, unparted
from ..gpus import gpu_of
from ..tree import holds, pytree, static, unwrapped
from .compress import replaced
from .cpu.packed import packed, packed_as, unpacked
from .fixed import fixed, is_fixed, unfixed
from .quant import Scheme
from .transposed import is_transposed, like, transposed, untransposed

T = TypeVar("T")
LANES, SUBLANES = 128, 8  # of a TPU's tile


def laid_out(params: T, cpu_kernels: bool, donate: bool = False, tied_head: Scheme | None = None) -> T:
    """Parameters, or ShapeDtypeStructs, as products of their device read them; with `donate` each weight is
    deleted when its copy is ready. `tied_head` as in `packed`. Raises ValueError where a CPU is to have
    kernels that are not there."""
    if cpu_kernels and is_on_cpu(params):
        params = packed(params, library().isa, donate, tied_head)
    return transposed(params, donate)


def is_on_cpu(params: Any) -> bool:
    shardings = (x.sharding for x in jax.tree.leaves(params))
    return any(device.platform == "cpu" for where in shardings if where for device in where.device_set)


def prepared(
    params: T, batch_invariant_matmul: bool, cpu_kernels: bool = False, tied_head: Scheme | None = None
) -> T:
    """Parameters, or ShapeDtypeStructs, as their device multiplies them; `tied_head` as in `packed`."""
    params = in_lanes(parted(laid_out(params, cpu_kernels, tied_head=tied_head)))
    return fixed(params) if batch_invariant_matmul else params


def prepared_as(served: Any, params: T) -> T:
    """Parameters in the forms that those of a running engine have."""
    params = packed_as(served, params)
    params = fuse_qkv(params) if has_fused_qkv(served) else params
    params = in_lanes(parted(transposed(params) if is_transposed(served) else params))
    return fixed(params) if is_fixed(served) else params


def unprepared(params: T) -> T:
    """An engine's parameters as arrays in the forms that they came in."""
    return unparted(split_qkv(untransposed(unpacked(unfixed(out_of_lanes(params))))))


@pytree
class LaneRows:
    """An embedding [V,D] with zeros behind each row. size: D."""

    array: Any  # [V, a multiple of LANES]
    size: int = static(0)

    @property
    def shape(self) -> tuple[int, int]:
        return self.array.shape[0], self.size

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    @property
    def sharding(self) -> Any:
        return self.array.sharding

    @property
    def is_fully_addressable(self) -> bool:
        return self.array.is_fully_addressable

    @property
    def whole(self) -> Any:
        """The embedding as it was, an array that is a copy, or a ShapeDtypeStruct."""
        if isinstance(self.array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)
        return self.array[:, : self.size]

    def __getitem__(self, tokens: Int[Array, "*tokens"]) -> Float[Array, "*tokens D"]:
        return self.array[tokens][..., : self.size]


def in_lanes(params: T) -> T:
    """A decoder, with arrays or ShapeDtypeStructs, whose embedding is one of `LaneRows` where a TPU would
    copy it in each step; others are given back themselves. An embedding that is the output matrix too stays
    as it is."""
    embed: Any = getattr(params, "embed", None)
    if getattr(params, "head", None) is None or not is_by_columns(embed):
        return params
    V, D = embed.shape
    wide = filling(D, LANES)
    if isinstance(embed, jax.ShapeDtypeStruct):
        rows: Any = jax.ShapeDtypeStruct((V, wide), embed.dtype, sharding=embed.sharding)
    else:
        rows = jnp.pad(embed, ((0, 0), (0, wide - D)))
    return replace(params, embed=LaneRows(rows, D))  # type: ignore[type-var]


def is_by_columns(embed: Any) -> bool:
    """True for a matrix whose part lies by columns on each TPU that has one."""
    if not isinstance(embed, jax.Array | jax.ShapeDtypeStruct) or embed.sharding is None or embed.ndim != 2:
        return False
    (V, D), lanes = embed.sharding.shard_shape(embed.shape), lanes_of(embed.sharding.device_set).size
    return lanes > 1 and filling(V, lanes) * filling(D, SUBLANES) < filling(V, SUBLANES) * filling(D, lanes)


def filling(size: int, unit: int) -> int:
    """The least multiple of a unit that a size fits in."""
    return -(-size // unit) * unit


class Lanes(NamedTuple):
    """Numbers that fill a vector register of the devices that have an array, 1 where none is to be filled.
    XLA may lay out rows of other sizes by columns, and copy them in each step of a TPU.

    devices: how many split the array, at most.
    """

    size: int = 1
    devices: int = 1


def lanes_of(devices: Collection[Any], shards: int = 1) -> Lanes:
    """Return the lanes of devices over which a number of shards of rows are dealt."""
    return Lanes(LANES if is_tpu(next(iter(devices))) else 1, len(devices) // shards)


def is_tpu(device: Any) -> bool:
    return device.platform == "tpu"


def out_of_lanes(params: T) -> T:
    """The tree with the embedding in place of `LaneRows`; itself where it has none."""
    return unwrapped(params, LaneRows, lambda x: x.whole)


# ---------------------------------------------------------------- queries, keys and values


def fuse_qkv(params: T, donate: bool = False) -> T:
    """A tree of parameters, or of ShapeDtypeStructs, that lies on one NVIDIA GPU, with the projections to
    queries, keys and values as `FusedQKV`; others are given back themselves.

    Left as they are: layers without keys or values of their own, and records. With `donate` the projections
    are deleted when their copy is ready.
    """

    def layer(w: Attention) -> Attention:
        parts = w.q, w.k, w.v
        if not all(isinstance(x, jax.Array | jax.ShapeDtypeStruct) for x in parts):
            return w
        if len({(x.shape[0], x.shape[2], x.dtype) for x in parts}) > 1:
            return w
        return replace(w, q=replaced(parts, fused(parts), donate), k=None, v=None)

    return unwrapped(params, Attention, layer) if is_on_one_gpu(params) else params


def fused(parts: Sequence[Any]) -> FusedQKV:
    heads, first = tuple(x.shape[1] for x in parts), parts[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return FusedQKV(like(first, (first.shape[0], sum(heads), first.shape[2])), heads)
    return FusedQKV(jnp.concatenate(parts, axis=1), heads)


def is_on_one_gpu(params: Any) -> bool:
    """True if one device has all arrays, and is an NVIDIA GPU."""
    places = {x.sharding for x in jax.tree.leaves(params)}
    devices = set().union(*(where.device_set for where in places if where is not None))
    return len(devices) == 1 and all(gpu_of(device) is not None for device in devices)


def split_qkv(params: T) -> T:
    """The tree with projections in place of `FusedQKV`, which are copied; itself where it has none."""

    def layer(w: Attention) -> Attention:
        if not isinstance(w.q, FusedQKV):
            return w
        q, k, v = w.q.parts
        return replace(w, q=q, k=k, v=v)

    return unwrapped(params, Attention, layer) if has_fused_qkv(params) else params


def has_fused_qkv(params: Any) -> bool:
    return holds(params, FusedQKV)
