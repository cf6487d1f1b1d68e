"""Steps of several shards of rows at once: each device, or group of devices that splits every layer, computes
rows of its own, with seats and pages of its own.

What a shard computes is the step of one device: it knows nothing of the others, but for experts that are
split over all of them (`model/experts/parts.py`). Numbers of seats and pages are a shard's own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from ..model.experts import MoE
from ..model.sharding import DATA, GROUP, KV, TENSOR, automatic_axes, listed, ways
from ..model.transformer import Decoder

SEATS, PAGES, WHOLE = PartitionSpec(DATA), PartitionSpec(None, DATA), PartitionSpec()


def each_shard(work: Callable[..., Any], mesh: Any, given: Any, made: Any) -> Callable[..., Any]:
    """Work of one shard as that of all: `given` and `made` are PartitionSpecs of what it takes and gives.
    Axes within a shard stay XLA's."""
    return jax.shard_map(work, mesh=mesh, in_specs=given, out_specs=made, axis_names={DATA}, check_vma=False)


def steps(
    phase: Callable[..., Any],
    params: Any,
    mesh: Any,
    given: tuple[Any, ...] = (PAGES, SEATS, SEATS),
    made: tuple[Any, ...] = (PAGES, SEATS, SEATS),
) -> Callable[..., Any]:
    """A phase of one shard, of parameters (arrays or shapes), cache, slots and batch, as that of all.
    `given` and `made` are PartitionSpecs of other arguments behind the parameters, and of other results."""
    own = jax.tree.map(lambda x: over_shards(x.sharding.spec), params)
    return each_shard(phase, mesh, (own, *given), made)


def head_axes(mesh: Any, K: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Axes of a shard's devices over which K key heads lie, as many as divide them, and those over which the
    query heads of each do: as the table of `model/sharding.py` has it. A mesh that it does not know has
    none."""
    names = tuple(name for name in automatic_axes(mesh) if name in (TENSOR, KV, GROUP))
    few = next(n for n in range(len(names), -1, -1) if K % ways(mesh, names[:n]) == 0)
    return names[:few], names[few:]


def split_heads(work: Callable[..., Any], pool: Any, places: Sequence[Any], *new: Any, axis: int = 0) -> Any:
    """`work(pool, *places, *new)` by each device for the heads that it holds, which are the first axis of the
    pool and of the result, and `axis` of what is new. XLA's partitioner would gather all heads of these."""
    mesh = jax.typeof(jax.tree.leaves(pool)[0]).sharding.mesh
    if not (axes := head_axes(mesh, pool.shape[0])[0]):
        return work(pool, *places, *new)
    heads, each = PartitionSpec(axes), PartitionSpec(*[None] * axis, axes)
    specs = heads, *(WHOLE for _ in places), *(each for _ in new)
    names = set(automatic_axes(mesh))
    own = jax.shard_map(work, mesh=mesh, in_specs=specs, out_specs=heads, axis_names=names, check_vma=False)
    return own(pool, *places, *new)


def over_shards(spec: PartitionSpec) -> PartitionSpec:
    """The part of a sharding that is split over shards."""
    return PartitionSpec(*(DATA if DATA in listed(axes) else None for axes in spec))


def splits_experts(params: Decoder) -> bool:
    moes = (layer.ffn for layer in params.layers if isinstance(layer.ffn, MoE))
    return any(w.parts is not None and DATA in w.parts.numbers for w in moes)


def in_seat(change: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """A change of one seat or of several, `change(slots, seat, *news)`, by the seats' numbers among those of
    all shards: in the others it is none."""

    def own(slots: Any, seat: Int[Array, "*seats"], *news: Any) -> Any:
        count = jax.tree.leaves(slots)[0].shape[0]
        seat = seat - jax.lax.axis_index(DATA).astype(jnp.int32) * count
        return change(slots, jnp.where((seat >= 0) & (seat < count), seat, count), *news)

    def at(slots: Any, seat: Int[Array, "*seats"], *news: Any) -> Any:
        return each_shard(own, mesh, (SEATS, WHOLE, *(WHOLE for _ in news)), SEATS)(slots, seat, *news)

    return at
