"""Rows whose logits are no numbers get NAN_TOKEN, whatever their parameters are, and no other row changes."""

import jax
import numpy as np
import pytest
from cases.programs import StoredJit
from cases.sampling import CASES, LOGITS, Request, enter, sample_jit

from duetto.sampling import search
from duetto.sampling.accept import NONE_ACCEPTED, DraftTokens, accept_by_rejection, accept_coupled
from duetto.sampling.params import NAN_TOKEN, SamplingParams
from duetto.sampling.state import empty_sampling_state

V = len(LOGITS)
GREEDY = Request(SamplingParams(temperature=0))
REQUESTS = {**CASES, "greedy": GREEDY, "scored": Request(SamplingParams(temperature=0, logprobs=2))}
rejection_jit, coupled_jit = StoredJit(accept_by_rejection), StoredJit(accept_coupled)


def broken(value: float, places: slice) -> np.ndarray:
    logits = LOGITS.astype(np.float32)
    logits[places] = value
    return logits


BROKEN = {
    "all NaN": broken(np.nan, slice(None)),
    "the first NaN": broken(np.nan, slice(0, 1)),
    "the last NaN": broken(np.nan, slice(V - 1, V)),
    "one infinite": broken(np.inf, slice(5, 6)),
    "all without weight": broken(-np.inf, slice(None)),
}


@pytest.mark.parametrize("logits", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("name", REQUESTS)
def test_a_row_without_numbers_has_no_token(name, logits):
    """Rows 0 and 2 have numbers, and the tokens that they have without such a neighbour."""
    request, good = REQUESTS[name], LOGITS.astype(np.float32)
    state = empty_sampling_state(3, V)
    for slot in range(3):
        state = enter(state, slot, request, seed=slot)
    slots, position = np.arange(3, dtype=np.int32), np.full(3, request.position, np.int32)
    found, plain = (
        np.asarray(sample_jit(np.stack([good, x, good]), position, slots, slots >= 0, state).token)
        for x in (logits, good)
    )
    assert found[1] == NAN_TOKEN and (found[[0, 2]] == plain[[0, 2]]).all() and (plain >= 0).all()


def test_a_token_without_weight_is_none_to_draw():
    logits = broken(-np.inf, slice(0, 6))
    state, zero = enter(empty_sampling_state(1, V), 0, Request(SamplingParams(seed=1))), np.zeros(1, np.int32)
    assert np.asarray(sample_jit(logits[None], zero + 9, zero, zero == 0, state).token)[0] >= 6


@pytest.mark.parametrize("rule", [coupled_jit, rejection_jit], ids=["coupled", "rejection"])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(top_k=3)], ids=["greedy", "drawn"]
)
def test_a_draft_token_is_not_kept_by_nan(rule, params):
    """Also one that a broken draft model has drawn from NaN."""
    state = empty_sampling_state(2, V)
    for slot in range(2):
        state = enter(state, slot, Request(params), seed=slot)
    slots, position = np.arange(2, dtype=np.int32), np.full(2, 7, np.int32)
    guesses = DraftTokens(np.full((2, 1), 3, np.int32), np.ones((2, 1), bool))
    logits = np.stack([BROKEN["the first NaN"], LOGITS.astype(np.float32)])
    drawn, kept = rule(logits, position, slots, slots >= 0, state, guesses)
    assert np.asarray(drawn.token)[0] == NAN_TOKEN and np.asarray(kept)[0] == NONE_ACCEPTED
    assert np.asarray(drawn.token)[1] >= 0


@pytest.mark.parametrize("V", [1, 7, 12, 97, 4096])
def test_argmax_tells_rows_without_numbers(V):
    rng = np.random.default_rng(V)
    x = rng.normal(size=(64, V)).astype(np.float32)
    place = rng.integers(0, V, 64)
    x[np.arange(16), place[:16]] = np.nan
    x[np.arange(16, 32), place[16:32]] = np.inf
    found = np.asarray(jax.jit(search.argmax)(x))
    assert (found[:32] == NAN_TOKEN).all() and (found[32:] == x[32:].argmax(axis=1)).all()
