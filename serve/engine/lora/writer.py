"""Writes adapters into the LoRA slots of a device, without a compilation."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ....kvcache.stages import has_separate_ffn
from ....model.config import Experts, ModelConfig
from ....model.draft_pair import EngineParams, target_params, with_target
from ....model.layers import Weight
from ....model.sharding import axis_tuple, make_axis_rules, make_sharding
from ....model.transformer import Decoder
from ....model.tree import Spec, paths_and_leaves
from ....model.weights.lora import (
    AdapterSizes,
    adaptable_specs,
    lora_stacks,
    num_lora_slots,
    with_lora_stacks,
)
from ...options.engine import EngineOptions
from .lora_slots import LoRASlots


def add_lora_slots(params: Decoder, config: ModelConfig, sizes: AdapterSizes) -> Decoder:
    """Return parameters, or ShapeDtypeStructs, with stacks of LoRA slots for each weight.

    A stack has the sharding of its weight. All slots hold the same random numbers, so that the comparison of
    shapes before serving covers adapters too.
    """
    rng, dtype = np.random.default_rng(0), params.embed.dtype
    weights = adaptable_specs(config, isinstance(params.embed.sharding, NamedSharding), sizes.experts)
    weight_shardings = shardings_by_path(params)

    def sharding_like(spec: Spec, weight_sharding: Any) -> Any:
        if not isinstance(weight_sharding, NamedSharding):
            return weight_sharding
        rules = make_axis_rules(weight_sharding.mesh)
        split = {name for axes in rules.values() for name in axis_tuple(axes)} <= set(
            weight_sharding.mesh.axis_names
        )
        return (
            make_sharding(spec, weight_sharding.mesh, rules)
            if split
            else NamedSharding(weight_sharding.mesh, PartitionSpec())
        )

    def draw_stack(spec: Spec, axis: int, weight_sharding: Any) -> Any:
        if isinstance(params.embed, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding_like(spec, weight_sharding))
        values = spec.scale * rng.standard_normal([*spec.shape[:axis], 1, *spec.shape[axis + 1 :]])
        stack = np.broadcast_to(values.astype(np.float32), spec.shape).astype(dtype)
        return jax.device_put(stack, sharding_like(spec, weight_sharding))

    stacks = {}
    for path, weight in weights.items():
        a, b = sizes.specs(weight)
        stacks[path] = (
            draw_stack(a, len(a.shape) - 2, weight_shardings[path]),
            draw_stack(b, 0, weight_shardings[path]),
        )
    return with_lora_stacks(params, stacks)


def shardings_by_path(params: Decoder) -> dict[str, Any]:
    """Return the sharding of each weight by its path. A weight is an array or a record of arrays."""
    return {path: jax.tree.leaves(w)[0].sharding for path, w in paths_and_leaves(params, Weight)}


def add_lora_if_enabled(params: Decoder, config: ModelConfig, options: EngineOptions) -> Decoder:
    """Return parameters with the LoRA slots that the options ask for; unchanged without `enable_lora`.

    Raises ValueError if feed-forward layers have devices of their own. Raises ValueError for `lora_experts`
    of a model without experts, or on a mesh.
    """
    if not options.enable_lora:
        return params
    if has_separate_ffn(params):
        raise ValueError("enable_lora is not allowed: feed-forward layers lie on devices of their own")
    if options.lora_experts and not any(isinstance(kind.ffn, Experts) for kind in config.layers):
        raise ValueError("lora_experts is not allowed: the model has no experts")
    if options.lora_experts and isinstance(params.embed.sharding, NamedSharding):
        raise ValueError("lora_experts is not allowed on a mesh: only on one device")
    sizes = AdapterSizes(options.max_loras, options.max_lora_rank, options.lora_experts)
    return add_lora_slots(params, config, sizes)


class AdapterWriter:
    """Writes adapters into the LoRA slots of parameters, by programs that are compiled at the start.

    Stacks are donated to the programs and so updated in place. Under a pipeline they are not: its threads may
    have yet to dispatch steps with them.
    """

    def __init__(self, params: Decoder):
        self.lora_slots = LoRASlots(num_lora_slots(params))
        self._programs: dict[Any, Any] = {}
        stack_axes = [
            stack_axis for pair in lora_stacks(params).values() for stack_axis in stacks_with_slot_axes(pair)
        ]
        groups = {
            frozenset(stack.sharding.device_set) for stack, _ in stack_axes if stack.sharding is not None
        }
        donate = (0,) if len(groups) <= 1 else ()
        for stack, axis in stack_axes:
            if slot_program_key(stack, axis) not in self._programs:
                self._programs[slot_program_key(stack, axis)] = compile_slot_write(stack, axis, donate)

    def write_due_adapters(self, params: EngineParams) -> EngineParams:
        """Write the adapters that are due, and return the new parameters. The old stacks may be donated."""
        due = self.lora_slots.pop_due()
        if not due:
            return params
        stacks = lora_stacks(target_params(params))
        for slot, adapter in due.items():
            assert adapter.terms.keys() <= stacks.keys(), f"{adapter.name} has terms beside other weights"
            for path, pair in stacks.items():
                terms = adapter.terms.get(path, (None, None))
                (a, a_axis), (b, b_axis) = stacks_with_slot_axes(pair)
                stacks[path] = (
                    self._write_slot(a, a_axis, terms[0], slot),
                    self._write_slot(b, b_axis, terms[1], slot),
                )
        return with_target(params, with_lora_stacks(target_params(params), stacks))

    def _write_slot(self, stack: jax.Array, axis: int, term: np.ndarray | None, slot: int) -> jax.Array:
        """Return a stack with a term in a slot, padded with zeros; None writes zeros alone."""
        new = np.zeros((*stack.shape[:axis], *stack.shape[axis + 1 :]), stack.dtype)
        if term is not None:
            new[tuple(map(slice, term.shape))] = term
        return self._programs[slot_program_key(stack, axis)](stack, new, np.int32(slot))


def stacks_with_slot_axes(pair: tuple[Any, Any]) -> tuple[tuple[Any, int], tuple[Any, int]]:
    """Return the stacks `a` and `b` of a weight, each with its axis of slots."""
    a, b = pair
    return (a, a.ndim - 2), (b, 0)


def slot_program_key(stack: Any, axis: int) -> Any:
    """Return the key of the program that writes into a stack like this one."""
    return axis, stack.shape, str(stack.dtype), stack.sharding


def compile_slot_write(stack: Any, axis: int, donate: tuple[int, ...]) -> Any:
    """Compile the program that writes into one slot of a stack. The result has the sharding of the stack."""
    new = jax.ShapeDtypeStruct((*stack.shape[:axis], *stack.shape[axis + 1 :]), stack.dtype)
    slot = jax.ShapeDtypeStruct((), jnp.int32)
    put_at = partial(jax.lax.dynamic_update_index_in_dim, axis=axis)
    put = jax.jit(put_at, donate_argnums=donate, out_shardings=stack.sharding)
    return put.lower(stack, new, slot).compile()
