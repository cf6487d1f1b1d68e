"""Setup of slots on the device: a request's limits and sampling parameters, and the masks of grammars."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ....kvcache.sharded_tables import ShardedPageTables
from ....kvcache.tables import PageTables
from ....sampling.params import request_knobs
from ....sampling.state import dense_bias, needs_history, num_mask_words
from ...runtime.compiled.futures import PendingSample
from ...runtime.compiled.lowering import StepArguments
from ...runtime.compiled.shapes import Sizes
from ...runtime.compiled.small_programs import MASK_SLOTS_PER_CALL
from ...runtime.executor import Executor, StepPrograms
from ...runtime.steps.step import SlotContents
from .request import Request
from .scheduler_output import ScheduledTokens, SchedulerConfig


class LogitBiasCache:
    """Makes biases of logits and keeps the last one. Completions of one prompt get their slots in succession,
    and share it."""

    def __init__(self, V: int):
        self._V, self._params, self._bias = V, None, np.zeros(0, np.float32)

    def get(self, request: Request) -> np.ndarray:
        """Return a request's bias, float32 [V]. It is shared: callers must not change it."""
        if request.params is not self._params:
            self._bias = dense_bias(request.params, self._V, request.bad_words)
            self._params = request.params
        return self._bias


def setup_slot(executor: Executor, slots: Any, request: Request, bias_cache: LogitBiasCache) -> Any:
    """Dispatch the setup of a request's slot, and return the slots.

    The slot gets the request's limits and parameters, and the tokens that penalties and bad words need.
    """
    assert request.slot is not None
    prompt_len, slot, sizes = len(request.prompt), np.int32(request.slot), executor.programs.sizes
    knobs = request_knobs(
        request.params,
        seed=request.seed,
        stop_ids=request.stop_ids,
        prompt_len=prompt_len,
        bad_words=request.bad_words,
        processors=sizes.processors,
    )
    known = np.int32(len(request.tokens))
    end = np.int32(request.slot_end)
    lora_slot = np.int32(request.lora_slot)
    contents = SlotContents(known, end, knobs, lora_slot)
    slots = executor.assign_slot(slots, slot, contents)
    if not needs_history(request.params, sizes.processors):
        return slots
    tokens = np.zeros(sizes.max_model_len, np.int32)
    tokens[: len(request.tokens)] = request.tokens
    total = np.int32(len(request.tokens))
    return executor.load_history(slots, slot, tokens, np.int32(prompt_len), total, bias_cache.get(request))


def load_grammar_masks(executor: Executor, slots: Any, scheduled_rows: Iterable[ScheduledTokens]) -> Any:
    """Return the slots with the masks of grammars for each position that rows sample.

    A row whose grammar has yet to read a token gets none, nor does a row whose request has no slot any more.
    """
    scheduled_rows = [
        row
        for row in scheduled_rows
        if row.is_constrained and not row.is_awaiting_mask and row.request.slot is not None
    ]
    for i in range(0, len(scheduled_rows), MASK_SLOTS_PER_CALL):
        slots = executor.load_masks(
            slots, *make_masks(executor.programs, scheduled_rows[i : i + MASK_SLOTS_PER_CALL])
        )
    return slots


def dispatch_deferred_sampling(
    executor: Executor,
    arguments: StepArguments,
    unsampled_calls: Iterable[tuple[PendingSample, Iterable[ScheduledTokens]]],
) -> StepArguments:
    """Dispatch sampling that was deferred until grammars had read the last step; returns the new state."""
    for output, scheduled_rows in unsampled_calls:
        assert not any(
            scheduled.is_awaiting_mask and scheduled.request.slot is not None for scheduled in scheduled_rows
        )
        slots = load_grammar_masks(executor, arguments.slots, scheduled_rows)
        arguments = replace(arguments, slots=output.draw(arguments.params, slots))
    return arguments


def make_masks(programs: StepPrograms, scheduled_rows: Sequence[ScheduledTokens]) -> tuple[np.ndarray, ...]:
    """Return slots, the first position that each samples, and the masks from there on. Unused rows hold a
    slot number out of range."""
    shape = MASK_SLOTS_PER_CALL, programs.sizes.positions, num_mask_words(programs.config.target.vocab_size)
    slots, first = np.full(shape[0], programs.sizes.num_slots, np.int32), np.zeros(shape[0], np.int32)
    masks = np.zeros(shape, np.uint32)
    for row, scheduled in enumerate(scheduled_rows):
        assert scheduled.request.slot is not None and scheduled.request.constraint is not None
        row_masks = scheduled.request.constraint.token_masks(scheduled.draft_tokens)
        slots[row] = scheduled.request.slot
        first[row] = len(scheduled.request.tokens)
        masks[row, : len(row_masks)] = row_masks[:, : shape[2]]
    return slots, first, masks


def make_page_tables(
    windows: Sequence[int | None], sizes: Sizes, scheduler_config: SchedulerConfig
) -> PageTables:
    """Return empty page tables for the windows of a model's layers, one set for each shard."""
    max_step_tokens = scheduler_config.max_step_tokens
    dispatch_tokens = max(scheduler_config.decode_steps, scheduler_config.max_draft_tokens + 1)
    make = partial(
        PageTables,
        windows,
        sizes.pages,
        sizes.page_size,
        max_step_tokens,
        dispatch_tokens,
        sizes.state_stride,
    )
    return make() if sizes.shards == 1 else ShardedPageTables(make, sizes.shards)
