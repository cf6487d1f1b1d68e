"""Masks and large biases: what is forbidden is never drawn, and what is left is drawn as the model says."""

from dataclasses import replace

import numpy as np
import pytest
from cases.programs import StoredJit

from duetto.sampling.accept import target_probs
from duetto.sampling.params import SamplingParams, request_knobs
from duetto.sampling.sample import sample
from duetto.sampling.state import (
    dense_bias,
    empty_sampling_state,
    load_history,
    load_knobs,
    load_masks,
    needs_history,
)
from duetto.serve.engine.core.slot_setup import LogitBiasCache
from duetto.serve.llm.input_processor import InputProcessor
from duetto.serve.options.engine import EngineOptions

V, EOS, DRAWS = 12, 2, 200
LOGITS = np.random.default_rng(5).normal(0, 1.5, V).astype(np.float32)
enter, look_back, draw = map(StoredJit, (load_knobs, load_history, sample))
constrain, target = StoredJit(load_masks), StoredJit(target_probs)


def drawn(params: SamplingParams, output: tuple[int, ...] = (), bad_words: tuple = ()) -> list[int]:
    """Tokens for one request at DRAWS positions, each after the same tokens, from the same logits."""
    knobs = request_knobs(params, seed=1, stop_ids=(EOS,), prompt_len=1, bad_words=bad_words)
    state = enter(empty_sampling_state(1, V), np.int32(0), knobs)
    if needs_history(params):
        tokens = np.zeros(16, np.int32)
        tokens[: 1 + len(output)] = [0, *output]
        lengths = np.int32(1), np.int32(1 + len(output))
        state = look_back(state, np.int32(0), tokens, *lengths, dense_bias(params, V, bad_words))
    position = np.arange(DRAWS, dtype=np.int32) + 1 + len(output)
    logits = np.broadcast_to(LOGITS, (DRAWS, V))
    found = draw(logits, position, np.zeros(DRAWS, np.int32), np.ones(DRAWS, bool), state)
    return found.token.tolist()


ODD = {"temperature": 1.5, "min_tokens": 300, "logit_bias": {3: 1e6, 5: 1e6}, "presence_penalty": -2.0}
ALLOWED = {1: {0, 7}, 2: {EOS}, 3: {1, 3, 11}, 4: {4, 5}}  # by position


