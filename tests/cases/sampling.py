"""Requests with every sampling parameter, and the plain account of what each does to a distribution."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from cases.programs import StoredJit

from duetto.sampling.params import SamplingParams, request_knobs
from duetto.sampling.sample import Sampled, sample
from duetto.sampling.state import (
    SamplingState,
    dense_bias,
    empty_sampling_state,
    load_history,
    load_knobs,
    needs_history,
    record_tokens,
)

admit_jit, load_jit, commit_jit, sample_jit = (
    StoredJit(f) for f in (load_knobs, load_history, record_tokens, sample)
)
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
    knobs = request_knobs(p, seed=seed, stop_ids=STOP_IDS, prompt_len=n, bad_words=request.bad_words)
    state = admit(state, np.int32(slot), knobs)
    if not needs_history(p):
        return state
    tokens = np.full(PADDED, 9, np.int32)
    tokens[: request.position] = [*request.prompt, *request.output]
    bias = dense_bias(p, state.bias.shape[1], request.bad_words)
    return load_history(state, np.int32(slot), tokens, np.int32(n), np.int32(request.position), bias)


def draw(logits: np.ndarray, request: Request, draws: int, seed: int = 0) -> Sampled:
    """The tokens of one request at `draws` positions, from the same logits at each."""
    state = enter(empty_sampling_state(1, len(logits)), 0, request, seed)
    position = np.arange(draws, dtype=np.int32) + request.position
    rows = np.broadcast_to(logits.astype(np.float32), (draws, len(logits)))
    return sample_jit(rows, position, np.zeros(draws, np.int32), np.ones(draws, bool), state)


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
