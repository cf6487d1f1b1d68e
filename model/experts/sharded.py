"""Mixtures of experts on several devices. Each device computes the experts, or the parts of them, that it
holds (Lepikhin et al., GShard, arXiv 2006.16668)."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from ..config import Experts
from ..ffn import FFN
from ..layers import Weight
from ..sharding import automatic_axes, sharded_axes
from ..tree import has_instance, map_instances
from ..weights.input_quantised import InputQuantised
from .mixture import LocalExperts, MoE, count_experts, run_routed_experts, run_shared_expert, weighted_sum


class ExpertAxes(NamedTuple):
    """Mesh axes that split a layer of experts.

    experts: axes that split the experts.
    inner: axes that split the experts' inner dimension.
    shared: axes that split the shared expert's inner dimension.
    """

    experts: tuple[str, ...]
    inner: tuple[str, ...]
    shared: tuple[str, ...]

    @classmethod
    def from_layer(cls, w: MoE) -> "ExpertAxes":
        """Read the axes off the shardings of a layer's arrays, or of its shapes."""
        experts = common_axes(sharded_axes(x, 0) for x in jax.tree.leaves(w.experts))
        return cls(experts, inner_axes(w.experts, 1), inner_axes(w.shared, 0) if w.shared else ())

    def restrict_to(self, names: Collection[str]) -> "ExpertAxes":
        """Return only the axes that are in `names`."""
        return ExpertAxes(*(tuple(name for name in axes if name in names) for axes in self))

    def partition_specs(self, local_experts: LocalExperts) -> LocalExperts:
        """Return PartitionSpecs of the arrays. Axes that are not split are replicated."""

        def partition_spec(first: int, axes: tuple[str, ...], i: int) -> PartitionSpec:
            padding = (None,) * (i - first)
            return PartitionSpec(*[self.experts or None] * first, *padding, *[axes or None] * (i >= first))

        experts = jax.tree.map(
            partial(partition_spec, 1, self.inner), inner_dims(local_experts.expert_ffn, 1)
        )
        if local_experts.shared_ffn is None:
            return LocalExperts(experts, None)
        return LocalExperts(
            experts,
            jax.tree.map(partial(partition_spec, 0, self.shared), inner_dims(local_experts.shared_ffn, 0)),
        )


def with_expert_axes(params: Any) -> Any:
    """Record in each layer of experts on a mesh how it is split. Takes parameters or shapes."""

    def mark_layer(w: Any) -> Any:
        if not isinstance(w, MoE) or not all(has_named_sharding(x) for x in jax.tree.leaves(w.experts)):
            return w
        axes = ExpertAxes.from_layer(w)
        expert_axes = axes if any(axes) else None
        return w if w.expert_axes == expert_axes else replace(w, expert_axes=expert_axes)

    return map_instances(params, MoE, mark_layer)


def drop_expert_axes(params: Any) -> Any:
    """Remove the records of how experts are split."""
    return map_instances(params, MoE, lambda w: replace(w, expert_axes=None) if w.expert_axes else w)


def has_named_sharding(x: Any) -> bool:
    """Return True if an array or a shape has a NamedSharding."""
    return not isinstance(x, Tracer) and isinstance(x.sharding, NamedSharding)


def sum_sharded_experts(
    expert_axes: ExpertAxes,
    local_experts: LocalExperts,
    x: Float[Array, "tokens D"],
    weights: Float[Array, "tokens A"],
    chosen: Int[Array, "tokens A"],
    c: Experts,
    tile: int,
) -> Float[Array, "tokens D"]:
    """Compute `sum_chosen_experts` on several devices, of which each holds some experts or parts of them. No
    weight moves.

    Every device computes what it holds, and one all-reduce adds up each token's outputs. Under a `shard_map`
    whose shards have tokens of their own, experts may be split over these shards too. A shared expert whose
    rows are coded is left to XLA's partitioner: a row has one scale on all devices.
    """
    mesh, replicated = jax.typeof(x).sharding.mesh, PartitionSpec()
    names = automatic_axes(mesh)
    shared_ffn = local_experts.shared_ffn
    if names and shared_ffn is not None and has_instance(shared_ffn, InputQuantised):
        routed_axes, routed = expert_axes._replace(shared=()), local_experts._replace(shared_ffn=None)
        total = sum_sharded_experts(routed_axes, routed, x, weights, chosen, c, tile)
        return total + run_shared_expert(shared_ffn, c, x)
    local_sum = partial(sum_local_experts, c=c, tile=tile, expert_axes=expert_axes, names=names)
    if not names:
        return local_sum(local_experts, x, weights, chosen)
    specs = expert_axes.restrict_to(names).partition_specs(local_experts), replicated, replicated, replicated
    sharded_sum = jax.shard_map(
        local_sum, mesh=mesh, in_specs=specs, out_specs=replicated, axis_names=set(names), check_vma=False
    )
    return sharded_sum(local_experts, x, weights, chosen)


