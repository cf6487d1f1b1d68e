"""What a request may ask for, and the words in which it is refused."""

from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest

from duetto.sampling.params import (
    MAX_BAD_WORD_LENGTH,
    MAX_BAD_WORDS,
    MAX_STOP_IDS,
    RequestOutputKind,
    SamplingParams,
    completion_seeds,
    fold_seed,
    request_knobs,
    tokenize_bad_words,
)
from duetto.sampling.state import MASKED, check_allowed_tokens, dense_bias, needs_history

VLLM_DEFAULTS = {
    "extra_args": None,
    "n": 1,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "bad_words": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "trace_decode_token_ids": None,
    "min_tokens": 0,
    "max_tokens": 16,
    "ignore_eos": False,
    "logprobs": None,
    "prompt_logprobs": None,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "detokenize": True,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "structured_outputs": None,
}


def test_names_and_defaults_are_vllms():
    assert vars(SamplingParams()) == VLLM_DEFAULTS


def test_every_field_explains_itself():
    assert all(f.metadata["help"] for f in fields(SamplingParams))


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"n": 0}, "1 to 16384"),
        ({"n": 10**9}, "1 to 16384"),
        ({"n": 2, "temperature": 0}, "temperature 0"),
        ({"temperature": -0.1}, "0 (greedy) to"),
        ({"temperature": float("nan")}, "0 (greedy) to"),
        ({"temperature": float("inf")}, "0 (greedy) to"),
        ({"top_k": -2}, "0 or -1 is off"),
        ({"top_p": 0.0}, "above 0, at most 1"),
        ({"top_p": 1.01}, "above 0, at most 1"),
        ({"top_p": float("nan")}, "above 0, at most 1"),
        ({"min_p": -0.1}, "0 to 1"),
        ({"min_p": 1.1}, "0 to 1"),
        ({"presence_penalty": 2.5}, "-2 to 2"),
        ({"frequency_penalty": -2.5}, "-2 to 2"),
        ({"repetition_penalty": 0}, "1 is off"),
        ({"repetition_penalty": float("inf")}, "1 is off"),
        ({"seed": 2**64}, "64-bit"),
        ({"seed": [1, 2**64], "n": 2}, "64-bit"),
        ({"seed": [1, -1], "n": 2}, "not -1"),
        ({"seed": [1, 2]}, "as many as n=1"),
        ({"seed": [], "n": 2}, "as many as n=2"),
        ({"seed": [1, 2, 3], "n": 4}, "as many as n=4"),
        ({"stop": ""}, "not empty"),
        ({"stop": ["a", ""]}, "not empty"),
        ({"stop": "a", "detokenize": False}, "detokenize=False"),
        ({"stop_token_ids": [-1]}, "0 or more"),
        ({"bad_words": [" "]}, "not blank"),
        ({"stop": "a" * 16385}, "of at most 16384 characters together"),
        ({"stop": [" " * 4000] * 5}, "of at most 16384 characters together"),
        ({"bad_words": ["a" * 4097] * 4}, "of at most 16384 characters together"),
        ({"logit_bias": {3: float("inf")}}, "finite"),
        ({"logit_bias": {3: float("nan")}}, "finite"),
        ({"logit_bias": {-3: 1.0}}, "0 or more"),
        ({"allowed_token_ids": []}, "at least one"),
        ({"allowed_token_ids": [2**40]}, "token ids"),
        ({"min_tokens": -1}, "0 to max_tokens"),
        ({"min_tokens": 17}, "0 to max_tokens (16)"),
        ({"max_tokens": 0}, "1 or more"),
        ({"logprobs": -2}, "0 or more, -1 for all"),
        ({"prompt_logprobs": -2}, "0 or more, -1 for all"),
        ({"spaces_between_special_tokens": False}, "only True"),
    ],
)
def test_values_out_of_range_are_refused_by_name(given, allowed):
    with pytest.raises(ValueError, match="is not allowed") as refusal:
        SamplingParams(**given)
    assert allowed in str(refusal.value)
    assert str(refusal.value).startswith(next(iter(given)))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"temperature": "hot"}, "expected `float`"),
        ({"temperature": None}, "expected `float`"),
        ({"top_k": 1.5}, "expected `int`"),
        ({"top_k": True}, "expected `int`"),
        ({"max_tokens": "16"}, "expected `int | null`"),
        ({"stop": 5}, "str"),
        ({"stop": ["a", 5]}, "expected `str`"),
        ({"stop_token_ids": 2}, "array"),
        ({"stop_token_ids": [2, "x"]}, "expected `int`"),
        ({"bad_words": "word"}, "array"),
        ({"logit_bias": [1, 2]}, "object"),
        ({"logit_bias": {"x": 1.0}}, "expected `int`"),
        ({"ignore_eos": 1}, "expected `bool`"),
    ],
)
def test_wrong_types_are_refused_by_name(given, expected):
    with pytest.raises(TypeError) as refusal:
        SamplingParams.from_dict(given)
    assert expected in str(refusal.value)
    assert str(refusal.value).startswith(next(iter(given)))


def test_unknown_parameters_are_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)  # pyright: ignore[reportCallIssue]
    with pytest.raises(
        TypeError, match="unknown sampling parameter 'temprature', did you mean 'temperature'"
    ):
        SamplingParams.from_dict({"temprature": 1.0})


