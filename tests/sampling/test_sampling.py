"""Every sampling parameter against numpy, and the promise that a row's result is its own."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from duetto.sampling import sample as sampler
from duetto.sampling.params import SamplingParams, knobs_row
from duetto.sampling.sample import Sampled, sample, score
from duetto.sampling.state import (
    SamplingState,
    admit,
    commit,
    dense_bias,
    empty_state,
    load_history,
    needs_history,
    stops,
)

admit_jit, load_jit, commit_jit, sample_jit = (jax.jit(f) for f in (admit, load_history, commit, sample))
STOP_IDS = (1, 3)
PADDED = 32  # tokens of a history, as the device sees it


@dataclass(frozen=True)
class Request:
    """A request in the middle of its life: what was asked, and the tokens so far."""

    params: SamplingParams
    prompt: Sequence[int] = (2, 5, 5, 7)
    output: Sequence[int] = (4, 6, 4)
    bad_words: Sequence[Sequence[int]] = ()

    @property
    def position(self) -> int:
        return len(self.prompt) + len(self.output)


def enter(
    state: SamplingState,
    slot: int,
    request: Request,
    seed: int = 0,
    admit: Callable = admit_jit,
    load_history: Callable = load_jit,
) -> SamplingState:
    p, n = request.params, len(request.prompt)
    knobs = knobs_row(p, seed=seed, stop_ids=STOP_IDS, prompt_len=n, bad_words=request.bad_words)
    state = admit(state, np.int32(slot), knobs)
    if not needs_history(p):
        return state
    tokens = np.full(PADDED, 9, np.int32)
    tokens[: request.position] = [*request.prompt, *request.output]
    bias = dense_bias(p, state.bias.shape[1], request.bad_words)
    return load_history(state, np.int32(slot), tokens, np.int32(n), np.int32(request.position), bias)


def draw(logits: np.ndarray, request: Request, draws: int, seed: int = 0) -> Sampled:
    """The tokens of one request at `draws` positions, from the same logits at each."""
    state = enter(empty_state(1, len(logits)), 0, request, seed)
    position = jnp.arange(draws, dtype=jnp.int32) + request.position
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (draws, len(logits)))
    return sample_jit(rows, position, jnp.zeros(draws, jnp.int32), jnp.ones(draws, bool), state)


def edited(logits: np.ndarray, r: Request) -> np.ndarray:
    """The plain account of the parameters that greedy requests have too; float64, -inf for banned tokens."""
    p, x, tokens = r.params, np.array(logits, np.float64), np.arange(len(logits))
    for token, bias in (p.logit_bias or {}).items():
        x[token] += bias
    if p.allowed_token_ids is not None:
        x[~np.isin(tokens, p.allowed_token_ids)] = -np.inf
    for *start, last in r.bad_words:
        if len(start) <= len(r.output) and list(r.output[len(r.output) - len(start) :]) == start:
            x[last] = -np.inf
    if len(r.output) < p.min_tokens:
        x[list(STOP_IDS)] = -np.inf
    counts = np.bincount(np.array(r.output, int), minlength=len(x))
    seen = (counts > 0) | np.isin(tokens, r.prompt)
    x = np.where(seen, np.where(x > 0, x / p.repetition_penalty, x * p.repetition_penalty), x)
    return x - p.frequency_penalty * counts - p.presence_penalty * (counts > 0)


def distribution(logits: np.ndarray, r: Request) -> np.ndarray:
    """The plain account of temperature, min_p, top_k and top_p: probabilities, float64."""
    p, x = r.params, edited(logits, r)
    weight = np.exp((x - x.max()) / p.temperature)
    weight[weight < p.min_p] = 0
    if p.top_k > 0:
        weight[weight < np.sort(weight)[::-1][min(p.top_k, len(weight)) - 1]] = 0
    order = np.sort(weight)[::-1]
    enough = np.searchsorted(np.cumsum(order) / order.sum(), p.top_p * (1 - 1e-9))
    weight[weight < order[min(enough, len(order) - 1)]] = 0
    return weight / weight.sum()


LOGITS = np.random.default_rng(5).normal(0, 1.5, 12)
WORDS = ((4, 8), (6, 4, 2), (6, 2), (10,))  # the first two follow from the output, the third does not

CASES = {
    "plain": Request(SamplingParams()),
    "cold": Request(SamplingParams(temperature=0.5)),
    "hot": Request(SamplingParams(temperature=3.0)),
    "top_k": Request(SamplingParams(top_k=4)),
    "top_k above V": Request(SamplingParams(top_k=1000)),
    "top_p": Request(SamplingParams(top_p=0.7)),
    "min_p": Request(SamplingParams(min_p=0.2)),
    "top_k, top_p": Request(SamplingParams(top_k=5, top_p=0.8)),
    "cold top_p": Request(SamplingParams(temperature=0.6, top_p=0.9)),
    "presence": Request(SamplingParams(presence_penalty=1.5)),
    "frequency": Request(SamplingParams(frequency_penalty=0.8)),
    "negative penalties": Request(SamplingParams(frequency_penalty=-0.5, presence_penalty=-0.3)),
    "repetition": Request(SamplingParams(repetition_penalty=1.7)),
    "repetition below 1": Request(SamplingParams(repetition_penalty=0.6)),
    "logit_bias": Request(SamplingParams(logit_bias={0: 1.5, 11: -2.0})),
    "allowed": Request(SamplingParams(allowed_token_ids=[0, 3, 7])),
    "bad words": Request(SamplingParams(bad_words=["-"]), bad_words=WORDS),
    "bad words, no output": Request(SamplingParams(bad_words=["-"]), output=(), bad_words=((7, 8), (2,))),
    "min_tokens": Request(SamplingParams(min_tokens=5000, max_tokens=None)),
    "min_tokens reached": Request(SamplingParams(min_tokens=3)),
    "all": Request(
        SamplingParams(
            temperature=0.8,
            top_k=6,
            top_p=0.9,
            min_p=0.02,
            repetition_penalty=1.3,
            presence_penalty=0.4,
            frequency_penalty=0.2,
            min_tokens=5000,
            max_tokens=None,
            logit_bias={9: 2.0},
            bad_words=["-"],
            logprobs=3,
        ),
        bad_words=WORDS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(name):
    """Chi-square over 4096 positions, at 5 standard deviations of its degrees of freedom; banned tokens
    never."""
    request, draws = CASES[name], 4096
    want = distribution(LOGITS, request)
    found = np.bincount(np.asarray(draw(LOGITS, request, draws).token), minlength=len(LOGITS))
    assert found[want == 0].sum() == 0
    kept = want > 0
    chi_square = ((found - draws * want)[kept] ** 2 / (draws * want[kept])).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize("name", CASES)
def test_greedy_is_the_argmax_of_the_edited_logits(name):
    request = CASES[name]
    greedy = Request(
        SamplingParams(**{**vars(request.params), "temperature": 0.0}),
        request.prompt,
        request.output,
        request.bad_words,
    )
    for seed in range(8):
        logits = np.random.default_rng(seed).normal(0, 1.0, 12)
        assert draw(logits, greedy, 1).token[0] == edited(logits, greedy).argmax()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-3),
        SamplingParams(temperature=1e-6),
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-30),
        SamplingParams(min_p=1.0),
        SamplingParams(logit_bias={7: 1e9}),
        SamplingParams(allowed_token_ids=[7]),
        SamplingParams(logit_bias={t: -1e9 for t in range(12) if t != 7}),
        SamplingParams(temperature=1e-3, top_k=1, top_p=1e-30, min_p=1.0, repetition_penalty=1e-3),
    ],
)
def test_extremes_leave_one_token(params):
    logits = np.where(np.arange(12) == 7, 3.0, LOGITS.clip(max=2.0))
    assert (np.asarray(draw(logits, Request(params), 64).token) == 7).all()


@pytest.mark.parametrize("logits", [np.zeros(12), np.full(12, -1e30), np.full(12, 1e30), -LOGITS * 1e4])
@pytest.mark.parametrize("name", ["hot", "top_k, top_p", "all"])
def test_extreme_logits_give_allowed_tokens(logits, name):
    tokens = np.asarray(draw(logits, CASES[name], 64).token)
    assert (tokens >= 0).all() and (tokens < 12).all()
    if np.ptp(logits) == 0 and name != "all":
        assert len(set(tokens.tolist())) > 5


def test_a_draw_is_gumbel_max_of_seed_and_position():
    request = Request(SamplingParams(temperature=0.7))
    found = np.asarray(draw(LOGITS, request, 50, seed=11).token)
    scaled = jnp.asarray(LOGITS - LOGITS.max(), jnp.float32) / np.float32(0.7)
    for i in range(50):
        key = jax.random.fold_in(jax.random.key(11), request.position + i)
        assert found[i] == np.argmax(scaled + jax.random.gumbel(key, (12,), jnp.float32))


def test_a_draw_does_not_know_its_slot_or_row():
    request, seeds = Request(SamplingParams(top_p=0.95)), (3, 4, 3, 5)
    state = empty_state(4, 12)
    for slot, seed in enumerate(seeds):
        state = enter(state, slot, request, seed)
    slot = jnp.asarray(np.random.default_rng(0).integers(0, 4, 400), jnp.int32)
    position = jnp.asarray(np.random.default_rng(1).integers(0, 40, 400), jnp.int32)
    rows = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (400, 12))
    token = np.asarray(sample_jit(rows, position, slot, jnp.ones(400, bool), state).token)
    by_cause: dict[tuple[int, int], set[int]] = {}
    for s, p, t in zip(np.asarray(slot), np.asarray(position), token, strict=True):
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


@pytest.mark.parametrize("V", [12, 515])
def test_neighbours_never_matter(V):
    """Each kind of request alone, beside all the others, beside dead rows, at another width: the same
    bits."""
    requests = list(features().values())
    n = len(requests)
    state, rng = empty_state(n, V), np.random.default_rng(2)
    for slot, request in enumerate(requests):
        state = enter(state, slot, request, seed=slot)
    logits = jnp.asarray(rng.normal(0, 2, (n, V)), jnp.float32)
    position = jnp.array([r.position for r in requests], jnp.int32)
    slots = jnp.arange(n, dtype=jnp.int32)
    together = sample_jit(logits, position, slots, jnp.ones(n, bool), state)
    backwards = sample_jit(logits[::-1], position[::-1], slots[::-1], jnp.ones(n, bool), state)
    for i, request in enumerate(requests):
        wanted = request.params.logprobs is not None
        want = bits(together, i, wanted)
        assert bits(backwards, n - 1 - i, wanted) == want
        assert bits(sample_jit(logits, position, slots, slots == i, state), i, wanted) == want
        one = slice(i, i + 1)
        alone = sample_jit(logits[one], position[one], slots[one], jnp.ones(1, bool), state)
        assert bits(alone, 0, wanted) == want


def assert_equal_trees(a: Any, b: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_features_that_are_off_change_no_bit():
    """Edits and narrowings are identities on rows that do not use them, also when another row makes them
    run."""
    everything = CASES["all"]
    state = enter(enter(empty_state(2, 12), 0, everything), 1, Request(SamplingParams()))
    slot = jnp.array([0, 1], jnp.int32)
    position = jnp.full(2, everything.position, jnp.int32)
    x = jnp.asarray(np.stack([LOGITS, LOGITS]), jnp.float32).at[1, :2].set(jnp.array([-0.0, 1e-40]))
    rows = sampler.Rows(jax.tree.map(lambda leaf: leaf[slot], state.knobs), position, slot >= 0, slot, state)
    for wants, change in (*sampler.EDITS, *sampler.NARROWINGS):
        assert wants(rows).tolist() == [True, False]
        after = np.asarray(jax.jit(sampler.only, static_argnums=1)(wants(rows), change, x, rows))
        assert after[1].tobytes() == np.asarray(x[1]).tobytes()


def test_stale_history_of_a_slot_is_not_read():
    state = enter(empty_state(1, 12), 0, CASES["all"])
    plain = knobs_row(SamplingParams(), seed=0, stop_ids=(), prompt_len=4)
    args = (
        jnp.asarray(LOGITS, jnp.float32)[None],
        jnp.full(1, 9, jnp.int32),
        jnp.zeros(1, jnp.int32),
        jnp.ones(1, bool),
    )
    stale = sample_jit(*args, admit_jit(state, np.int32(0), plain))
    fresh = sample_jit(*args, admit_jit(empty_state(1, 12), np.int32(0), plain))
    assert_equal_trees(stale, fresh)


def test_history_loaded_equals_history_committed():
    request = CASES["all"]
    slots = jnp.arange(2, dtype=jnp.int32)
    state = enter(empty_state(2, 12), 1, Request(request.params, request.prompt, (), request.bad_words))
    for token in request.output:
        state = commit_jit(state, slots, jnp.full(2, token, jnp.int32), slots == 1)
    assert_equal_trees(state, enter(empty_state(2, 12), 1, request))


def test_a_token_that_is_not_emitted_is_not_counted():
    state, slots = enter(empty_state(2, 12), 1, CASES["all"]), jnp.arange(2, dtype=jnp.int32)
    assert_equal_trees(commit_jit(state, slots, slots, slots < 0), state)


def test_stop_ids():
    state = enter(empty_state(2, 12), 0, Request(SamplingParams()))
    zero = jnp.zeros(12, jnp.int32)
    assert np.flatnonzero(stops(state, zero, jnp.arange(12, dtype=jnp.int32))).tolist() == list(STOP_IDS)
    assert not stops(state, zero + 1, jnp.arange(12, dtype=jnp.int32)).any()


def test_no_parameter_compiles_anything_anew():
    traces = []

    def counted(function):
        def traced(*args):
            traces.append(function.__name__)
            return function(*args)

        return jax.jit(traced)

    steps = {f.__name__: counted(f) for f in (admit, load_history, sample, commit)}
    slot = jnp.arange(3, dtype=jnp.int32)
    state = empty_state(3, 24)
    for i, request in enumerate(features().values()):
        state = enter(state, i % 3, request, seed=i, admit=steps["admit"], load_history=steps["load_history"])
        sampled = steps["sample"](jnp.ones((3, 24)), slot + 7, slot, slot >= 0, state)
        state = steps["commit"](state, slot, sampled.token, slot > 0)
    assert sorted(traces) == ["admit", "commit", "load_history", "sample"]


def test_reported_scores_are_those_of_the_drawn_token():
    request = Request(SamplingParams(temperature=2.0, logprobs=2, presence_penalty=2.0, top_k=5))
    sampled = draw(LOGITS, request, 64)
    rows = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (64, 12))
    want = jax.jit(score)(rows, sampled.token)
    assert len(set(sampled.rank.tolist())) > 2
    for got, leaf in (
        (sampled.logprob, want.logprob),
        (sampled.rank, want.rank),
        (sampled.top_ids, want.top_ids),
    ):
        np.testing.assert_array_equal(got, leaf)
