"""What a request asks of the sampler: `SamplingParams` on the host, and `Knobs`, the row the device is told.

Names, defaults and meaning are vLLM's. A new parameter is a field here (and in `Knobs`), and a function in `sample`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import msgspec
import numpy as np

from ..model.tree import pytree

MAX_N = 16384  # completions of a prompt, as in vLLM: each is a request of its own
MAX_LOGPROBS = 20  # alternatives reported beside a token
MAX_STOP_IDS = 64  # stop token ids of a request, the model's end-of-sequence ids included
MAX_BAD_WORDS = 64  # banned sequences of two tokens and more; single tokens are not limited
MAX_BAD_WORD_LENGTH = 8  # tokens of one banned sequence
MAX_BIAS = 1e9  # size of a logit bias; masks are far beyond it
MAX_TEMPERATURE = 1e6
MAX_INT32 = 2**31 - 1
MAX_REPETITION = 1e3  # and its inverse: float32 logits stay finite
GREEDY_BELOW = 1e-5  # a temperature below this is greedy


def option(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen, how many, and what is reported of them.

    Construction raises ValueError (a field's value is not allowed) or TypeError (a field has the wrong type or is
    unknown); the message names the field, its value and what is allowed. Sequences are kept as tuples.
    """

    n: int = option(1, "number of completions of the prompt, each with its own random numbers")
    temperature: float = option(1.0, "divides the logits; 0 is greedy")
    top_k: int = option(0, "draw from the k most likely tokens only; 0 or -1 is off")
    top_p: float = option(1.0, "draw from the fewest tokens whose probabilities sum to p; 1 is off")
    min_p: float = option(
        0.0, "draw from tokens at least this share of the most likely one's probability; 0 is off"
    )
    presence_penalty: float = option(
        0.0, "subtracted from the logit of every token already generated (-2..2)"
    )
    frequency_penalty: float = option(0.0, "subtracted once for each time a token was generated (-2..2)")
    repetition_penalty: float = option(
        1.0, "divides positive, multiplies negative logits of tokens seen in prompt or output"
    )
    seed: int | None = option(
        None, "64-bit integer; the same request with the same seed gives the same tokens; -1 is none"
    )
    stop: str | Sequence[str] | None = option(
        None, "a string or strings that end the output when they appear in the text"
    )
    stop_token_ids: Sequence[int] | None = option(
        None, "token ids that end the output, beside the model's own"
    )
    bad_words: Sequence[str] | None = option(None, "strings that are never generated")
    logit_bias: Mapping[int, float] | None = option(None, "added to the logits of the given token ids")
    allowed_token_ids: Sequence[int] | None = option(None, "the only token ids that may be generated")
    min_tokens: int = option(0, "neither stop ids nor stop strings end the output before this many tokens")
    max_tokens: int | None = option(16, "most tokens generated; null is up to the model's length")
    ignore_eos: bool = option(False, "go on after the model's end-of-sequence token")
    logprobs: int | None = option(
        None, f"report each token's log-probability and this many alternatives (0..{MAX_LOGPROBS})"
    )
    prompt_logprobs: int | None = option(None, f"the same of each prompt token (0..{MAX_LOGPROBS})")
    include_stop_str_in_output: bool = option(False, "keep the stop string that ended the text")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text")
    spaces_between_special_tokens: bool = option(True, "only true is supported")
    detokenize: bool = option(True, "give text, not only token ids")

    def __post_init__(self):
        for name, value in list(vars(self).items()):
            object.__setattr__(self, name, typed(name, value))
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        check_ranges(self)
        check_lists(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Parameters from the fields of a JSON object (keys of `logit_bias` may be strings)."""
        unknown = [name for name in values if name not in FIELD_TYPES]
        if unknown:
            raise TypeError(f"unknown sampling parameter {unknown[0]!r}; known are {', '.join(FIELD_TYPES)}")
        return cls(**values)

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop if isinstance(self.stop, tuple) else ()

    def check_vocabulary(self, V: int) -> None:
        """Raise ValueError for a token id that a vocabulary of V entries lacks."""
        lists = {"stop_token_ids": self.stop_token_ids, "allowed_token_ids": self.allowed_token_ids}
        for name, ids in {**lists, "logit_bias": self.logit_bias}.items():
            for token in ids or ():
                require(0 <= token < V, name, token, f"the vocabulary's ids are 0..{V - 1}")


FIELD_TYPES = get_type_hints(SamplingParams)


def plain(value: Any) -> Any:
    """numpy scalars and arrays, sets and ranges as Python's own numbers and lists."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, (list, tuple, set, frozenset, range)):
        return [plain(v) for v in value]
    return value


def typed(name: str, value: Any) -> Any:
    """The value as its field's type (an int becomes a float, a list a tuple); TypeError names the field."""
    try:
        found = msgspec.convert(plain(value), FIELD_TYPES[name], str_keys=True)
    except msgspec.ValidationError as error:
        raise TypeError(f"{name}={value!r}: {str(error).replace('Expected', 'expected', 1)}") from None
    if name == "stop" and isinstance(found, str):
        return (found,)
    return tuple(found) if isinstance(found, list) else found


def require(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r} is not allowed: {allowed}")


def check_ranges(p: SamplingParams) -> None:
    require(1 <= p.n <= MAX_N, "n", p.n, f"1 to {MAX_N}")
    hot = f"0 (greedy) to {MAX_TEMPERATURE:g}"
    require(0 <= p.temperature <= MAX_TEMPERATURE, "temperature", p.temperature, hot)
    require(p.top_k >= -1, "top_k", p.top_k, "1 or more; 0 or -1 is off")
    require(0 < p.top_p <= 1, "top_p", p.top_p, "above 0, at most 1")
    require(0 <= p.min_p <= 1, "min_p", p.min_p, "0 to 1")
    for name, value in (("presence_penalty", p.presence_penalty), ("frequency_penalty", p.frequency_penalty)):
        require(-2 <= value <= 2, name, value, "-2 to 2")
    repetition, strong = p.repetition_penalty, f"{1 / MAX_REPETITION:g} to {MAX_REPETITION:g}; 1 is off"
    require(1 / MAX_REPETITION <= repetition <= MAX_REPETITION, "repetition_penalty", repetition, strong)
    require(p.seed is None or -(2**63) <= p.seed < 2**64, "seed", p.seed, "a 64-bit integer")
    require(p.max_tokens is None or p.max_tokens >= 1, "max_tokens", p.max_tokens, "1 or more, or None")
    most = math.inf if p.max_tokens is None else p.max_tokens
    require(0 <= p.min_tokens <= most, "min_tokens", p.min_tokens, f"0 to max_tokens ({p.max_tokens})")
    for name, value in (("logprobs", p.logprobs), ("prompt_logprobs", p.prompt_logprobs)):
        require(value is None or 0 <= value <= MAX_LOGPROBS, name, value, f"None or 0 to {MAX_LOGPROBS}")
    require(p.n == 1 or not p.greedy, "n", p.n, "1 with temperature 0, where all completions would be equal")
    require(p.spaces_between_special_tokens, "spaces_between_special_tokens", False, "only True is supported")


def check_lists(p: SamplingParams) -> None:
    require("" not in p.stop_strings, "stop", p.stop, "strings that are not empty")
    require(
        p.detokenize or not p.stop, "stop", p.stop, "with detokenize=False there is no text to look for it"
    )
    require(all(w.strip() for w in p.bad_words or ()), "bad_words", p.bad_words, "words that are not blank")
    require(p.allowed_token_ids != (), "allowed_token_ids", [], "at least one id, or None")
    lists = {"stop_token_ids": p.stop_token_ids, "allowed_token_ids": p.allowed_token_ids}
    for name, ids in {**lists, "logit_bias": p.logit_bias}.items():
        for token in ids or ():
            require(0 <= token <= MAX_INT32, name, token, "token ids, 0 or more")
    for token, bias in (p.logit_bias or {}).items():
        require(abs(bias) <= MAX_BIAS, f"logit_bias[{token}]", bias, f"finite, at most {MAX_BIAS:g}")


def fold_seed(seed: int, sample: int = 0) -> int:
    """The 32 bits that the device draws from: a seed of 0..2**32-1 is itself, the upper half of a longer one
    is mixed in (Fibonacci hashing). Completion i of n draws from seed + i, as in vLLM."""
    upper, lower = divmod((seed + sample) % 2**64, 2**32)
    return lower ^ (upper * 0x9E3779B1) % 2**32


def tokenize_bad_words(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """Every banned word as token ids, at the start of a text and after a space.

    `encode` adds no special tokens. The form after a space counts where it is another token sequence of the same
    length with another first token (as in vLLM: a longer one holds the plain form after the space's own token).
    """
    sequences = []
    for word in words:
        bare, spaced = list(encode(word.lstrip())), list(encode(" " + word.lstrip()))
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            sequences.append(spaced)
    return [sequence for sequence in sequences if sequence]


@pytree
class Knobs:
    """One request's parameters as the device reads them; in `SamplingState` every leaf has a row for each slot."""

    temperature: Any  # float32, 0 is greedy
    top_k: Any  # int32, 0 is off
    top_p: Any  # float32
    min_p: Any  # float32
    presence_penalty: Any  # float32
    frequency_penalty: Any  # float32
    repetition_penalty: Any  # float32
    seed: Any  # uint32
    min_position: Any  # int32, no stop id is drawn for a position below it
    logprobs: Any  # int32, -1 where none are wanted
    has_bias: Any  # bool, whether the slot's row of `bias` is to be read
    stop_ids: Any  # int32 [MAX_STOP_IDS], padded with -1
    bad_words: Any  # int32 [MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH], padded with -1 on the left


def knobs_row(
    params: SamplingParams,
    *,
    seed: int,
    stop_ids: Sequence[int],
    prompt_len: int,
    bad_words: Sequence[Sequence[int]] = (),
) -> Knobs:
    """The device's row of one request, in numpy.

    `seed` is 0..2**32-1 (`fold_seed`), `prompt_len` the position of the first generated token, `stop_ids` the
    model's end ids (unless ignored) and the request's own, `bad_words` the tokenized words, of which those of
    one token act through `dense_bias`. Raises ValueError above the limits of this file.
    """
    return Knobs(
        temperature=np.float32(0 if params.greedy else params.temperature),
        top_k=np.int32(min(max(params.top_k, 0), MAX_INT32)),
        top_p=np.float32(params.top_p),
        min_p=np.float32(params.min_p),
        presence_penalty=np.float32(params.presence_penalty),
        frequency_penalty=np.float32(params.frequency_penalty),
        repetition_penalty=np.float32(params.repetition_penalty),
        seed=np.uint32(seed),
        min_position=np.int32(min(prompt_len + params.min_tokens, MAX_INT32)),
        logprobs=np.int32(-1 if params.logprobs is None else params.logprobs),
        has_bias=np.bool_(has_bias(params, bad_words)),
        stop_ids=stop_row(stop_ids),
        bad_words=bad_word_rows(bad_words),
    )


def has_bias(params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> bool:
    single = any(len(sequence) == 1 for sequence in bad_words)
    return bool(params.logit_bias) or params.allowed_token_ids is not None or single


def stop_row(stop_ids: Sequence[int]) -> np.ndarray:
    ids = list(dict.fromkeys(stop_ids))
    require(
        len(ids) <= MAX_STOP_IDS,
        "stop_token_ids",
        ids,
        f"at most {MAX_STOP_IDS} ids, the model's own included",
    )
    return np.array(ids + [-1] * (MAX_STOP_IDS - len(ids)), np.int32)


def bad_word_rows(bad_words: Sequence[Sequence[int]]) -> np.ndarray:
    long = [list(sequence) for sequence in bad_words if len(sequence) > 1]
    require(
        len(long) <= MAX_BAD_WORDS, "bad_words", long, f"at most {MAX_BAD_WORDS} sequences of several tokens"
    )
    rows = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH), -1, np.int32)
    for row, sequence in zip(rows, long, strict=False):
        require(len(sequence) <= len(row), "bad_words", sequence, f"at most {len(row)} tokens a word")
        row[-len(sequence) :] = sequence
    return rows
