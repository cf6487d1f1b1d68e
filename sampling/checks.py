"""The limits of each sampling parameter by itself, and the error messages for anything else."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..fields import converted
from .structured import structured

MAX_LOGPROBS = 20  # alternatives reported beside a token, unless an engine is started with more
ALL = -1  # of log-probabilities: those of the whole vocabulary
MAX_N = 16384  # completions of a prompt, as in vLLM: each is a request of its own
MAX_BIAS = 1e9  # size of a logit bias; masks are far beyond it
MAX_TEMPERATURE = 1e6
MAX_INT32 = 2**31 - 1
MAX_BAD_WORD = 4096  # characters: more than its tokens can have, and tokenized in a moment
MAX_REPETITION = 1e3  # and its inverse: float32 logits stay finite


def plain(value: Any) -> Any:
    """numpy scalars and arrays, sets and ranges as Python's own numbers and lists, also in a mapping."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [plain(v) for v in value]
    if isinstance(value, Mapping):
        return {key: plain(v) for key, v in value.items()}
    return value


def typed(name: str, value: Any, kind: Any) -> Any:
    """The value as its field's type (an int becomes a float, a list a tuple); TypeError names the field."""
    if name in ("logprobs", "prompt_logprobs") and value is True:
        return 1  # as in vLLM
    if name == "structured_outputs":
        return structured(value)
    found = value if type(value) is kind else converted(name, plain(value), kind)
    if name == "stop" and isinstance(found, str):
        return (found,)
    return tuple(found) if isinstance(found, list) else found


def require(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r} is not allowed: {allowed}")


def within(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: low <= value <= high


def at_least(least: int, *others: Any) -> Callable[[Any], bool]:
    return lambda value: value in others or value >= least


def are_ids(ids: Any) -> bool:
    return all(0 <= token <= MAX_INT32 for token in ids or ())


# What a field may be by itself.
LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "n": (within(1, MAX_N), f"1 to {MAX_N}"),
    "temperature": (within(0, MAX_TEMPERATURE), f"0 (greedy) to {MAX_TEMPERATURE:g}"),
    "top_k": (at_least(-1), "1 or more; 0 or -1 is off"),
    "top_p": (lambda p: 0 < p <= 1, "above 0, at most 1"),
    "min_p": (within(0, 1), "0 to 1"),
    "presence_penalty": (within(-2, 2), "-2 to 2"),
    "frequency_penalty": (within(-2, 2), "-2 to 2"),
    "repetition_penalty": (
        within(1 / MAX_REPETITION, MAX_REPETITION),
        f"{1 / MAX_REPETITION:g} to {MAX_REPETITION:g}; 1 is off",
    ),
    "seed": (lambda seed: seed is None or -(2**63) <= seed < 2**64, "a 64-bit integer"),
    "max_tokens": (at_least(1, None), "1 or more, or None"),
    "min_tokens": (at_least(0), "0 to max_tokens"),
    "logprobs": (at_least(ALL, None), "0 or more, -1 for all, or None"),
    "prompt_logprobs": (at_least(ALL, None), "0 or more, -1 for all, or None"),
    "stop": (lambda stop: "" not in (stop or ()), "strings that are not empty"),
    "bad_words": (
        lambda words: all(w.strip() and len(w) <= MAX_BAD_WORD for w in words or ()),
        f"words that are not blank, of at most {MAX_BAD_WORD} characters",
    ),
    "stop_token_ids": (are_ids, "token ids, 0 or more"),
    "allowed_token_ids": (lambda ids: ids != () and are_ids(ids), "token ids, at least one, or None"),
    "trace_decode_token_ids": (lambda ids: ids != () and are_ids(ids), "token ids, at least one, or None"),
    "logit_bias": (are_ids, "token ids, 0 or more"),
    "spaces_between_special_tokens": (lambda value: value, "only True is supported"),
}


def checked(name: str, value: Any, kind: Any) -> Any:
    """A field's value as its type, if it is allowed. Raises TypeError or ValueError, naming the field."""
    found = typed(name, value, kind)
    if name == "seed" and found == -1:
        return None  # as in vLLM
    ok, allowed = LIMITS.get(name, (lambda _: True, ""))
    require(ok(found), name, value, allowed)
    if name == "extra_args":
        return found or None
    for token, bias in found.items() if isinstance(found, dict) else ():
        require(abs(bias) <= MAX_BIAS, f"logit_bias[{token}]", bias, f"finite, at most {MAX_BIAS:g}")
    return found