@pytest.mark.parametrize("given", [{"top_k": 5, "repetition_penalty": 1e3}, {"temperature": 0.0}])
def test_a_grammar_comes_before_everything_else(given):
    """Each position has a mask of its own, and the target of a guess is what is drawn under it."""
    params = SamplingParams(structured_outputs={"regex": "x"}, max_tokens=None, **ODD | given)
    knobs = request_knobs(params, seed=1, stop_ids=(EOS,), prompt_len=1, bad_words=[[4], [5]])
    bias = dense_bias(params, V, [[4], [5]])
    zero, tokens = np.int32(0), np.zeros(16, np.int32)
    state = enter(empty_sampling_state(1, V, positions=len(ALLOWED)), zero, knobs)
    state = look_back(state, zero, tokens, np.int32(1), np.int32(1), bias)
    masks = np.array([[[sum(1 << i for i in own)] for own in ALLOWED.values()]], np.uint32)
    seats = np.array([0], np.int32)
    allowed = constrain(state.token_masks, seats, seats + 1, masks)
    state = replace(
        state, token_masks=constrain(allowed, seats + 1, seats, 0 * masks)
    )  # that seat is not there
    position = np.tile(np.array([*ALLOWED], np.int32), DRAWS // 4)
    given = np.broadcast_to(LOGITS, (DRAWS, V)), position, 0 * position, position > 0, state
    found, probs = np.asarray(draw(*given).token), np.asarray(target(*given))
    for at, own in ALLOWED.items():
        assert {*found[position == at].tolist()} <= own
        assert {*np.flatnonzero(probs[position == at][0]).tolist()} <= own
        assert (probs[np.arange(DRAWS), found][position == at] > 0).all()


def intake() -> InputProcessor:
    return InputProcessor(V, 64, EngineOptions(), Words(), (EOS,))


class Words:
    """A tokenizer of one token a word: the word itself is its id."""

    split_special_tokens = False
    eos_token_id = EOS

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [int(word) for word in text.split()]


@pytest.mark.parametrize(
    "given",
    [
        {"allowed_token_ids": [EOS]},
        {"allowed_token_ids": [EOS, 7], "stop_token_ids": [7]},
        {"allowed_token_ids": [EOS, 7], "bad_words": ["7"]},
        {"bad_words": [str(i) for i in range(V) if i != EOS]},
    ],
)
def test_requests_that_allow_only_an_early_end_are_refused(given):
    with pytest.raises(ValueError, match=r"min_tokens=4 is not allowed.*leave only tokens that end"):
        intake().make_subscription([1], SamplingParams(min_tokens=4, detokenize=False, **given))
    intake().make_subscription([1], SamplingParams(detokenize=False, **given))
    intake().make_subscription(
        [1], SamplingParams(min_tokens=4, detokenize=False, allowed_token_ids=[EOS, 7])
    )


def test_completions_share_the_bias_that_a_seat_needs():
    """A request holds no dense row while it waits; the last one is kept for the completions that follow."""
    params = SamplingParams(n=3, logit_bias={3: 2.0}, bad_words=["5"], detokenize=False)
    biases, (first, *others) = LogitBiasCache(V), intake().make_subscription([1], params).requests
    assert not any(isinstance(value, np.ndarray) for value in vars(first).values())
    bias = biases.get(first)
    assert (bias == dense_bias(params, V, [[5]])).all() and bias[3] == 2
    assert all(biases.get(request) is bias for request in others)
    (plain,) = intake().make_subscription([1], SamplingParams(detokenize=False)).requests
    assert not biases.get(plain).any()
    assert (biases.get(first) == bias).all()


@pytest.mark.parametrize("words", [["3", "12"], ["4 12"], ["12 4"]])
def test_a_bad_word_beyond_the_vocabulary_is_refused(words):
    with pytest.raises(ValueError, match=r"bad_words=.*token id 12: the vocabulary's ids are 0..11"):
        intake().make_subscription([1], SamplingParams(bad_words=words, detokenize=False))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_forbidden_token_is_drawn_when_bad_words_ban_others(temperature):
    """After its first token, the allowed one would end the bad word."""
    params = SamplingParams(temperature=temperature, allowed_token_ids=[5], bad_words=["5 5"], min_tokens=9)
    assert set(drawn(params, (5,), ((5, 5),))) == {5}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_stop_comes_early_before_a_bad_word_is_ended(temperature):
    params = SamplingParams(
        temperature=temperature, allowed_token_ids=[5, EOS], bad_words=["5 5"], min_tokens=9
    )
    assert set(drawn(params, (5,), ((5, 5),))) == {EOS}


@pytest.mark.parametrize("size", [-1e9, -1e5, 1e9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_same_large_bias_on_all_tokens_changes_nothing(temperature, size):
    plain = SamplingParams(temperature=temperature)
    biased = SamplingParams(temperature=temperature, logit_bias=dict.fromkeys(range(V), size))
    assert drawn(biased) == drawn(plain)


@pytest.mark.parametrize("bias", [{3: 1e9, 7: 1e9}, {i: -1e9 for i in range(V) if i not in (3, 7)}])
def test_large_biases_leave_the_rest_to_the_model(bias):
    allowed = SamplingParams(allowed_token_ids=[3, 7])
    assert drawn(SamplingParams(logit_bias=bias)) == drawn(allowed)
    assert set(drawn(allowed)) == {3, 7}


def test_large_biases_beside_an_end_that_is_too_early():
    """All but the end are lowered alike, and the end must not come yet."""
    bias = {i: -1e9 for i in range(V) if i != EOS}
    held = drawn(SamplingParams(logit_bias=bias, min_tokens=16))
    assert held[:15] == drawn(SamplingParams(bad_words=["2"]), (), ((EOS,),))[:15]
    assert EOS not in held[:15]
