"""Small programs of an engine: they assign a slot to a request, load its history and the masks of grammars,
and make an unused cache and unused slots."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ....sampling.state import TokenMasks
from ..steps.step import SlotContents, Slots
from .shapes import Sizes

MASK_SLOTS_PER_CALL = 8  # number of slots whose masks one call writes


class SmallPrograms(NamedTuple):
    """Small programs, lowered or compiled. The first three change slots.

    assign_slot: assigns a slot to a request.
    load_history: loads a request's history.
    load_masks: loads the masks of grammars.
    fresh_cache: makes an unused cache.
    fresh_slots: makes unused slots.
    """

    assign_slot: Any
    load_history: Any
    load_masks: Any
    fresh_cache: Any
    fresh_slots: Any


def abstract_assignment(slots: Slots, sizes: Sizes) -> tuple[Any, ...]:
    """Return the arguments of `assign_slot` after the slots, as shapes: slot, SlotContents."""
    knobs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), slots.sampling.knobs)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    return scalar, SlotContents(scalar, scalar, knobs, scalar)


def abstract_history(slots: Slots, sizes: Sizes) -> tuple[Any, ...]:
    """Return the arguments of `load_history` after the slots, as shapes: slot, tokens, number of the prompt's
    tokens, number of all tokens, bias."""
    scalar, V = jax.ShapeDtypeStruct((), jnp.int32), slots.sampling.bias.shape[1]
    tokens = jax.ShapeDtypeStruct((sizes.max_model_len,), jnp.int32)
    return scalar, tokens, scalar, scalar, jax.ShapeDtypeStruct((V,), jnp.float32)


def abstract_masks(slots: Slots, sizes: Sizes) -> tuple[Any, ...]:
    """Return the arguments of `load_masks` after the slots, as shapes: slots, the first position of each,
    masks."""
    K, rows = MASK_SLOTS_PER_CALL, slots.sampling.token_masks.masks
    row_numbers = jax.ShapeDtypeStruct((K,), jnp.int32)
    return row_numbers, row_numbers, jax.ShapeDtypeStruct((K, *rows.shape[1:]), rows.dtype)


# Programs that change the slots, each with its arguments after the slots.
SLOT_PROGRAMS = {
    "assign_slot": abstract_assignment,
    "load_history": abstract_history,
    "load_masks": abstract_masks,
}


def wrap_mask_loader(load: Callable[..., TokenMasks]) -> Callable[..., Slots]:
    """Wrap a program that loads masks, so that it takes and returns all slots.

    The program itself has few array arguments: it is called often, and each one costs time.
    """

    def load_into_slots(slots: Slots, *masks: Any) -> Slots:
        allowed = load(slots.sampling.token_masks, *masks)
        return replace(slots, sampling=replace(slots.sampling, token_masks=allowed))

    return load_into_slots