def test_values_of_json_and_numpy_become_plain():
    body = msgspec.json.decode(
        b'{"temperature": 1, "stop": ["a"], "logit_bias": {"5": -1}, "max_tokens": null}'
    )
    params = SamplingParams.from_dict(body)
    assert params == SamplingParams(temperature=1.0, stop="a", logit_bias={5: -1.0}, max_tokens=None)
    assert type(params.temperature) is float and params.stop_strings == ("a",)
    arrays = SamplingParams.from_dict(
        {"seed": np.int64(3), "stop_token_ids": np.arange(2), "allowed_token_ids": range(2)}
    )
    assert arrays == SamplingParams(seed=3, stop_token_ids=[0, 1], allowed_token_ids=(0, 1))
    assert replace(params, seed=4) == SamplingParams.from_dict({**body, "seed": 4})


def test_off_and_edge_values_are_allowed():
    for given in (
        {"top_k": -1},
        {"seed": -1},
        {"seed": 2**64 - 1},
        {"max_tokens": 5, "min_tokens": 5},
        {"logprobs": 0},
    ):
        SamplingParams(**given)
    assert SamplingParams(temperature=1e-6).greedy and not SamplingParams(temperature=1e-3).greedy


def test_token_ids_must_be_in_the_vocabulary():
    for given in ({"stop_token_ids": [10]}, {"logit_bias": {10: 1.0}}, {"allowed_token_ids": [10]}):
        with pytest.raises(ValueError, match=f"{next(iter(given))}=10.*0..9"):
            SamplingParams(**given).check_vocabulary(10)
        SamplingParams(**given).check_vocabulary(11)


def test_seeds_of_32_bits_are_themselves_and_completions_differ():
    assert fold_seed(7) == 7 and fold_seed(2**32 - 1) == 2**32 - 1
    assert fold_seed(7, 2) == 9
    assert SamplingParams(seed=-1).seed is None
    assert completion_seeds(7, 3) == [7, 8, 9]
    assert completion_seeds([5, 2**33, 5], 3) == [5, fold_seed(2**33), 5]
    assert SamplingParams(n=2, seed=np.arange(2)).seed == SamplingParams(n=2, seed=[0, 1]).seed == (0, 1)
    wide = {fold_seed(seed) for seed in (-2, -3, 2**63, 2**33, 2**33 + 1, 2**64 - 1)}
    assert len(wide) == 6 and all(0 <= seed < 2**32 for seed in wide)


def test_bad_words_are_tokenized_with_and_without_a_space():
    words = {
        "dog": [5],
        " dog": [6],
        "cat": [1, 2],
        " cat": [3, 2],
        "ox": [7],
        " ox": [9, 7],
        "": [],
        " ": [],
    }
    assert tokenize_bad_words(["dog", " cat", "ox"], words.__getitem__) == [[5], [6], [1, 2], [3, 2], [7]]
    assert tokenize_bad_words([" "], words.__getitem__) == []


def test_limits_of_the_device_rows():
    params = SamplingParams(bad_words=["x"])

    def row(stop_ids=(), bad_words=()):
        return request_knobs(params, seed=0, stop_ids=stop_ids, prompt_len=0, bad_words=bad_words)

    full = row(range(MAX_STOP_IDS), [[1] * MAX_BAD_WORD_LENGTH] * MAX_BAD_WORDS + [[7]])
    assert (full.stop_ids >= 0).all() and (full.bad_words == 1).all() and full.has_bias
    assert list(row(bad_words=[[3, 4]]).bad_words[0, -3:]) == [-1, 3, 4]
    with pytest.raises(ValueError, match=f"stop_token_ids.*at most {MAX_STOP_IDS}"):
        row(range(MAX_STOP_IDS + 1))
    with pytest.raises(ValueError, match=f"bad_words.*at most {MAX_BAD_WORDS}"):
        row(bad_words=[[1, 2]] * (MAX_BAD_WORDS + 1))
    with pytest.raises(ValueError, match=f"bad_words.*at most {MAX_BAD_WORD_LENGTH} tokens"):
        row(bad_words=[[1] * (MAX_BAD_WORD_LENGTH + 1)])


def test_dense_bias_masks_what_is_not_allowed():
    params = SamplingParams(logit_bias={1: 2.5, 3: -1}, allowed_token_ids=[1, 2, 4], bad_words=["x", "y"])
    bias = dense_bias(params, 6, [[4], [1, 2]])
    assert bias.dtype == np.float32
    assert bias.tolist() == [np.float32(MASKED), 2.5, 0.0, *[np.float32(MASKED)] * 3]
    with pytest.raises(ValueError, match="no token"):
        check_allowed_tokens(params, 6, (), [[1], [2], [4]])
    with pytest.raises(ValueError, match="allowed_token_ids=4"):
        check_allowed_tokens(params, 4, ())


def test_more_allowed_tokens_than_a_vocabulary_has_are_refused():
    """Repeated ids would be written one by one on the engine's thread."""
    check_allowed_tokens(SamplingParams(allowed_token_ids=[3, 3, 1, 0]), 4, ())
    with pytest.raises(ValueError, match=r"allowed_token_ids=.* is not allowed: at most 4 ids"):
        check_allowed_tokens(SamplingParams(allowed_token_ids=[3] * 5), 4, ())


def test_history_is_loaded_for_those_who_read_it():
    off = ({}, {"temperature": 0}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}, {"logprobs": 5, "min_tokens": 3})
    on = ("presence_penalty", "frequency_penalty", "repetition_penalty")
    assert not any(needs_history(SamplingParams(**given)) for given in off)
    assert all(needs_history(SamplingParams(**{name: 1.5})) for name in on)
    assert needs_history(SamplingParams(bad_words=["x"])) and needs_history(
        SamplingParams(allowed_token_ids=[1])
    )
    assert needs_history(SamplingParams(logit_bias={1: 1.0}))
