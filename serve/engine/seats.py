"""Requests take their seats on the device, and pages beside them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ...kvcache.dealing import DealtTables
from ...kvcache.tables import PageTables
from ...sampling.params import knobs_row
from ...sampling.state import dense_bias, needs_history
from ..programs.compile import Programs
from ..programs.shapes import Sizes
from ..programs.step import Seat
from .plan import Limits
from .request import Request
from .scores import scored_from


def seated(programs: Programs, slots: Any, request: Request) -> Any:
    """The slots, with a request in its own: its limits and knobs, and the tokens that penalties and bad words
    look back on."""
    assert request.slot is not None
    prompt_len, slot = len(request.prompt), np.int32(request.slot)
    knobs = knobs_row(
        request.params,
        seed=request.seed,
        stop_ids=request.stop_ids,
        prompt_len=prompt_len,
        bad_words=request.bad_words,
    )
    known, end, place = np.int32(len(request.tokens)), np.int32(request.reach), np.int32(request.place)
    new = Seat(known, end, scored_from(request), knobs, place)
    slots = programs.seat(slots, slot, new)
    if not needs_history(request.params):
        return slots
    tokens = np.zeros(programs.sizes.max_model_len, np.int32)
    tokens[: len(request.tokens)] = request.tokens
    bias = dense_bias(request.params, programs.config.target.vocab_size, request.bad_words)
    return programs.load_history(
        slots, slot, tokens, np.int32(prompt_len), np.int32(len(request.tokens)), bias
    )


def tables_of(windows: Sequence[int | None], sizes: Sizes, limits: Limits) -> PageTables:
    """The host's bookkeeping of an engine's pages."""
    work, in_turn = limits.most_tokens, limits.most_in_turn
    make = partial(PageTables, windows, sizes.pages, sizes.page_size, work, in_turn, sizes.stride)
    return make() if sizes.shards == 1 else DealtTables(make, sizes.shards)
