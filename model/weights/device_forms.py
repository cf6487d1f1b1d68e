"""Conversion of weights to the forms in which an engine multiplies them on its device, and back.

An embedding's rows fill whole lanes of a TPU. A row that is no multiple of 128 numbers can take more memory
than a column. A TPU then lays the matrix out by columns, and a step copies all of it to look up its tokens'
rows.

Projections to queries, keys and values are one array on one GPU. XLA fuses three products into one too. On an
H200, with 64 rows of the 8B shape, that takes 38 us of a layer, and one array takes 16 us.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from ...cpu_kernels.library import load_library
from ..attention import Attention, FusedQKV
from ..experts import drop_expert_axes, with_expert_axes
from ..gpus import gpu_from_device
from ..sharding import array_devices, tree_devices
from ..tree import has_instance, map_instances, pytree, static
from .compression.compress import place_replacement, quantise_inputs
from .cpu.kernel_norm import KernelNorm
from .cpu.packed import Packed, pack_params
from .fixed_tiles import FixedTiled, with_fixed_tiles
from .gpu.transposed_codes import transpose_code_params
from .input_quantised import InputQuantised
from .transposed import Transposed, abstract_like, transpose_params

T = TypeVar("T")
TPU_LANES, TPU_SUBLANES = 128, 8  # lanes and sublanes of a TPU's tile


@dataclass(frozen=True)
class DeviceForms:
    """Forms of weights that an engine uses where its device has them. Every engine uses the others.

    cpu_kernels: duetto's CPU kernels multiply packed weights.
    tied_head: scheme of the packed copy of a tied embedding, as in `pack_params`.
    fuse_qkv: projections to queries, keys and values are one array.
    fixed_tiles: products have one tiling for every number of rows.
    activations: scheme in which products of quantised weights quantise their input, or None.
    """

    cpu_kernels: bool = False
    tied_head: str | None = None
    fuse_qkv: bool = False
    fixed_tiles: bool = False
    activations: str | None = None

    @classmethod
    def from_params(cls, served: Any) -> "DeviceForms":
        """Return the forms that parameters have."""
        head = getattr(served, "head", None)
        codes = head.codes if isinstance(head, Packed) and head.is_tied else None
        kinds = InputQuantised, Packed
        nodes = jax.tree.leaves(served, is_leaf=lambda x: isinstance(x, kinds))
        return cls(
            has_instance(served, Packed),
            codes and codes.scheme,
            has_instance(served, FusedQKV),
            has_instance(served, FixedTiled),
            next((x.activations for x in nodes if isinstance(x, kinds) and x.activations), None),
        )


def lay_out_params(params: T, forms: DeviceForms, donate: bool = False) -> T:
    """Convert parameters, or ShapeDtypeStructs, to the forms that are copies of weights.

    With `donate` each weight is deleted when its copy is ready. Raises ValueError if a CPU is to use kernels
    that are missing, and as `quantise_inputs`.
    """
    params = quantise_inputs(params, forms.activations)
    if forms.cpu_kernels and is_on_cpu(params):
        params = pack_params(params, load_library().isa, donate, forms.tied_head)
    params = transpose_params(params, donate)
    if forms.activations is not None and is_on_one_gpu(params):
        params = transpose_code_params(params, donate)
    return fuse_qkv(params, donate) if forms.fuse_qkv else params


def is_on_cpu(params: Any) -> bool:
    """Return True if a device of the arrays is a CPU."""
    return any(device.platform == "cpu" for device in tree_devices(params))


def convert_to_device_forms(params: T, forms: DeviceForms = DeviceForms(), donate: bool = False) -> T:
    """Convert parameters, or ShapeDtypeStructs, to the forms that their device multiplies.

    Weights that have their form already stay as they are. Takes `donate`, and raises, like `lay_out_params`.
    """
    params = pad_embedding_rows(with_expert_axes(lay_out_params(params, forms, donate)))
    return with_fixed_tiles(params) if forms.fixed_tiles else params


def restore_params(params: T) -> T:
    """Convert an engine's parameters back to arrays, in the forms in which they were loaded."""
    head: Any = getattr(params, "head", None)
    if isinstance(head, Packed) and head.is_tied:
        params = replace(params, head=None)  # type: ignore[type-var]
    params = map_instances(params, RECORDS_OF_WEIGHTS, lambda x: x.original)
    return drop_expert_axes(split_qkv(params))


@pytree
class PaddedEmbedding:
    """An embedding [V,D] whose rows are padded with zeros to whole lanes.

    array: [V, a multiple of `TPU_LANES`].
    size: D.
    """

    array: Any
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
    def original(self) -> Any:
        """Return the embedding without padding: an array that is a copy, or a ShapeDtypeStruct."""
        if isinstance(self.array, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.sharding)
        return self.array[:, : self.size]

    def __getitem__(self, tokens: Int[Array, "*tokens"]) -> Float[Array, "*tokens D"]:
        return self.array[tokens][..., : self.size]


