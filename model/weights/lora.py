"""Weights with low-rank terms per row (LoRA: Hu et al., arXiv 2106.09685), for many adapters in one product
(S-LoRA: Sheng et al., arXiv 2311.03285).

A weight has slots for adapters. Rows of one batch use any slot, or none. A row's bits depend neither on the
contents of other slots nor on the number of its own: the second product has the same size for each slot. A
single product over the ranks of all slots, with zeros for the others, would round a row's sums differently in
each slot.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..config import Dense, Experts, GroupedQuery, Latent, LayerKind, ModelConfig
from ..layers import Weight, einsum, ragged_dot
from ..recurrent.kinds import DeltaNet, Mamba, ShortConv
from ..transformer import decoder_spec
from ..tree import Spec, leaves_by_path, map_by_path, map_instances, paths_and_leaves, pytree

T = TypeVar("T")
NO_ADAPTER = -1  # the slot of a row without an adapter
# projections that adapters may change, by the kind of sublayer
ADAPTED_PROJECTIONS: dict[type, tuple[str, ...]] = {
    GroupedQuery: ("q", "k", "v", "o", "gate"),
    Latent: ("q", "q_down", "q_up", "kv_down", "k_up", "v_up", "o"),
    DeltaNet: ("q", "k", "v", "rate", "decay_down", "decay", "gate_down", "gate", "o"),
    ShortConv: ("before", "after", "v", "o"),
    Mamba: ("z", "v", "k", "q", "step", "o"),
    Dense: ("gate", "up", "down"),
    Experts: ("shared.gate", "shared.up", "shared.down"),
}
ROUTED_PROJECTIONS = ("experts.gate", "experts.up", "experts.down")  # of Experts, E of each side by side
# Deviation of the numbers in slots that were never used: shapes are compared with them.
EMPTY_SLOT_SCALE = 0.02


@pytree
class Adapted:
    """A weight [*inputs, *outputs], an array or a record, with low-rank terms a * b in slots.

    A row without an adapter has the bits of the weight alone.

    base: the weight.
    a: [*inputs, slots, rank]; of experts side by side [E, *inputs, slots, rank].
    b: [slots, rank, *outputs]; of experts side by side [slots, E, rank, *outputs].
    row_slots: slot of each row, NO_ADAPTER for none. None between steps.
    """

    base: Any
    a: Any
    b: Any
    row_slots: Any = None  # int32 [B]

    @property
    def ragged_dot_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays that `ragged_dot` multiplies rows by."""
        return self.base.ragged_dot_shapes if isinstance(self.base, Weight) else (self.base.shape,)

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """Compute x * W + x * a * b, each row with the a and b of its slot.

        x is [rows, ..., inputs] or [rows * tokens, ..., inputs]. If the equation ends in the inputs (tied
        embeddings, one axis of inputs), a and b are exchanged.
        """
        plain = einsum(equation, x, self.base, dtype)
        operands, out = equation.split("->")
        left, right = operands.split(",")
        inputs = self.a.ndim - 2
        first, second = (self.a, f"{right[:inputs]}YZ"), (self.b, f"YZ{right[inputs:]}")
        if right[0] in out:
            first, second = second, first
        summed = sum(axis in first[1] and axis not in out for axis in left)
        rows = left[: len(left) - summed]
        slots = repeat_per_token(self.row_slots, x.shape[: x.ndim - summed])
        fenced = jax.lax.optimization_barrier(x)  # against dot merging, which would copy weights
        thin = einsum(f"{left},{first[1]}->{rows}YZ", fenced, first[0])
        by_slot = einsum(f"{rows}YZ,{second[1]}->Y{out}", thin, second[0], dtype)
        in_slot = jax.nn.one_hot(slots, self.b.shape[0], dtype=bool, axis=0)
        delta = jnp.where(jnp.expand_dims(in_slot, range(in_slot.ndim, by_slot.ndim)), by_slot, 0).sum(0)
        has_adapter = jnp.expand_dims(slots != NO_ADAPTER, range(slots.ndim, plain.ndim))
        return jnp.where(has_adapter, plain + delta, plain)

    def ragged_dot(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], row_experts: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Multiply consecutive rows by one expert's matrix each, and add each row's low-rank term.

        `sizes` and `row_experts` are of experts, `self.row_slots` has the slots of these rows.
        """
        plain, num_slots = ragged_dot(rows, self.base, sizes, row_experts), self.a.shape[-2]
        first = self.a.reshape(*self.a.shape[:-2], -1)
        thin = ragged_dot(rows, first, sizes, row_experts).reshape(len(rows), num_slots, -1)
        out = plain
        for i in range(num_slots):
            with_adapter = plain + ragged_dot(thin[:, i], self.b[i], sizes, row_experts)
            out = jnp.where((self.row_slots == i)[:, None], with_adapter, out)
        return out

    def select_rows(self, rows: Int[Array, " rows"]) -> "Adapted":
        """Return the weight for a batch of these rows alone."""
        return self if self.row_slots is None else replace(self, row_slots=self.row_slots[rows])

    def select_tokens(self, tokens: Int[Array, " rows"], count: int) -> "Adapted":
        """Return the weight for rows that are these tokens of a batch of `count` tokens."""
        return replace(self, row_slots=repeat_per_token(self.row_slots, (count,))[tokens])

    def select_expert(self, e: Int[Array, ""]) -> "Adapted":
        """Return the weight of expert e, if experts stand side by side."""
        return replace(self, base=jax.tree.map(lambda x: x[e], self.base), a=self.a[e], b=self.b[:, e])


def repeat_per_token(row_slots: Int[Array, " B"], rows: tuple[int, ...]) -> Int[Array, "*rows"]:
    """Repeat each row's slot for all of its tokens. `rows`: shape whose first axis is rows, or rows times
    tokens."""
    tokens = prod(rows)
    return jnp.repeat(row_slots, tokens // len(row_slots)).reshape(rows)


@dataclass(frozen=True)
class AdapterSizes:
    """Capacity for LoRA adapters.

    count: number of adapters.
    rank: their largest rank.
    experts: True if routed experts have slots too.
    """

    count: int
    rank: int
    experts: bool = False

    def specs(self, spec: Spec) -> tuple[Spec, Spec]:
        """Return the specs of `a` and `b` for a weight. They are split over a mesh like its inputs and
        outputs."""
        first, num_stacked = num_input_axes(spec), int(is_stacked_spec(spec))
        sizes, axes = (self.count, self.rank), ("adapters", "rank")
        a = Spec((*spec.shape[:first], *sizes), (*spec.axes[:first], *axes), scale=EMPTY_SLOT_SCALE)
        shape = (self.count, *spec.shape[:num_stacked], self.rank, *spec.shape[first:])
        return a, Spec(
            shape, (axes[0], *spec.axes[:num_stacked], axes[1], *spec.axes[first:]), scale=EMPTY_SLOT_SCALE
        )


def num_input_axes(spec: Spec) -> int:
    """Return the number of a projection's axes before its outputs: the experts' axis, if any, and the summed
    axes.

    The summed axes are all but the last if the last is the model's. Otherwise it is one, the model's or a
    rank.
    """
    return len(spec.axes) - 1 if spec.axes[-1] == "model" else 1 + is_stacked_spec(spec)


def is_stacked_spec(spec: Spec) -> bool:
    """Return True for a projection of experts side by side."""
    return spec.axes[0] == "experts"


def adaptable_specs(config: ModelConfig, has_mesh: bool = False, routed: bool = False) -> dict[str, Spec]:
    """Return the specs of the weights that adapters may change, by path.

    These are projections of attention, of recurrent and of dense layers, and of shared experts. With `routed`
    they include those of routed experts. If devices share a layer of experts (`has_mesh`), it has none.
    """
    specs = leaves_by_path(decoder_spec(config))
    names = (
        f"layers.{i}.{part}.{name}"
        for i, kind in enumerate(config.layers)
        for part, of_part in named_sublayers(kind)
        for name in (
            *ADAPTED_PROJECTIONS.get(type(of_part), ()),
            *(ROUTED_PROJECTIONS if routed and type(of_part) is Experts else ()),
        )
        if not (has_mesh and isinstance(of_part, Experts))
    )
    return {name: specs[name] for name in names if name in specs}


def named_sublayers(kind: LayerKind) -> list[tuple[str, Any]]:
    """Return the mixers and the feed-forward layer of a layer with the names of their fields."""
    mixers = [("attention" if mixer.state_shapes is None else "recurrent", mixer) for mixer in kind.mixers]
    return [*mixers, ("ffn", kind.ffn)]


def with_lora_stacks(params: T, stacks: Mapping[str, tuple[Any, Any]]) -> T:
    """Return parameters with the low-rank stacks (a, b) at these paths, and without others."""

    def replace_weight(path: str, weight: Any) -> Any:
        base = weight.base if is_adapted(weight) else weight
        return Adapted(base, *stacks[path]) if path in stacks else base

    return map_by_path(params, Weight, replace_weight)


def drop_lora(params: T) -> T:
    """Remove all low-rank terms. Returns the tree itself if it has none."""
    return map_instances(params, Adapted, lambda w: w.base)


def lora_stacks(params: Any) -> dict[str, tuple[Any, Any]]:
    """Return the low-rank stacks (a, b) by the path of their weight."""
    return {path: (w.a, w.b) for path, w in paths_and_leaves(params, Adapted) if is_adapted(w)}


def with_row_slots(params: T, row_slots: Int[Array, " B"]) -> T:
    """Return the parameters for a step whose rows use these slots. Returns the tree itself if no weight has
    slots."""
    return map_instances(params, Adapted, lambda w: replace(w, row_slots=row_slots))


def num_lora_slots(params: Any) -> int:
    """Return the number of slots for adapters that a tree has."""
    return next((a.shape[-2] for a, _ in lora_stacks(params).values()), 0)


def is_adapted(x: Any) -> bool:
    return isinstance(x, Adapted)
