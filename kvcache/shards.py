"""Steps of several data-parallel shards at once. Each shard is a device, or a group of devices that splits
every layer. It computes its own rows, with its own slots and pages.

A shard computes the step of one device, independently of the others. Experts that are split over all shards
are the exception (`model/experts/sharded.py`). Numbers of slots and pages are relative to a shard.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from ..model.experts import MoE
from ..model.sharding import (
    DATA_AXIS,
    KV_AXIS,
    KV_GROUP_AXIS,
    TENSOR_AXIS,
    automatic_axes,
    axis_tuple,
    num_splits,
)
from ..model.transformer import Decoder

SLOT_SPEC, PAGE_SPEC, REPLICATED_SPEC = (
    PartitionSpec(DATA_AXIS),
    PartitionSpec(None, DATA_AXIS),
    PartitionSpec(),
)


def map_shards(work: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Make a function of one shard into one of all shards, by `shard_map` over the data axis. `in_specs` and
    `out_specs` are the PartitionSpecs of its arguments and results. Axes within a shard stay automatic."""
    return jax.shard_map(
        work, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={DATA_AXIS}, check_vma=False
    )


def map_phase(
    phase: Callable[..., Any],
    params: Any,
    mesh: Any,
    in_specs: tuple[Any, ...] = (PAGE_SPEC, SLOT_SPEC, SLOT_SPEC),
    out_specs: Any = (PAGE_SPEC, SLOT_SPEC, SLOT_SPEC),
) -> Callable[..., Any]:
    """Make a phase of one shard into one of all shards. Its arguments are parameters (arrays or shapes),
    cache, slots and batch. `in_specs` and `out_specs` are the PartitionSpecs of the arguments after the
    parameters, and of the results."""
    param_specs = jax.tree.map(lambda x: data_axis_spec(x.sharding.spec), params)
    return map_shards(phase, mesh, (param_specs, *in_specs), out_specs)


def mesh_head_axes(mesh: Any, K: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the mesh axes of a shard that split K key heads, and the axes that split the query heads of
    each. As many axes split key heads as divide K. A mesh with other axes than the table in
    `model/sharding.py` has none."""
    names = tuple(name for name in automatic_axes(mesh) if name in (TENSOR_AXIS, KV_AXIS, KV_GROUP_AXIS))
    few = next(n for n in range(len(names), -1, -1) if K % num_splits(mesh, names[:n]) == 0)
    return names[:few], names[few:]


def apply_to_local_heads(
    work: Callable[..., Any], pool: Any, indices: Sequence[Any], *new: Any, axis: int = 0
) -> Any:
    """Call `work(pool, *indices, *new)` on each device for the heads it holds. Heads are the first axis of
    the pool and of the result, and `axis` of the new arrays. XLA's partitioner would all-gather the heads."""
    mesh = jax.typeof(jax.tree.leaves(pool)[0]).sharding.mesh
    if not (axes := mesh_head_axes(mesh, pool.shape[0])[0]):
        return work(pool, *indices, *new)
    heads_spec, new_spec = PartitionSpec(axes), PartitionSpec(*[None] * axis, axes)
    specs = heads_spec, *(REPLICATED_SPEC for _ in indices), *(new_spec for _ in new)
    names = set(automatic_axes(mesh))
    mapped = jax.shard_map(
        work, mesh=mesh, in_specs=specs, out_specs=heads_spec, axis_names=names, check_vma=False
    )
    return mapped(pool, *indices, *new)


def data_axis_spec(spec: PartitionSpec) -> PartitionSpec:
    """Return the part of a PartitionSpec that splits over the data axis."""
    return PartitionSpec(*(DATA_AXIS if DATA_AXIS in axis_tuple(axes) else None for axes in spec))


def has_split_experts(params: Decoder) -> bool:
    """True if experts of some layer are split over the data-parallel shards."""
    moes = (layer.ffn for layer in params.layers if isinstance(layer.ffn, MoE))
    return any(w.expert_axes is not None and DATA_AXIS in w.expert_axes.experts for w in moes)


def map_slot_update(change: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """Make an update of slots, `change(slots, slot, *values)`, into one whose slot numbers count over all
    shards. Other shards get a slot number past their last, which changes nothing."""

    def update_shard(slots: Any, slot: Int[Array, "*slots"], *values: Any) -> Any:
        """Update the slots of this shard."""
        count = jax.tree.leaves(slots)[0].shape[0]
        slot = slot - jax.lax.axis_index(DATA_AXIS).astype(jnp.int32) * count
        return change(slots, jnp.where((slot >= 0) & (slot < count), slot, count), *values)

    def update_slots(slots: Any, slot: Int[Array, "*slots"], *values: Any) -> Any:
        """Update slots by their numbers among all shards."""
        return map_shards(
            update_shard, mesh, (SLOT_SPEC, REPLICATED_SPEC, *(REPLICATED_SPEC for _ in values)), SLOT_SPEC
        )(slots, slot, *values)

    return update_slots
