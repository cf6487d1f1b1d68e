"""The one step at its other shapes: verification of guesses, several decode steps in one dispatch, stops on
the device."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suite.marks import full

from duetto import SamplingParams
from duetto.kvcache.pages import Batch, empty_cache
from duetto.sampling.params import request_knobs
from duetto.sampling.sample import Sampled
from duetto.serve.runtime.steps import step
from duetto.serve.runtime.steps.output import Output
from duetto.serve.runtime.steps.step import SlotContents, assign_slot, decode, empty_slots, prefill, verify

PROMPT = np.random.default_rng(5).integers(3, 300, 20).astype(np.int32)
GREEDY = SamplingParams(temperature=0.0, logprobs=0)
SEEDED = SamplingParams(temperature=0.9, frequency_penalty=0.5, logprobs=0)
SLOT = 1
seated = jax.jit(assign_slot)  # one program: its steps one by one would be a program each


class Device:
    """One request in slot 1 of a small device state, stepped by hand."""

    def __init__(self, model, params: SamplingParams, stop_ids=(), end=100):
        self.config, self.params = model.config, model.params
        self.cache, slots = unused(model.config)
        knobs = request_knobs(params, seed=9, stop_ids=stop_ids, prompt_len=len(PROMPT))
        new = SlotContents(jnp.int32(len(PROMPT)), jnp.int32(end), knobs)
        self.slots = seated(slots, jnp.int32(SLOT), new)
        self.length = 0

    def run(self, program, tokens, count=None, packed=None):
        """Feed tokens after those that were fed before; gives the emitted tokens and their
        log-probabilities."""
        batch = Batch(
            tokens=jnp.array([tokens, [0] * len(tokens)], jnp.int32),
            start=jnp.array([self.length, 0], jnp.int32),
            count=jnp.array([count or len(tokens), 0], jnp.int32),
            page_tables=(jnp.array([[3, 7], [0, 0]], jnp.int32),),
            slot=jnp.array([SLOT, 3], jnp.int32),
            packed=None if packed is None else jnp.array(packed, jnp.int32),
        )
        self.cache, self.slots, out = compiled(program, self.config)(
            self.params, self.cache, self.slots, batch
        )
        row = (out.sample_indices(len(batch.start)) or [0])[0]
        emitted = np.asarray(out.sampled.token[row]) >= 0
        return [np.asarray(x[row])[emitted].tolist() for x in (out.sampled.token, out.sampled.logprob)]

    def prompt(self):
        first, _ = self.run(prefill, PROMPT.tolist())
        self.length = len(PROMPT)
        return first


@cache
def unused(config):
    """A cache and slots, in one program."""
    return jax.jit(
        lambda: (empty_cache(config.layers, (16,), 64, jnp.float32), empty_slots(3, config.vocab_size))
    )()


@cache
def compiled(program, config):
    return jax.jit(partial(program, config=config))


def plain(model, params, count, **limits):
    """Tokens by decoding one at a time."""
    device = Device(model, params, **limits)
    tokens = device.prompt()
    for _ in range(count - 1):
        tokens += device.run(decode, [-1])[0]
        device.length += 1
    return tokens


@pytest.mark.full
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_verify_emits_what_decode_would(one_layer, params, right):
    """Guesses that are right are kept, and the sample after the last right one comes on top."""
    want = plain(one_layer, params, 6)
    guesses = [t if i < right else (t + 1) % 300 for i, t in enumerate(want[1:4])]
    device = Device(one_layer, params)
    device.prompt()
    emitted, _ = device.run(verify, [-1, *guesses])
    assert emitted == want[1 : right + 2]
    device.length += len(emitted)
    after, _ = device.run(decode, [-1])
    assert after == [want[right + 2]], "a wrong guess has left something behind"


@pytest.mark.full
def test_verify_takes_shorter_drafts_in_the_same_shape(one_layer):
    want = plain(one_layer, GREEDY, 4)
    device = Device(one_layer, GREEDY)
    device.prompt()
    emitted, _ = device.run(verify, [-1, want[1], 0, 0], count=2)
    assert emitted == want[1:3]


@pytest.mark.full
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_places_without_a_token_need_not_be_computed(one_layer, params):
    """Three of eight places hold a token; in any order among the rows that are computed."""
    want = plain(one_layer, params, 5)
    for packed in ([0, 1, 2, 8], [8, 2, 0, 1, 8]):
        device = Device(one_layer, params)
        device.prompt()
        emitted, _ = device.run(verify, [-1, *want[1:3], 0], count=3, packed=packed)
        assert emitted == want[1:4]
        device.length += 3
        assert device.run(decode, [-1])[0] == want[4:5]


@pytest.mark.parametrize("params", [GREEDY, full(SEEDED)], ids=["greedy", "seeded"])
def test_several_steps_in_one_dispatch(one_layer, params):
    want = plain(one_layer, params, 9)
    device = Device(one_layer, params)
    found = device.prompt()
    for _ in range(2):
        tokens, logprobs = device.run(decode, [-1] * 4)
        found += tokens
        device.length += 4
        assert all(p < 0 for p in logprobs)
    assert found == want


def test_decode_replays_the_tokens_it_is_given(one_layer):
    """As for a preempted request: known tokens are fed, nothing is emitted for them, then sampling goes
    on."""
    want = plain(one_layer, SEEDED, 8)
    device = Device(one_layer, SEEDED)
    knobs = request_knobs(
        SamplingParams(temperature=0.9, logprobs=0), seed=9, stop_ids=(), prompt_len=len(PROMPT)
    )
    free = plain(one_layer, SamplingParams(temperature=0.9, logprobs=0), 8)
    new = SlotContents(jnp.int32(len(PROMPT) + 3), jnp.int32(100), knobs)
    device.slots = seated(device.slots, jnp.int32(SLOT), new)
    assert device.prompt() == []
    emitted, _ = device.run(decode, [*free[:3], -1])
    assert emitted == free[3:5]
    assert want[:1] == free[:1]


def test_stop_ids_and_the_end_stop_on_the_device(one_layer):
    want = plain(one_layer, GREEDY, 8)
    stop = next(t for i, t in enumerate(want) if i >= 2 and t not in want[:i])
    device = Device(one_layer, GREEDY, stop_ids=(stop,))
    found = device.prompt()
    for _ in range(2):
        found += device.run(decode, [-1] * 4)[0]
        device.length += 4
    assert found == want[: want.index(stop) + 1]
    ended = Device(one_layer, GREEDY, end=len(PROMPT) + 3)
    found = ended.prompt()
    found += ended.run(decode, [-1] * 4)[0]
    assert found == want[:3]
    assert not bool(ended.slots.live[SLOT])


@pytest.mark.parametrize(
    "B, tokens, num_slots, rows",
    [(8, 1, 1, 8), (20, 1, 4, 20), (1, 64, 20, 8), (8, 16, 1, 8), (9, 16, 20, 16), (64, 2, 20, 24)],
)
def test_rows_of_a_step_that_sample(B, tokens, num_slots, rows):
    """Decode keeps its width at fewer slots; a prefill has at least as many rows as change no bit, and no
    more widths than decode."""
    assert step.num_sample_rows(B, tokens, num_slots) == rows
    zeros, ones = jnp.zeros(B, jnp.int32), jnp.ones(B, jnp.int32)
    batch = Batch(jnp.zeros((B, tokens), jnp.int32), zeros, ones, (), zeros)
    hidden, slots = jax.ShapeDtypeStruct((B, tokens, 4), jnp.float32), empty_slots(num_slots, 16)
    selected, _ = jax.eval_shape(lambda h: step.select_sample_rows(slots, batch, h), hidden)
    assert len(selected.slot) == rows == len(selected.hidden)


def test_samples_are_found_by_the_rows_of_their_batch():
    """Four rows in each of two shards; the number 4 is padding."""
    number = np.array([2, 0, 4, 3, 1, 4], np.int32)
    output = Output(Sampled(*[number] * 5), prompt=None, row_numbers=number)
    assert output.sample_indices(4, shards=2) == [1, -1, 0, -1, -1, 4, -1, 3]
    assert replace(output, row_numbers=None).sample_indices(2, shards=2) is None
