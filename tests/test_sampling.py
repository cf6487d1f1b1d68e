"""Every sampling parameter against numpy, and the promise that a row's result is its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from duetto.sampling import sample as sampler
from duetto.sampling.params import MAX_LOGPROBS, SamplingParams, knobs_row
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


def enter(state: SamplingState, slot: int, request: Request, seed: int = 0) -> SamplingState:
    p, n = request.params, len(request.prompt)
    knobs = knobs_row(p, seed=seed, stop_ids=STOP_IDS, prompt_len=n, bad_words=request.bad_words)
    state = admit_jit(state, np.int32(slot), knobs)
    if not needs_history(p):
        return state
    tokens = np.full(PADDED, 9, np.int32)
    tokens[: request.position] = [*request.prompt, *request.output]
    bias = dense_bias(p, state.bias.shape[1], request.bad_words)
    return load_jit(state, np.int32(slot), tokens, np.int32(n), np.int32(request.position), bias)


def draw(logits: np.ndarray, request: Request, draws: int, seed: int = 0) -> Sampled:
    """The tokens of one request at `draws` positions, from the same logits at each."""
    state = enter(empty_state(1, len(logits)), 0, request, seed)
    position = jnp.arange(draws, dtype=jnp.int32) + request.position
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (draws, len(logits)))
    return sample_jit(rows, position, jnp.zeros(draws, jnp.int32), jnp.ones(draws, bool), state)


def edited(logits: np.ndarray, r: Request) -> np.ndarray:
    """The plain account of the parameters that greedy requests have too, float64 with -inf for banned tokens."""
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
            **{"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.3},
            **{"presence_penalty": 0.4, "frequency_penalty": 0.2, "min_tokens": 5000, "max_tokens": None},
            **{"logit_bias": {9: 2.0}, "bad_words": ["-"], "logprobs": 3},
        ),
        bad_words=WORDS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(name):
    """Chi-square over 4096 positions, at 5 standard deviations of its degrees of freedom; banned tokens never."""
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


def narrowing(x: np.ndarray, name: str, value: float) -> np.ndarray:
    """Which tokens one of min_p, top_k and top_p keeps of logits [B,V]."""
    B, V = x.shape
    knobs = knobs_row(SamplingParams(**{name: value}), seed=0, stop_ids=(), prompt_len=0)
    zeros = jnp.zeros(B, jnp.int32)
    rows = sampler.Rows(
        jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (B, *leaf.shape)), knobs),
        zeros,
        jnp.ones(B, bool),
        zeros,
        empty_state(1, V),
    )
    return np.asarray(jax.jit(sampler.narrowed)(jnp.asarray(x), rows)) > -1e29


@pytest.mark.parametrize("V", [50, 4096])
def test_kept_tokens_are_exact(V):
    x = np.random.default_rng(V).normal(0, 3, (32, V)).astype(np.float32)
    order = -np.sort(-x, axis=1)
    for k in (1, 2, 17, V - 1, V, V + 5):
        np.testing.assert_array_equal(narrowing(x, "top_k", k), x >= order[:, [min(k, V) - 1]])
    weight = np.exp(order.astype(np.float64) - order[:, :1])
    mass = weight.cumsum(axis=1) / weight.sum(axis=1, keepdims=True)
    for p in (1e-6, 0.1, 0.5, 0.9, 0.99, 0.999):
        last = (mass < p).sum(axis=1)
        clear = (np.abs(mass - p) > 3e-7).all(axis=1)
        assert clear.sum() > 16
        np.testing.assert_array_equal(
            narrowing(x, "top_p", p)[clear], (x >= np.take_along_axis(order, last[:, None], 1))[clear]
        )
    for p in (1e-3, 0.3, 0.999):
        np.testing.assert_array_equal(narrowing(x, "min_p", p), x - order[:, :1] >= np.log(np.float32(p)))


def test_ties_at_the_border_stay():
    x = np.array([[2.0, 1, 1, 1, 0, -1]] * 2, np.float32)
    assert narrowing(x, "top_k", 2)[0].tolist() == [True] * 4 + [False] * 2
    assert narrowing(x, "top_p", 0.5)[0].tolist() == [True] * 4 + [False] * 2
    assert narrowing(np.zeros((2, 7), np.float32), "top_p", 0.01).all()
    mixed = np.array([[0.0, -0.0, -1.0]] * 2, np.float32)
    assert narrowing(mixed, "top_k", 1)[0].tolist() == [True, True, False]


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