def sum_local_experts(
    local_experts: LocalExperts,
    x: Float[Array, "tokens D"],
    weights: Float[Array, "tokens A"],
    chosen: Int[Array, "tokens A"],
    *,
    c: Experts,
    tile: int,
    expert_axes: ExpertAxes,
    names: tuple[str, ...],
) -> Float[Array, "tokens D"]:
    """Return the sum of this device's experts over its tokens, all-reduced over the mesh axes that split
    experts.

    Along data-parallel axes, tokens are all-gathered first. Each shard then gets back the sum of its own
    tokens, added in the shards' order. So bits do not depend on the shard.

    names: mesh axes that XLA's partitioner would split.
    """
    expert_split, inner_split, shared_split = expert_axes
    split_axes = tuple(name for name in names if name in {*expert_split, *inner_split, *shared_split})
    data_axes = tuple(name for name in expert_split if name not in names)
    f, count = local_experts.expert_ffn, count_experts(local_experts.expert_ffn)
    if f.down_bias is not None:
        f = replace(f, down_bias=keep_on_first_device(f.down_bias, inner_split))
    tokens, weights, chosen = (
        gather_tokens(data_axes, x, weights, chosen) if data_axes else (x, weights, chosen)
    )
    local_choice = (
        chosen - jax.lax.axis_index(expert_split).astype(jnp.int32) * count if expert_split else chosen
    )
    is_local = (local_choice >= 0) & (local_choice < count)
    outputs, weights = run_routed_experts(
        f, c, tokens, weights, jnp.where(is_local, local_choice, count), tile
    )
    total = weighted_sum(jnp.where(is_local[..., None], outputs, 0), weights, x.dtype)
    if data_axes:
        total = ordered_reduce_scatter(total, data_axes)
    total = keep_on_first_device(
        total, [name for name in split_axes if name not in (*expert_split, *inner_split)]
    )
    if local_experts.shared_ffn is not None:
        total += keep_on_first_device(
            run_shared_expert(local_experts.shared_ffn, c, x),
            [name for name in split_axes if name not in shared_split],
        )
    return jax.lax.psum(total, split_axes) if split_axes else total


def gather_tokens(
    data_axes: tuple[str, ...],
    x: Float[Array, "tokens D"],
    weights: Float[Array, "tokens A"],
    chosen: Int[Array, "tokens A"],
) -> tuple[Float[Array, "all D"], Float[Array, "all A"], Int[Array, "all A"]]:
    """Gather the tokens of all shards with their experts.

    Choices are few bytes. To route again would take a product with the whole router.
    """
    gather = partial(jax.lax.all_gather, axis_name=data_axes, axis=0, tiled=True)
    bits = jax.lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.int32)
    choices = gather(jnp.concatenate([bits, chosen], axis=1))
    A = chosen.shape[1]
    return gather(x), jax.lax.bitcast_convert_type(choices[:, :A], jnp.float32), choices[:, A:]


def ordered_reduce_scatter(
    total: Float[Array, "all D"], data_axes: tuple[str, ...]
) -> Float[Array, "tokens D"]:
    """Exchange the shards' partial sums, and add up a shard's own tokens in the shards' order (ordered
    reduce-scatter).

    A reduce-scatter sends as many bytes, but each shard may add in another order. Bits would then depend on a
    token's shard.
    """
    n = jax.lax.axis_size(data_axes)
    sent = jax.lax.all_to_all(total.reshape(n, -1, total.shape[1]), data_axes, 0, 0)
    summed = sent[0].astype(jnp.float32)
    for i in range(1, n):
        summed += sent[i].astype(jnp.float32)
    return summed.astype(total.dtype)


def keep_on_first_device(x: Float[Array, "*shape"], axes: Sequence[str]) -> Float[Array, "*shape"]:
    """Return x on the first device along these axes of a mesh, and zeros on the others. x is replicated along
    them."""
    return jnp.where(jax.lax.axis_index(tuple(axes)) == 0, x, 0) if axes else x


def inner_axes(f: FFN, first: int) -> tuple[str, ...]:
    """Return the mesh axes that split F in all arrays that have it. `first`: number of axes before an
    expert's."""
    dims = zip(jax.tree.leaves(f), jax.tree.leaves(inner_dims(f, first)), strict=True)
    return common_axes(sharded_axes(x, i) for x, i in dims if i >= 0)


def inner_dims(f: FFN, first: int) -> FFN:
    """Return the number of the axis F of each array, after `first` other axes. -1: it has none."""
    dims = FFN(first + 1, first + 1, first, first, first, -1, -1)

    def find_inner_dims(weight: Any, i: int) -> Any:
        if isinstance(weight, Weight) and len(weight.ragged_dot_shapes) > 1:  # first: inputs, last: outputs
            leaves, tree = jax.tree.flatten(weight)
            leaf_index = 0 if i == first else len(leaves) - 1
            return tree.unflatten([i if k == leaf_index else -1 for k in range(len(leaves))])
        return jax.tree.map(lambda x: i if i >= 0 and x.shape[i] > 1 else -1, weight)

    return FFN(*(find_inner_dims(getattr(f, name.name), getattr(dims, name.name)) for name in fields(FFN)))


def common_axes(axes: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the axes if all are the same, else none."""
    distinct = set(axes)
    return distinct.pop() if len(distinct) == 1 else ()
