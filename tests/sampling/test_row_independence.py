"""A row's draw is its own: neighbours, other features and a slot's earlier requests change no bit of it."""

from dataclasses import replace
from typing import Any, cast

import jax
import numpy as np
import pytest
from cases.sampling import CASES, LOGITS, Request, admit_jit, commit_jit, enter, sample_jit
from suite.marks import full

from duetto.sampling import sample as sampler
from duetto.sampling.checks import LOGPROBS_MODES, PROCESSED_LOGPROBS
from duetto.sampling.params import SamplingParams, request_knobs
from duetto.sampling.sample import Sampled, sample
from duetto.sampling.state import empty_sampling_state, load_history, load_knobs, record_tokens


def test_a_sampled_token_does_not_depend_on_slot_or_row():
    request, seeds = Request(SamplingParams(top_p=0.95)), (3, 4, 3, 5)
    state = empty_sampling_state(4, 12)
    for slot, seed in enumerate(seeds):
        state = enter(state, slot, request, seed)
    slot = np.random.default_rng(0).integers(0, 4, 400, np.int32)
    position = np.random.default_rng(1).integers(0, 40, 400, np.int32)
    rows = np.broadcast_to(LOGITS.astype(np.float32), (400, 12))
    token = np.asarray(sample_jit(rows, position, slot, np.ones(400, bool), state).token)
    by_cause: dict[tuple[int, int], set[int]] = {}
    for s, p, t in zip(slot, position, token, strict=True):
        by_cause.setdefault((seeds[s], int(p)), set()).add(int(t))
    assert all(len(tokens) == 1 for tokens in by_cause.values())
    assert len({tuple(by_cause.get((seed, p), ())) for seed in (3, 4, 5) for p in range(40)}) > 5


def features() -> dict[str, Request]:
    return {
        **CASES,
        "greedy": Request(SamplingParams(temperature=0)),
        "scored": Request(SamplingParams(logprobs=20)),
    }


def bits(s: Sampled, row: int, wanted: bool) -> list[bytes]:
    """Everything a request is told, bit for bit."""
    leaves = (s.token, s.logprob, s.rank, s.top_ids, s.top_logprobs) if wanted else (s.token,)
    return [np.asarray(leaf[row]).tobytes() for leaf in leaves]


@pytest.mark.parametrize("V", [full(12), 515])
@pytest.mark.parametrize("mode", LOGPROBS_MODES)
def test_sampled_bits_do_not_depend_on_other_rows(V, mode):
    """Each kind of request alone, beside all the others, beside dead rows, at another width: the same
    bits."""
    requests = list(features().values())
    if mode == PROCESSED_LOGPROBS:  # each kind is scored by logits of its own
        requests += [replace(r, params=replace(r.params, logprobs=20)) for r in CASES.values()]
    n = len(requests)
    state, rng = empty_sampling_state(n, V, logprobs_mode=mode), np.random.default_rng(2)
    for slot, request in enumerate(requests):
        state = enter(state, slot, request, seed=slot)
    logits = rng.normal(0, 2, (n, V)).astype(np.float32)
    position = np.array([r.position for r in requests], np.int32)
    slots = np.arange(n, dtype=np.int32)

    def drawn(*given: np.ndarray) -> Sampled:
        return jax.tree.map(np.asarray, sample_jit(*given, state))

    together = drawn(logits, position, slots, np.ones(n, bool))
    backwards = drawn(logits[::-1], position[::-1], slots[::-1], np.ones(n, bool))
    for i, request in enumerate(requests):
        wanted = request.params.logprobs is not None
        want = bits(together, i, wanted)
        assert bits(backwards, n - 1 - i, wanted) == want
        assert bits(drawn(logits, position, slots, slots == i), i, wanted) == want
        one = slice(i, i + 1)
        alone = drawn(logits[one], position[one], slots[one], np.ones(1, bool))
        assert bits(alone, 0, wanted) == want


def assert_equal_trees(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_features_that_are_off_change_no_bit():
    """Edits and narrowings are identities on rows that do not use them, also when another row makes them
    run."""
    everything = CASES["all"]
    state = enter(enter(empty_sampling_state(2, 12), 0, everything), 1, Request(SamplingParams()))
    slot = np.array([0, 1], np.int32)
    position = np.full(2, everything.position, np.int32)
    x = np.stack([LOGITS, LOGITS]).astype(np.float32)
    x[1, :2] = -0.0, 1e-40
    knobs = jax.tree.map(lambda leaf: np.asarray(leaf)[slot], state.knobs)
    rows = sampler.SamplingRows(knobs, position, slot >= 0, slot, state)
    wanted = jax.jit(sampler.find_rows_by_stage)(rows)
    for name in (*sampler.EDITS, *sampler.NARROWINGS):
        assert wanted[name].tolist() == [name != "grammar", False]  # the first row has none
        first, change = np.array([True, False]), sampler.PIPELINE[name][2]
        after = np.asarray(jax.jit(sampler.change_rows, static_argnums=1)(first, change, x, rows))
        assert after[1].tobytes() == np.asarray(x[1]).tobytes()
    together = np.asarray(jax.jit(sampler.edit_logits)(x, rows, wanted))
    assert together[1].tobytes() == np.asarray(x[1]).tobytes()


def test_stale_history_of_a_slot_is_not_read():
    state = enter(empty_sampling_state(1, 12), 0, CASES["all"])
    plain = request_knobs(SamplingParams(), seed=0, stop_ids=(), prompt_len=4)
    args = (
        LOGITS.astype(np.float32)[None],
        np.full(1, 9, np.int32),
        np.zeros(1, np.int32),
        np.ones(1, bool),
    )
    stale = sample_jit(*args, admit_jit(state, np.int32(0), plain))
    fresh = sample_jit(*args, admit_jit(empty_sampling_state(1, 12), np.int32(0), plain))
    assert_equal_trees(stale, fresh)


def test_history_loaded_equals_history_committed():
    request = CASES["all"]
    slots = np.arange(2, dtype=np.int32)
    state = enter(
        empty_sampling_state(2, 12), 1, Request(request.params, request.prompt, (), request.bad_words)
    )
    for token in request.output:
        state = commit_jit(state, slots, np.full(2, token, np.int32), slots == 1)
    assert_equal_trees(state, enter(empty_sampling_state(2, 12), 1, request))


def test_a_token_that_is_not_emitted_is_not_counted():
    state, slots = enter(empty_sampling_state(2, 12), 1, CASES["all"]), np.arange(2, dtype=np.int32)
    assert_equal_trees(commit_jit(state, slots, slots, slots < 0), state)


def test_no_parameter_compiles_anything_anew():
    traces = []

    def counted(function):
        def traced(*args):
            traces.append(function.__name__)
            return function(*args)

        return jax.jit(traced)

    steps = {cast(Any, f).__name__: counted(f) for f in (load_knobs, load_history, sample, record_tokens)}
    slot = np.arange(3, dtype=np.int32)
    state = empty_sampling_state(3, 24)
    for i, request in enumerate(features().values()):
        loads = {"admit": steps["load_knobs"], "load_history": steps["load_history"]}
        state = enter(state, i % 3, request, seed=i, **loads)
        sampled = steps["sample"](np.ones((3, 24), np.float32), slot + 7, slot, slot >= 0, state)
        state = steps["record_tokens"](state, slot, sampled.token, slot > 0)
    assert sorted(traces) == ["load_history", "load_knobs", "record_tokens", "sample"]