# Records that replace one weight, or one norm, which is their `original`.
RECORDS_OF_WEIGHTS = Packed, KernelNorm, Transposed, FixedTiled, InputQuantised, PaddedEmbedding


def pad_embedding_rows(params: T) -> T:
    """Pad the rows of a decoder's embedding (`PaddedEmbedding`) if a TPU would copy it in each step.

    Takes arrays or ShapeDtypeStructs. Returns others unchanged, and those whose embedding is the output
    matrix too.
    """
    embed: Any = getattr(params, "embed", None)
    if getattr(params, "head", None) is None or not is_column_major(embed):
        return params
    V, D = embed.shape
    wide = next_multiple(D, TPU_LANES)
    if isinstance(embed, jax.ShapeDtypeStruct):
        rows: Any = jax.ShapeDtypeStruct((V, wide), embed.dtype, sharding=embed.sharding)
    else:
        rows = jnp.pad(embed, ((0, 0), (0, wide - D)))
    return replace(params, embed=PaddedEmbedding(rows, D))  # type: ignore[type-var]


def is_column_major(embed: Any) -> bool:
    """Return True for a matrix whose part is laid out by columns on each TPU that has one."""
    if not isinstance(embed, jax.Array | jax.ShapeDtypeStruct) or embed.ndim != 2:
        return False
    if not (devices := array_devices(embed)):
        return False
    shape = embed.shape if isinstance(embed, Tracer) else embed.sharding.shard_shape(embed.shape)
    (V, D), lanes = shape, device_lanes(devices).size
    return lanes > 1 and next_multiple(V, lanes) * next_multiple(D, TPU_SUBLANES) < next_multiple(
        V, TPU_SUBLANES
    ) * next_multiple(D, lanes)


def next_multiple(size: int, unit: int) -> int:
    """Return the least multiple of `unit` that is at least `size`."""
    return -(-size // unit) * unit


class Lanes(NamedTuple):
    """Row size that fills a vector register of the devices that hold an array.

    XLA may lay out rows of other sizes by columns, and copy them in each step of a TPU.

    size: numbers of a register; 1: no padding.
    devices: largest number of devices that split the array.
    """

    size: int = 1
    devices: int = 1


def device_lanes(devices: Collection[Any], shards: int = 1) -> Lanes:
    """Return the lanes of devices that hold `shards` shards of rows."""
    return Lanes(TPU_LANES if is_tpu(next(iter(devices))) else 1, len(devices) // shards)


def is_tpu(device: Any) -> bool:
    """Return True if a device is a TPU."""
    return device.platform == "tpu"


# ---------------------------------------------------------------- queries, keys and values


def fuse_qkv(params: T, donate: bool = False) -> T:
    """Join the projections to queries, keys and values as `FusedQKV`, if all parameters are on one NVIDIA
    GPU.

    Takes arrays or ShapeDtypeStructs. Unchanged are layers that borrow keys or values, and records. With
    `donate` the projections are deleted when their copy is ready.
    """

    def fuse_layer(w: Attention) -> Attention:
        parts = w.q, w.k, w.v
        if not all(isinstance(x, jax.Array | jax.ShapeDtypeStruct) for x in parts):
            return w
        if len({(x.shape[0], x.shape[2], x.dtype) for x in parts}) > 1:
            return w
        return replace(w, q=place_replacement(parts, fuse_projections(parts), donate), k=None, v=None)

    return map_instances(params, Attention, fuse_layer) if is_on_one_gpu(params) else params


def fuse_projections(parts: Sequence[Any]) -> FusedQKV:
    """Join three projections along their heads."""
    heads, first = tuple(x.shape[1] for x in parts), parts[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return FusedQKV(abstract_like(first, (first.shape[0], sum(heads), first.shape[2])), heads)
    return FusedQKV(jnp.concatenate(parts, axis=1), heads)


def is_on_one_gpu(params: Any) -> bool:
    """Return True if one device has all arrays, and is an NVIDIA GPU."""
    devices = tree_devices(params)
    return len(devices) == 1 and all(gpu_from_device(device) is not None for device in devices)


def split_qkv(params: T) -> T:
    """Replace each `FusedQKV` by copies of its projections. Returns the tree itself if it has none."""

    def split_layer(w: Attention) -> Attention:
        if not isinstance(w.q, FusedQKV):
            return w
        q, k, v = w.q.projections
        return replace(w, q=q, k=k, v=v)

    return map_instances(params, Attention, split_layer)
