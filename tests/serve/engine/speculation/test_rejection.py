"""Rejection, end to end on the device: whole steps of every guide leave the target's distribution as it
is."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.programs import StoredJit
from cases.weights import drawn, logits
from scipy.special import chdtrc, log_softmax
from suite.marks import full

from duetto import SamplingParams
from duetto.kvcache.pages import KEYS_PER_BLOCK, Batch, KVCache, empty_cache
from duetto.model.config import ModelConfig
from duetto.model.draft_head import draft_head_spec
from duetto.model.draft_pair import Pair, PairConfig
from duetto.model.transformer import decoder_spec
from duetto.sampling.params import request_knobs
from duetto.sampling.token_tree import TokenTree
from duetto.serve.engine.speculation.draft_proposers import DraftModelProposer, HeadProposer
from duetto.serve.engine.speculation.draft_steps import DraftSpeculation
from duetto.serve.runtime.steps.step import SlotContents, Slots, assign_slot, empty_slots

SMALL = ModelConfig.uniform(5, 16, 24, 1, 2, 1, 8, max_position=32)
ROWS, ROUNDS, TOKENS, W = 5000, 6, 3, 8


def random_params(config: ModelConfig, key: int):
    wide = jax.tree.map(
        lambda s: replace(s, scale=0.5) if s.mean == 0 else s,
        decoder_spec(config),
        is_leaf=lambda x: hasattr(x, "axes"),
    )
    return drawn(wide, seed=key)


def exact(params, first: int, temperature: float) -> np.ndarray:
    """The probability of every continuation of three tokens, [V,V,V]."""
    V = SMALL.vocab_size
    texts = np.array([[first, *rest] for rest in itertools.product(range(V), repeat=TOKENS)], np.int32)
    logs = log_softmax(np.asarray(logits(params, SMALL, jnp.asarray(texts))) / temperature, axis=-1)
    chosen = np.take_along_axis(logs[:, :-1], texts[:, 1:, None], axis=2)
    return np.exp(chosen.sum(axis=(1, 2)).astype(np.float64)).reshape(V, V, V)


@partial(StoredJit, static_argnames=["guide"])
def begin(guide: DraftSpeculation, slot: jax.Array, new: SlotContents) -> tuple[Slots, KVCache]:
    hidden = jax.ShapeDtypeStruct((SMALL.hidden_size,), jnp.float32)
    slots = assign_slot(empty_slots(ROWS, SMALL.vocab_size, hidden), slot, new)
    return slots, empty_cache(guide.config.layers, (ROWS,), W, jnp.float32)


@partial(StoredJit, static_argnames=["guide", "phase"])
def run(
    guide: DraftSpeculation, phase: str, params: Pair, cache: KVCache, slots: Slots, batch: Batch
) -> tuple[KVCache, Slots, Any]:
    return getattr(guide, phase)(params, cache, slots, batch)


class Device:
    """Rows of one page each, all seated with seeds of their own, stepped by hand."""

    def __init__(self, guide: DraftSpeculation, params: Pair, first_seed: int, temperature: float):
        self.guide, self.params, self.first = guide, params, 1
        self.columns = guide.tree.depth + 1 if guide.tree else 3
        self.seats(first_seed, temperature)

    def seats(self, first_seed: int, temperature: float) -> None:
        asked = SamplingParams(temperature=temperature, max_tokens=TOKENS)
        row = request_knobs(asked, seed=0, stop_ids=(), prompt_len=1)
        knobs = jax.tree.map(lambda x: jnp.asarray(np.broadcast_to(x, (ROWS, *np.shape(x)))), row)
        seeds = jnp.arange(ROWS, dtype=jnp.uint32) + jnp.uint32(first_seed)
        ones = jnp.ones(ROWS, jnp.int32)
        new = SlotContents(ones, ones * (1 + TOKENS), replace(knobs, seed=seeds))
        self.slots, self.cache = begin(self.guide, jnp.arange(ROWS, dtype=jnp.int32), new)

    def batch(self, tokens: np.ndarray, start: np.ndarray, count: np.ndarray) -> Batch:
        table = np.broadcast_to(np.arange(ROWS, dtype=np.int32)[:, None], (ROWS, KEYS_PER_BLOCK // W))
        return Batch(tokens, start, count, (table,), np.arange(ROWS, dtype=np.int32))

    def run(self) -> np.ndarray:
        """Three tokens of every row."""
        found, length = np.zeros((ROWS, TOKENS), np.int32), np.ones(ROWS, np.int32)

        def step(phase: str, batch: Batch) -> None:
            self.cache, self.slots, out = run(self.guide, phase, self.params, self.cache, self.slots, batch)
            for column in np.asarray(out.sampled.token).T:
                rows = np.flatnonzero(column >= 0)
                found[rows, length[rows] - 1] = column[rows]
                length[rows] += 1

        zeros = np.zeros(ROWS, np.int32)
        step("prefill", self.batch(np.full((ROWS, 1), self.first, np.int32), zeros, zeros + 1))
        while (length <= TOKENS).any():
            count = np.clip(TOKENS + 1 - length, 0, self.columns)
            open = np.full((ROWS, self.columns), -1, np.int32)
            step("verify", self.batch(open, length - 1, count.astype(np.int32)))
        return found


def guide_of(name: str) -> tuple[DraftSpeculation, Pair]:
    target, draft = random_params(SMALL, 1), random_params(SMALL, 2)
    tree = TokenTree.from_paths([(0,), (1,), (2,), (0, 0), (0, 1)])
    if "draft" in name:
        pair, params = PairConfig(SMALL, SMALL), Pair(target, draft)
        guesser = DraftModelProposer(SMALL, "rejection")
    else:
        head = drawn(draft_head_spec(SMALL.hidden_size, 8), seed=3)
        pair, params = PairConfig(SMALL), Pair(target, head)
        guesser = HeadProposer(SMALL)
    if "tree" not in name:
        return DraftSpeculation(pair, guesser, "rejection"), params
    tree = TokenTree.from_widths((2, 2)) if "wide" in name else tree
    return DraftSpeculation(pair, guesser, "rejection", tree), params


@pytest.mark.parametrize(
    "name",
    [
        full("heads"),
        "draft model",
        full("tree of heads"),
        full("wide tree of heads"),
        full("tree of a draft model"),
    ],
)
def test_rejection_keeps_the_distribution(name):
    """Pearson's test of 30,000 continuations of three tokens against the target's own probabilities.

    It finds probabilities that are 6 % off (root mean square) in 99 of 100 cases; test_accept.py tests the
    rule itself more finely.
    """
    temperature = 0.9
    guide, params = guide_of(name)
    wanted, counts = exact(params.target, 1, temperature), np.zeros(125)
    device = Device(guide, params, 0, temperature)
    for i in range(ROUNDS):
        device.seats(i * ROWS, temperature)
        counts += np.bincount(device.run() @ np.array([25, 5, 1]), minlength=125)
    expected = wanted.ravel() / wanted.sum() * counts.sum()
    common = expected >= 5
    seen, hoped = (np.append(x[common], x[~common].sum()) for x in (counts, expected))
    statistic = np.sum((seen - hoped) ** 2 / np.maximum(hoped, 1e-9))
    assert chdtrc(np.count_nonzero(hoped) - 1, statistic) > 1e-3
