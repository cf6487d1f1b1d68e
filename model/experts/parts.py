"""Mixtures of experts on several devices: each works with the experts, or the parts of them, that it holds
(Lepikhin et al., GShard, arXiv 2006.16668)."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from ..config import Experts
from ..ffn import FFN
from ..layers import Weight
from ..sharding import automatic_axes, axes_of
from ..tree import unwrapped
from .mixture import LocalExperts, MoE, count_of, shared_output, weighed_experts, weighted


class ExpertAxes(NamedTuple):
    """Axes of a mesh over which the experts, their inner dimension and that of the shared one are split."""

    numbers: tuple[str, ...]
    inner: tuple[str, ...]
    of_shared: tuple[str, ...]

    @classmethod
    def of(cls, w: MoE) -> "ExpertAxes":
        """Read off the shardings of a layer's arrays, or of its shapes."""
        numbers = alike(axes_of(x, 0) for x in jax.tree.leaves(w.experts))
        return cls(numbers, inner_axes(w.experts, 1), inner_axes(w.shared, 0) if w.shared else ())

    def among(self, names: Collection[str]) -> "ExpertAxes":
        """The axes that are in `names`."""
        return ExpertAxes(*(tuple(name for name in axes if name in names) for axes in self))

    def specs(self, held: LocalExperts) -> LocalExperts:
        """PartitionSpecs of the arrays; axes that are not split stay whole."""

        def of(first: int, axes: tuple[str, ...], i: int) -> PartitionSpec:
            beside = (None,) * (i - first)
            return PartitionSpec(*[self.numbers or None] * first, *beside, *[axes or None] * (i >= first))

        experts = jax.tree.map(partial(of, 1, self.inner), inner_dims(held.experts, 1))
        if held.shared is None:
            return LocalExperts(experts, None)
        return LocalExperts(experts, jax.tree.map(partial(of, 0, self.of_shared), inner_dims(held.shared, 0)))


def parted(params: Any) -> Any:
    """A tree of parameters, or of shapes, whose layers of experts on a mesh say how they are split."""

    def layer(w: Any) -> Any:
        if not isinstance(w, MoE) or not all(is_named(x) for x in jax.tree.leaves(w.experts)):
            return w
        parts = ExpertAxes.of(w)
        return replace(w, parts=parts if any(parts) else None)

    found = unwrapped(params, MoE, layer)
    return found if is_parted(found) else params


def unparted(params: Any) -> Any:
    """The tree as it was."""
    return unwrapped(params, MoE, lambda w: replace(w, parts=None)) if is_parted(params) else params


