"""Setup of slots on the device: a request's limits and sampling parameters, and the masks of grammars."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ....kvcache.sharded_tables import ShardedPageTables
from ....kvcache.tables import PageTables
from ....sampling.params import knobs_row
from ....sampling.state import dense_bias, needs_history, words_of
from ...runtime.compiled.compile import MASKED_AT_ONCE, StepArguments
from ...runtime.compiled.futures import PendingSample
from ...runtime.compiled.shapes import Sizes
from ...runtime.programs import StepPrograms
from ...runtime.steps.scoring import NEVER
from ...runtime.steps.step import Seat
from .plan import ScheduledTokens, SchedulerConfig
from .request import Request


def seated(programs: StepPrograms, slots: Any, request: Request) -> Any:
    """Return the slots with a request in its own: its limits and parameters, and the tokens that penalties
    and bad words look back on."""
    assert request.slot is not None
    prompt_len, slot = len(request.prompt), np.int32(request.slot)
    knobs = knobs_row(
        request.params,
        seed=request.seed,
        stop_ids=request.stop_ids,
        prompt_len=prompt_len,
        bad_words=request.bad_words,
        processors=programs.sizes.processors,
    )
    known, end, place = np.int32(len(request.tokens)), np.int32(request.reach), np.int32(request.place)
    scored = np.int32(request.unscored if request.scored else NEVER)
    new = Seat(known, end, scored, knobs, place)
    slots = programs.seat(slots, slot, new)
    if not needs_history(request.params, programs.sizes.processors):
        return slots
    tokens = np.zeros(programs.sizes.max_model_len, np.int32)
    tokens[: len(request.tokens)] = request.tokens
    bias = dense_bias(request.params, programs.config.target.vocab_size, request.bad_words)
    return programs.load_history(
        slots, slot, tokens, np.int32(prompt_len), np.int32(len(request.tokens)), bias
    )


def with_masks(programs: StepPrograms, slots: Any, works: Iterable[ScheduledTokens]) -> Any:
    """Return the slots with the masks of grammars at each position that rows sample. A row that has to read a
    token first, or that has no slot any more, gets none."""
    works = [w for w in works if w.is_constrained and not w.is_awaiting and w.request.slot is not None]
    for i in range(0, len(works), MASKED_AT_ONCE):
        slots = programs.load_masks(slots, *masks_of(programs, works[i : i + MASKED_AT_ONCE]))
    return slots


def drawn(
    programs: StepPrograms,
    state: StepArguments,
    undrawn: Iterable[tuple[PendingSample, Iterable[ScheduledTokens]]],
) -> StepArguments:
    """Dispatch the draws that were deferred until grammars had read the step before; returns the state behind
    them."""
    for output, works in undrawn:
        assert not any(work.is_awaiting and work.request.slot is not None for work in works)
        slots = with_masks(programs, state.slots, works)
        state = replace(state, slots=output.draw(state.params, slots))
    return state


def masks_of(programs: StepPrograms, works: Sequence[ScheduledTokens]) -> tuple[np.ndarray, ...]:
    """Return slots, the first position that each samples, and the masks from there on; rows beyond them have
    no slot."""
    shape = MASKED_AT_ONCE, programs.sizes.positions, words_of(programs.config.target.vocab_size)
    seats, first = np.full(shape[0], programs.sizes.seats, np.int32), np.zeros(shape[0], np.int32)
    masks = np.zeros(shape, np.uint32)
    for row, work in enumerate(works):
        assert work.request.slot is not None and work.request.constraint is not None
        found = work.request.constraint.masks(work.guesses)
        seats[row], first[row], masks[row, : len(found)] = (
            work.request.slot,
            len(work.request.tokens),
            found[:, : shape[2]],
        )
    return seats, first, masks


def tables_of(windows: Sequence[int | None], sizes: Sizes, limits: SchedulerConfig) -> PageTables:
    work, in_turn = limits.most_tokens, max(limits.decode_steps, limits.guesses + 1)
    make = partial(PageTables, windows, sizes.pages, sizes.page_size, work, in_turn, sizes.stride)
    return make() if sizes.shards == 1 else ShardedPageTables(make, sizes.shards)
