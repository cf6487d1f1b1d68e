"""Weights beside which rows have low-rank terms of their own (LoRA: Hu et al., arXiv 2106.09685), of many
adapters in one product: each row keeps what its own adapter makes (S-LoRA: Sheng et al., arXiv 2311.03285).

A weight has places for adapters. Rows of one batch belong to any of them, or to none. No row's bits depend
on what the other places hold, nor on which is its own: the second product is of the same size for each place.
One over the ranks of all places, zeros where they are others', would round a row's sums by its place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..config import Dense, Experts, GroupedQuery, Latent, LayerKind, ModelConfig
from ..layers import Weight, einsum, ragged_product
from ..recurrent.kinds import DeltaNet, Mamba, ShortConv
from ..transformer import decoder_spec
from ..tree import Spec, paths, pytree, unwrapped

T = TypeVar("T")
NO_ADAPTER = -1  # the place of a row that has none
# projections of each kind of part that adapters may change
ADAPTED: dict[type, tuple[str, ...]] = {
    GroupedQuery: ("q", "k", "v", "o", "gate"),
    Latent: ("q", "q_down", "q_up", "kv_down", "k_up", "v_up", "o"),
    DeltaNet: ("q", "k", "v", "rate", "decay_down", "decay", "gate_down", "gate", "o"),
    ShortConv: ("before", "after", "v", "o"),
    Mamba: ("z", "v", "k", "q", "step", "o"),
    Dense: ("gate", "up", "down"),
    Experts: ("shared.gate", "shared.up", "shared.down"),
}
ROUTED = ("experts.gate", "experts.up", "experts.down")  # of Experts, E of each side by side
SCALE = 0.02  # of the numbers in places that no adapter has had: shapes are compared with them


@pytree
class Adapted:
    """A weight [*inputs, *outputs], an array or a record, and `places` of terms a b of at most a rank. Of
    experts side by side a is [E, *inputs, places, rank], and b [places, E, rank, *outputs].

    `owner` is each row's place, NO_ADAPTER for none; None between steps. A row without an adapter has the
    bits of the weight alone.
    """

    base: Any
    a: Any  # [*inputs, places, rank]
    b: Any  # [places, rank, *outputs]
    owner: Any = None  # int32 [B]

    @property
    def factors(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that `ragged` multiplies rows with."""
        return self.base.factors if isinstance(self.base, Weight) else (self.base.shape,)

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """The product of x, whose first axis is the rows' or the rows and their tokens in one, and whose last
        axes are the inputs, by an equation that ends in the outputs; or, of a weight whose inputs are one
        axis, the product of outputs by one that ends in the inputs."""
        plain = einsum(equation, x, self.base, dtype)
        operands, out = equation.split("->")
        left, right = operands.split(",")
        inputs = self.a.ndim - 2
        first, second = (self.a, f"{right[:inputs]}YZ"), (self.b, f"YZ{right[inputs:]}")
        if right[0] in out:
            first, second = second, first
        summed = sum(axis in first[1] and axis not in out for axis in left)
        rows = left[: len(left) - summed]
        owner = per_token(self.owner, x.shape[: x.ndim - summed])
        apart = jax.lax.optimization_barrier(x)  # else XLA copies the weight beside `a`, for one product
        thin = einsum(f"{left},{first[1]}->{rows}YZ", apart, first[0])
        each = einsum(f"{rows}YZ,{second[1]}->Y{out}", thin, second[0], dtype)
        owned = jax.nn.one_hot(owner, self.b.shape[0], dtype=bool, axis=0)
        own = jnp.where(jnp.expand_dims(owned, range(owned.ndim, each.ndim)), each, 0).sum(0)
        has = jnp.expand_dims(owner != NO_ADAPTER, range(owner.ndim, plain.ndim))
        return jnp.where(has, plain + own, plain)

    def ragged(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], owner: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Products of consecutive rows with one expert's weight each; `sizes` and `owner` are the experts'.
        The record is that of these rows."""
        plain, places = ragged_product(rows, self.base, sizes, owner), self.a.shape[-2]
        first = self.a.reshape(*self.a.shape[:-2], -1)
        thin = ragged_product(rows, first, sizes, owner).reshape(len(rows), places, -1)
        found = plain
        for i in range(places):
            own = plain + ragged_product(thin[:, i], self.b[i], sizes, owner)
            found = jnp.where((self.owner == i)[:, None], own, found)
        return found

    def of_rows(self, rows: Int[Array, " rows"]) -> "Adapted":
        """The weight for a batch of these rows alone."""
        return self if self.owner is None else replace(self, owner=self.owner[rows])

    def of_tokens(self, tokens: Int[Array, " rows"], count: int) -> "Adapted":
        """The weight for rows that are these tokens of a batch of `count` tokens."""
        return replace(self, owner=per_token(self.owner, (count,))[tokens])

    def of_expert(self, e: Int[Array, ""]) -> "Adapted":
        """The weight of expert e, of experts side by side."""
        return replace(self, base=jax.tree.map(lambda x: x[e], self.base), a=self.a[e], b=self.b[:, e])


def per_token(owner: Int[Array, " B"], rows: tuple[int, ...]) -> Int[Array, "*rows"]:
    """Each row's place for all of its tokens; the rows lead, or are flat."""
    tokens = prod(rows)
    return jnp.repeat(owner, tokens // len(owner)).reshape(rows)


@dataclass(frozen=True)
class AdapterSizes:
    """Capacity for LoRA adapters beside a model's weights: `count` adapters of at most `rank`, beside each
    routed expert too where `experts` says so."""

    count: int
    rank: int
    experts: bool = False

    def specs(self, weight: Spec) -> tuple[Spec, Spec]:
        """Specs of `a` and `b` for a weight: split over a mesh like its inputs and outputs."""
        first, of = inputs_of(weight), int(is_stacked(weight))
        sizes, axes = (self.count, self.rank), ("adapters", "rank")
        a = Spec((*weight.shape[:first], *sizes), (*weight.axes[:first], *axes), scale=SCALE)
        shape = (self.count, *weight.shape[:of], self.rank, *weight.shape[first:])
        return a, Spec(shape, (axes[0], *weight.axes[:of], axes[1], *weight.axes[first:]), scale=SCALE)


def inputs_of(projection: Spec) -> int:
    """Number of first axes over which a layer's projection sums, behind that of experts: all but the last, or
    one, the model's or a rank."""
    return len(projection.axes) - 1 if projection.axes[-1] == "model" else 1 + is_stacked(projection)


def is_stacked(projection: Spec) -> bool:
    """True for a projection of experts side by side."""
    return projection.axes[0] == "experts"


def adaptable(config: ModelConfig, has_mesh: bool = False, routed: bool = False) -> dict[str, Spec]:
    """The weights of a model that adapters may change, by their paths: projections of attention, of recurrent
    and of dense feed-forward layers, and those of shared experts, and of routed ones if `routed`, where
    devices do not share them."""
    specs = paths(decoder_spec(config))
    names = (
        f"layers.{i}.{part}.{name}"
        for i, kind in enumerate(config.layers)
        for part, of_part in parts_of(kind)
        for name in (
            *ADAPTED.get(type(of_part), ()),
            *(ROUTED if routed and type(of_part) is Experts else ()),
        )
        if not (has_mesh and isinstance(of_part, Experts))
    )
    return {name: specs[name] for name in names if name in specs}


def parts_of(kind: LayerKind) -> list[tuple[str, Any]]:
    """The parts of a layer with their fields' names."""
    mixers = [("attention" if mixer.state is None else "recurrent", mixer) for mixer in kind.mixers]
    return [*mixers, ("ffn", kind.ffn)]


def adapted(params: T, stacks: Mapping[str, tuple[Any, Any]]) -> T:
    """A tree of parameters with `a` and `b` beside the weights at these paths, in place of others."""

    def leaf(key: Any, weight: Any) -> Any:
        path = jax.tree_util.keystr(key, simple=True, separator=".")
        base = weight.base if is_record(weight) else weight
        return Adapted(base, *stacks[path]) if path in stacks else base

    return jax.tree_util.tree_map_with_path(leaf, params, is_leaf=lambda x: isinstance(x, Weight))


def unadapted(params: T) -> T:
    """The tree with the weights alone; itself where nothing is beside them."""
    return unwrapped(params, Adapted, lambda w: w.base)


def stacks_of(params: Any) -> dict[str, tuple[Any, Any]]:
    """Adapters' stacks (a, b) by the path of their weight."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_record)
    return {
        jax.tree_util.keystr(key, simple=True, separator="."): (w.a, w.b) for key, w in leaves if is_record(w)
    }


def with_owners(params: T, owner: Int[Array, " B"]) -> T:
    """The parameters for a step whose rows belong to these places; themselves where no weight has any."""
    return unwrapped(params, Adapted, lambda w: replace(w, owner=owner))


def places_in(params: Any) -> int:
    """Number of adapters for which a tree has room."""
    return next((a.shape[-2] for a, _ in stacks_of(params).values()), 0)


def is_record(x: Any) -> bool:
    return isinstance(x, Adapted)