def is_parted(params: Any) -> bool:
    """True if some layer of the tree says how its experts are split."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, MoE))
    return any(isinstance(w, MoE) and w.parts is not None for w in leaves)


def is_named(x: Any) -> bool:
    return isinstance(x.sharding, NamedSharding)


def add_parts(
    parts: ExpertAxes,
    held: LocalExperts,
    x: Float[Array, "tokens D"],
    weights: Float[Array, "tokens A"],
    chosen: Int[Array, "tokens A"],
    c: Experts,
    tile: int,
) -> Float[Array, "tokens D"]:
    """`add_all` where every device works with the experts, or the parts of them, that it holds, and one
    all-reduce adds up what they make of each token. No weight moves.

    Under a `shard_map` whose shards have tokens of their own, experts may be split over these too.
    """
    mesh, whole = jax.typeof(x).sharding.mesh, PartitionSpec()
    names = automatic_axes(mesh)
    local = partial(add_own, c=c, tile=tile, parts=parts, names=names)
    if not names:
        return local(held, x, weights, chosen)
    specs = parts.among(names).specs(held), whole, whole, whole
    everywhere = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=whole, axis_names=set(names), check_vma=False
    )
    return everywhere(held, x, weights, chosen)


def add_own(
    held: LocalExperts,
    x: Float[Array, "tokens D"],
    weights: Float[Array, "tokens A"],
    chosen: Int[Array, "tokens A"],
    *,
    c: Experts,
    tile: int,
    parts: ExpertAxes,
    names: tuple[str, ...],
) -> Float[Array, "tokens D"]:
    """A device's part of the sum, added up over those of the axes `names` that split anything. Over others
    tokens differ: there each device works with those of all, and adds up what all made of its own."""
    numbers, inner, of_shared = parts
    over = tuple(name for name in names if name in {*numbers, *inner, *of_shared})
    shards = tuple(name for name in numbers if name not in names)
    f, count = held.experts, count_of(held.experts)
    if f.down_bias is not None:
        f = replace(f, down_bias=once(f.down_bias, inner))
    tokens, weights, chosen = of_all(shards, x, weights, chosen) if shards else (x, weights, chosen)
    mine = chosen - jax.lax.axis_index(numbers).astype(jnp.int32) * count if numbers else chosen
    here = (mine >= 0) & (mine < count)
    outputs, weights = weighed_experts(f, c, tokens, weights, jnp.where(here, mine, count), tile)
    total = weighted(jnp.where(here[..., None], outputs, 0), weights, x.dtype)
    if shards:
        total = added_at_home(total, shards)
    total = once(total, [name for name in over if name not in (*numbers, *inner)])
    if held.shared is not None:
        total += once(shared_output(held.shared, c, x), [name for name in over if name not in of_shared])
    return jax.lax.psum(total, over) if over else total


def of_all(
    shards: tuple[str, ...],
    x: Float[Array, "tokens D"],
    weights: Float[Array, "tokens A"],
    chosen: Int[Array, "tokens A"],
) -> tuple[Float[Array, "all D"], Float[Array, "all A"], Int[Array, "all A"]]:
    """The tokens of all shards with their experts: choices are few bytes, routing again a product with the
    whole router."""
    gather = partial(jax.lax.all_gather, axis_name=shards, axis=0, tiled=True)
    bits = jax.lax.bitcast_convert_type(weights.astype(jnp.float32), jnp.int32)
    choices = gather(jnp.concatenate([bits, chosen], axis=1))
    A = chosen.shape[1]
    return gather(x), jax.lax.bitcast_convert_type(choices[:, :A], jnp.float32), choices[:, A:]


def added_at_home(total: Float[Array, "all D"], shards: tuple[str, ...]) -> Float[Array, "tokens D"]:
    """Exchange the shards' partial sums and add up those of a shard's own tokens, in the shards' order. A
    reduce-scatter sends as many bytes, but may add up in another order in each shard: bits would depend on a
    token's shard."""
    n = jax.lax.axis_size(shards)
    sent = jax.lax.all_to_all(total.reshape(n, -1, total.shape[1]), shards, 0, 0)
    found = sent[0].astype(jnp.float32)
    for i in range(1, n):
        found += sent[i].astype(jnp.float32)
    return found.astype(total.dtype)


def once(x: Float[Array, "*shape"], axes: Sequence[str]) -> Float[Array, "*shape"]:
    """x on the first device along these axes of a mesh, zeros on the others; x is replicated along them."""
    return jnp.where(jax.lax.axis_index(tuple(axes)) == 0, x, 0) if axes else x


def inner_axes(f: FFN, first: int) -> tuple[str, ...]:
    """The axes of a mesh over which F is split in all arrays that have it."""
    places = zip(jax.tree.leaves(f), jax.tree.leaves(inner_dims(f, first)), strict=True)
    return alike(axes_of(x, i) for x, i in places if i >= 0)


def inner_dims(f: FFN, first: int) -> FFN:
    """The number of the axis F of each array of experts, behind `first` others; -1 where it has none."""
    dims = FFN(first + 1, first + 1, first, first, first, -1, -1)

    def of(weight: Any, i: int) -> Any:
        if isinstance(weight, Weight) and len(weight.factors) > 1:  # inputs are the first one's
            leaves, tree = jax.tree.flatten(weight)
            own = 0 if i == first else len(leaves) - 1
            return tree.unflatten([i if k == own else -1 for k in range(len(leaves))])
        return jax.tree.map(lambda x: i if i >= 0 and x.shape[i] > 1 else -1, weight)

    return FFN(*(of(getattr(f, name.name), getattr(dims, name.name)) for name in fields(FFN)))


def alike(axes: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The axes, where all are the same."""
    found = set(axes)
    return found.pop() if len(found) == 1 else ()
