"""Limits of each sampling parameter by itself, and the error messages for values outside of them."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..option_fields import convert_field
from ..refusals import quote
from .structured import parse_structured_outputs

MAX_LOGPROBS = 20  # alternatives reported beside a token, unless an engine is started with more
ALL_LOGPROBS = -1  # number of log-probabilities that stands for the whole vocabulary
# vLLM's names of what is reported: by the model's logits, or by those that tokens are drawn from
RAW_LOGPROBS, PROCESSED_LOGPROBS = LOGPROBS_MODES = "raw_logprobs", "processed_logprobs"
MAX_N = 16384  # completions of a prompt, as in vLLM
MAX_BIAS = 1e9  # absolute value of a logit bias; masks are far larger
MAX_TEMPERATURE = 1e6
MAX_INT32 = 2**31 - 1
MAX_TEXT = 16384  # characters of all stop strings, or of all bad words, of a request
MAX_REPETITION = 1e3  # repetition penalty, or its inverse; so float32 logits stay finite


def to_plain_value(value: Any) -> Any:
    """Convert numpy scalars and arrays, sets and ranges to Python's own numbers and lists, also in a
    mapping."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [to_plain_value(v) for v in value]
    if isinstance(value, Mapping):
        return {key: to_plain_value(v) for key, v in value.items()}
    return value


def convert_param(name: str, value: Any, kind: Any) -> Any:
    """Convert a value to its field's type (an int to a float, a list to a tuple). Raises TypeError that names
    the field."""
    if name in ("logprobs", "prompt_logprobs") and value is True:
        return 1  # as in vLLM
    if name == "structured_outputs":
        return parse_structured_outputs(value)
    result = value if type(value) is kind else convert_field(name, to_plain_value(value), kind)
    if name == "stop" and isinstance(result, str):
        return (result,)
    return tuple(result) if isinstance(result, list) else result


def require_allowed(ok: bool, name: str, value: Any, allowed: str) -> None:
    """Raise ValueError for a value that is not allowed, with what is."""
    if not ok:
        raise ValueError(f"{name}={quote(value)} is not allowed: {allowed}")


def range_check(low: float, high: float) -> Callable[[Any], bool]:
    """Return a check that a value is in [low, high]."""
    return lambda value: low <= value <= high


def make_minimum_check(least: int, *others: Any) -> Callable[[Any], bool]:
    """Return a check that a value is `least` or more, or one of `others`."""
    return lambda value: value in others or value >= least


def are_short(texts: Any) -> bool:
    """True if texts have at most MAX_TEXT characters together."""
    return sum(map(len, texts or ())) <= MAX_TEXT


def are_token_ids(ids: Any) -> bool:
    """True if all numbers can be token ids."""
    return all(0 <= token <= MAX_INT32 for token in ids or ())


def are_seeds(seed: Any) -> bool:
    """True if each seed has 64 bits and is not -1, which stands for none."""
    seeds: tuple[int, ...] = seed if isinstance(seed, tuple) else () if seed is None else (seed,)
    return all(-(2**63) <= s < 2**64 and s != -1 for s in seeds)


# Check of each field by itself, and the values that it allows.
LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (range_check(1, MAX_N), f"1 to {MAX_N}"),
    "temperature": (range_check(0, MAX_TEMPERATURE), f"0 (greedy) to {MAX_TEMPERATURE:g}"),
    "top_k": (make_minimum_check(-1), "1 or more; 0 or -1 is off"),
    "top_p": (lambda p: 0 < p <= 1, "above 0, at most 1"),
    "min_p": (range_check(0, 1), "0 to 1"),
    "presence_penalty": (range_check(-2, 2), "-2 to 2"),
    "frequency_penalty": (range_check(-2, 2), "-2 to 2"),
    "repetition_penalty": (
        range_check(1 / MAX_REPETITION, MAX_REPETITION),
        f"{1 / MAX_REPETITION:g} to {MAX_REPETITION:g}; 1 is off",
    ),
    "seed": (are_seeds, "a 64-bit integer, or a list of one for each of n, not -1"),
    "max_tokens": (make_minimum_check(1, None), "1 or more, or None"),
    "min_tokens": (make_minimum_check(0), "0 to max_tokens"),
    "logprobs": (make_minimum_check(ALL_LOGPROBS, None), "0 or more, -1 for all, or None"),
    "prompt_logprobs": (make_minimum_check(ALL_LOGPROBS, None), "0 or more, -1 for all, or None"),
    "stop": (
        lambda stop: "" not in (stop or ()) and are_short(stop),
        f"strings that are not empty, of at most {MAX_TEXT} characters together",
    ),
    "bad_words": (
        lambda words: all(w.strip() for w in words or ()) and are_short(words),
        f"words that are not blank, of at most {MAX_TEXT} characters together",
    ),
    "stop_token_ids": (are_token_ids, "token ids, 0 or more"),
    "allowed_token_ids": (lambda ids: ids != () and are_token_ids(ids), "token ids, at least one, or None"),
    "trace_decode_token_ids": (
        lambda ids: ids != () and are_token_ids(ids),
        "token ids, at least one, or None",
    ),
    "logit_bias": (are_token_ids, "token ids, 0 or more"),
    "spaces_between_special_tokens": (lambda value: value, "only True is supported"),
}


def validate_param(name: str, value: Any, kind: Any) -> Any:
    """Convert a field's value to its type, and check that it is allowed. Raises TypeError or ValueError that
    names the field."""
    result = convert_param(name, value, kind)
    if name == "seed" and result == -1:
        return None  # as in vLLM
    ok, allowed = LIMITS.get(name, (lambda _: True, ""))
    require_allowed(ok(result), name, value, allowed)
    if name == "extra_args":
        return result or None
    for token, bias in result.items() if isinstance(result, dict) else ():
        require_allowed(abs(bias) <= MAX_BIAS, f"logit_bias[{token}]", bias, f"finite, at most {MAX_BIAS:g}")
    return result
