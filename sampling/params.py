"""Sampling parameters of a request: `SamplingParams` on the host, and `Knobs`, their row on the device.

Names, defaults and meaning are vLLM's. A new parameter is a field here (and in `Knobs`), a function and a
line of `PIPELINE` in `processors`.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple, TypeVar, get_type_hints

import numpy as np
from jaxtyping import Int32

from ..model.tree import pytree
from ..neutral_values import NEUTRAL, check_neutral
from ..option_fields import knob
from ..refusals import unknown_name_message
from .checks import (
    ALL_LOGPROBS,
    MAX_INT32,
    MAX_LOGPROBS,
    MAX_N,
    MAX_TEMPERATURE,
    convert_field,
    require_allowed,
    validate_param,
)
from .custom_processors import KnobValue, LogitsProcessor, processor_knobs
from .structured import StructuredOutputsParams

T = TypeVar("T")

MAX_STOP_IDS = 64  # stop token ids of a request, the model's end-of-sequence ids included
MAX_BAD_WORDS = 64  # banned sequences of two tokens and more; single tokens are not limited
MAX_BAD_WORD_LENGTH = 8  # tokens of one banned sequence
NO_TOKEN = -1  # padding of tables of token ids, and of a step's results
NAN_TOKEN = -2  # in place of a token: the largest logit is NaN or infinite
NO_LOGPROBS = -1  # knob of a request that wants no log-probabilities
TRACE_LOGPROBS = -2  # knob of a trace that wants some: by the raw logits in every mode
GREEDY_BELOW = 1e-5  # a temperature below this is greedy
# parameters that have no influence on the choice of tokens
REPORTING_FIELDS = (
    "trace_decode_token_ids", "logprobs", "prompt_logprobs", "detokenize", "skip_special_tokens",
    "output_kind",
)  # fmt: skip


class RequestOutputKind(Enum):
    """Outputs that `LLMEngine` and `AsyncLLM` report of a running request: all tokens, the new ones, or only
    the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def with_neutral_names(cls: type[T]) -> type[T]:
    """Make a dataclass accept neutral sampling parameters too. Its `__init__` raises TypeError for an unknown
    name, with the nearest known one."""
    names, plain = [f.name for f in fields(cls)], cls.__init__  # type: ignore[arg-type]

    @functools.wraps(plain)
    def init(self: Any, *args: Any, **keywords: Any) -> None:
        for name in [name for name in keywords if name not in names]:
            if name not in NEUTRAL["sampling"]:
                raise TypeError(unknown_name_message("sampling parameter", name, names))
            check_neutral("sampling", name, keywords.pop(name))
        plain(self, *args, **keywords)

    cls.__init__ = init
    for name, values in NEUTRAL["sampling"].items():
        setattr(cls, name, values[0])
    return cls


@with_neutral_names
@dataclass
class SamplingParams:
    """Parameters of one request: how its tokens are chosen, how many, and what is reported; settable until it
    is submitted.

    Construction and every assignment raise ValueError (a value is not allowed) or TypeError (it has the wrong
    type, or the name is unknown); the message names the field, its value and what is allowed. Rules between
    fields are checked at construction and by `clone`, which is called at submission. Sequences are kept as
    tuples. Positions are vLLM's.
    """

    n: int = knob(1, "number of completions of the prompt, each with its own random numbers")
    presence_penalty: float = knob(0.0, "subtracted from the logit of every token already generated (-2..2)")
    frequency_penalty: float = knob(0.0, "subtracted once for each time a token was generated (-2..2)")
    repetition_penalty: float = knob(
        1.0, "divides positive, multiplies negative logits of tokens seen in prompt or output"
    )
    temperature: float = knob(1.0, "divides the logits; 0 is greedy")
    top_p: float = knob(1.0, "draw from the fewest tokens whose probabilities sum to p or more; 1 is off")
    top_k: int = knob(0, "draw from the k most likely tokens only; 0 or -1 is off")
    min_p: float = knob(0.0, "minimum probability of a token, as a fraction of the highest one; 0 is off")
    seed: int | Sequence[int] | None = knob(
        None,
        "64-bit seed, with which a request gives the same tokens again, or a list of one for each of n; "
        "-1 is none",
    )
    stop: str | Sequence[str] | None = knob(None, "string or strings that end the output")
    stop_token_ids: Sequence[int] | None = knob(
        None, "token ids that end the output, besides the model's own"
    )
    ignore_eos: bool = knob(False, "continue after the model's end-of-sequence token")
    max_tokens: int | None = knob(16, "maximum generated tokens; null is up to the model's length")
    min_tokens: int = knob(0, "tokens before which neither stop ids nor stop strings end the output")
    logprobs: int | None = knob(
        None,
        "report the log-probability of each token and of this many alternatives, at most the engine's "
        "max_logprobs; -1 is the whole vocabulary",
    )
    prompt_logprobs: int | None = knob(None, "report the same for each prompt token")
    _: KW_ONLY
    structured_outputs: StructuredOutputsParams | None = field(
        default=None,
        metadata={"help": "a JSON schema, regular expression, choice or grammar that the output follows"},
    )
    bad_words: Sequence[str] | None = knob(None, "strings that are never generated")
    logit_bias: Mapping[int, float] | None = knob(None, "values added to the logits of token ids")
    allowed_token_ids: Sequence[int] | None = knob(None, "only these token ids may be generated")
    extra_args: Mapping[str, KnobValue] | None = knob(
        None, "numbers for the engine's logits processors, by the names of their knobs"
    )
    trace_decode_token_ids: Sequence[int] | None = knob(
        None, "these tokens are the output, and are only scored: what chooses or ends tokens has no effect"
    )
    include_stop_str_in_output: bool = knob(False, "keep the stop string that ended the text")
    skip_special_tokens: bool = knob(True, "omit special tokens from the text")
    spaces_between_special_tokens: bool = knob(True, "only true is supported")
    detokenize: bool = knob(True, "return text, not only token ids")
    output_kind: RequestOutputKind = field(
        default=RequestOutputKind.CUMULATIVE,
        metadata={"help": "tokens in each report of LLMEngine and AsyncLLM", "flag": False},
    )

    def __post_init__(self):
        check_field_rules(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in NEUTRAL["sampling"]:
            check_neutral("sampling", name, value)
        elif name not in FIELD_TYPES:
            raise AttributeError(unknown_name_message("sampling parameter", name, FIELD_TYPES))
        else:
            object.__setattr__(self, name, validate_param(name, value, FIELD_TYPES[name]))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Make parameters from the fields of a JSON object (keys of `logit_bias` may be strings)."""
        return cls(**values)

    @classmethod
    def from_optional(cls, **values: Any) -> "SamplingParams":
        """Make parameters from values of which None stands for the default. As in vLLM, biases are clipped to
        -100..100."""
        stated: dict[str, Any] = {
            name: value for name, value in values.items() if value is not None or name == "max_tokens"
        }
        params = cls(**stated)
        if params.logit_bias is not None:
            params.logit_bias = {token: min(100.0, max(-100.0, x)) for token, x in params.logit_bias.items()}
        return params

    def clone(self) -> "SamplingParams":
        """Copy the parameters, and check the rules between their fields."""
        params = copy(self)
        params.logit_bias, params.extra_args = self.logit_bias, self.extra_args
        check_field_rules(params)
        return params

    @property
    def greedy(self) -> bool:
        """True if the temperature is so low that the most likely token is chosen."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end the output, as a tuple."""
        return self.stop if isinstance(self.stop, tuple) else ()

    def replayed(self) -> "SamplingParams":
        """Return the parameters of a request that only scores its trace. Fields about what is reported are
        kept."""
        assert self.trace_decode_token_ids is not None
        reporting = {name: getattr(self, name) for name in REPORTING_FIELDS}
        return SamplingParams(
            temperature=0.0, max_tokens=len(self.trace_decode_token_ids), ignore_eos=True, **reporting
        )

    def check_vocabulary(self, V: int) -> None:
        """Raise ValueError for a token id outside a vocabulary of V tokens, or for more than V allowed
        ids."""
        names = "stop_token_ids", "allowed_token_ids", "trace_decode_token_ids"
        lists = {name: getattr(self, name) for name in names}
        for name, ids in {**lists, "logit_bias": self.logit_bias}.items():
            for token in (min(ids), max(ids)) if ids else ():
                require_allowed(0 <= token < V, name, token, f"the vocabulary's ids are 0..{V - 1}")
        ids = self.allowed_token_ids or ()
        require_allowed(
            len(ids) <= V, "allowed_token_ids", ids, f"at most {V} ids, as many as the vocabulary has"
        )

    def check_logprobs(self, max_logprobs: int, V: int) -> None:
        """Raise ValueError for more log-probabilities than an engine with `max_logprobs` = `max_logprobs`
        reports, or than a vocabulary of V tokens has."""
        num_reported = max(V, MAX_LOGPROBS)  # a step reports at least this many
        for name, wanted in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if wanted is None or (wanted == max_logprobs == ALL_LOGPROBS):
                continue
            reported = f"this engine reports max_logprobs={max_logprobs}; start it with more, or -1 for all"
            require_allowed(
                max_logprobs == ALL_LOGPROBS or 0 <= wanted <= max_logprobs, name, wanted, reported
            )
            require_allowed(0 <= wanted <= num_reported, name, wanted, f"the vocabulary has {V} tokens")


FIELD_TYPES = get_type_hints(SamplingParams)
del FIELD_TYPES["_"]


@dataclass
class BeamSearchParams:
    """Parameters of a search for the continuations of the highest log-probability; names and defaults are
    vLLM's.

    Construction raises ValueError for a value that is not allowed, TypeError for a value of another type.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self):
        for name, kind in get_type_hints(type(self)).items():
            setattr(self, name, convert_field(name, getattr(self, name), kind))
        require_allowed(1 <= self.beam_width <= MAX_N, "beam_width", self.beam_width, f"1 to {MAX_N}")
        require_allowed(self.max_tokens >= 1, "max_tokens", self.max_tokens, "1 or more")
        hot = f"0 to {MAX_TEMPERATURE:g}"
        require_allowed(0 <= self.temperature <= MAX_TEMPERATURE, "temperature", self.temperature, hot)
        require_allowed(
            math.isfinite(self.length_penalty), "length_penalty", self.length_penalty, "a finite number"
        )


def check_field_rules(p: SamplingParams) -> None:
    """Check the rules between fields. Raises ValueError."""
    max_tokens = math.inf if p.max_tokens is None else p.max_tokens
    require_allowed(
        p.min_tokens <= max_tokens, "min_tokens", p.min_tokens, f"0 to max_tokens ({p.max_tokens})"
    )
    require_allowed(
        p.n == 1 or not p.greedy, "n", p.n, "1 with temperature 0, where all completions would be equal"
    )
    require_allowed(
        p.detokenize or not p.stop, "stop", p.stop, "with detokenize=False there is no text to look for it"
    )
    seeds, allowed = p.seed, f"one seed, or a list of as many as n={p.n}"
    require_allowed(not isinstance(seeds, Sequence) or len(seeds) == p.n, "seed", seeds, allowed)
    trace, name = p.trace_decode_token_ids, "trace_decode_token_ids"
    require_allowed(trace is None or p.n == 1, name, trace, "only with n=1: all completions would be equal")
    for other_name in ("structured_outputs", "bad_words") if trace is not None else ():
        require_allowed(getattr(p, other_name) is None, name, trace, f"{other_name} has no effect on it")


def completion_seeds(seed: int | Sequence[int], n: int) -> list[int]:
    """Return the 32-bit seed of each of n completions, from a seed for each or from one for all."""
    if isinstance(seed, Sequence):
        return list(map(fold_seed, seed))
    return [fold_seed(seed, i) for i in range(n)]


def fold_seed(seed: int, sample: int = 0) -> int:
    """Return the 32-bit seed that the device draws from. A seed of 0..2**32-1 is unchanged. The upper half of
    a longer seed is mixed in (Fibonacci hashing). Completion i of n draws from seed + i, as in vLLM."""
    upper, lower = divmod((seed + sample) % 2**64, 2**32)
    return lower ^ (upper * 0x9E3779B1) % 2**32


def tokenize_bad_words(words: Sequence[str], encode: Callable[[str], Sequence[int]]) -> list[list[int]]:
    """Return every banned word as token ids, at the start of a text and after a space.

    `encode` adds no special tokens. The form after a space counts if it has the same length and another first
    token. As in vLLM, a longer form is left out: it is the space's own token and the plain form.
    """
    sequences = []
    for word in words:
        bare, spaced = list(encode(word.lstrip())), list(encode(" " + word.lstrip()))
        sequences.append(bare)
        if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
            sequences.append(spaced)
    return [sequence for sequence in sequences if sequence]


class KnobInputs(NamedTuple):
    """Inputs of a request's row on the device."""

    params: SamplingParams
    seed: int  # 0..2**32-1 (`fold_seed`)
    stop_ids: Sequence[int]  # the model's end ids (unless ignored) and the request's own
    prompt_len: int  # position of the first generated token
    bad_words: Sequence[Sequence[int]]  # tokenized; those of one token act through `dense_bias`
    processors: Sequence[LogitsProcessor]


def knob_field(dtype: Any, value: Callable[[KnobInputs], Any]) -> Any:
    """Declare a field of `Knobs`, with the function that computes its value for a request."""
    return field(metadata={"value": lambda a: np.asarray(value(a), dtype)[()]})


@pytree
class Knobs:
    """Parameters of one request on the device; in `SamplingState` every leaf has a row for each slot."""

    # 0: greedy
    temperature: Any = knob_field(np.float32, lambda a: 0 if a.params.greedy else a.params.temperature)
    top_k: Any = knob_field(np.int32, lambda a: min(max(a.params.top_k, 0), MAX_INT32))  # 0: off
    top_p: Any = knob_field(np.float32, lambda a: a.params.top_p)
    min_p: Any = knob_field(np.float32, lambda a: a.params.min_p)
    presence_penalty: Any = knob_field(np.float32, lambda a: a.params.presence_penalty)
    frequency_penalty: Any = knob_field(np.float32, lambda a: a.params.frequency_penalty)
    repetition_penalty: Any = knob_field(np.float32, lambda a: a.params.repetition_penalty)
    seed: Any = knob_field(np.uint32, lambda a: a.seed)
    # stop ids are masked at positions below it
    min_position: Any = knob_field(np.int32, lambda a: min(a.prompt_len + a.params.min_tokens, MAX_INT32))
    # alternatives per token, NO_LOGPROBS or TRACE_LOGPROBS
    logprobs: Any = knob_field(np.int32, lambda a: logprobs_code(a.params))
    # True if the slot's row of `bias` is read
    has_bias: Any = knob_field(np.bool_, lambda a: needs_bias(a.params, a.bad_words))
    # True if the slot's rows of `allowed` are read
    is_constrained: Any = knob_field(np.bool_, lambda a: needs_token_masks(a.params))
    # [MAX_STOP_IDS], padded with NO_TOKEN
    stop_ids: Any = knob_field(np.int32, lambda a: stop_id_row(a.stop_ids))
    # [MAX_BAD_WORDS,MAX_BAD_WORD_LENGTH], padded with NO_TOKEN on the left
    bad_words: Any = knob_field(np.int32, lambda a: bad_word_rows(a.bad_words))
    # ProcessorKnobs of each logits processor
    custom: Any = field(
        metadata={"value": lambda a: processor_knobs(a.processors, a.params.extra_args or {})}
    )


def request_knobs(
    params: SamplingParams,
    *,
    seed: int,
    stop_ids: Sequence[int],
    prompt_len: int,
    bad_words: Sequence[Sequence[int]] = (),
    processors: Sequence[LogitsProcessor] = (),
) -> Knobs:
    """Return the knobs of one request, in numpy. Raises ValueError above the limits of this file."""
    inputs = KnobInputs(params, seed, stop_ids, prompt_len, bad_words, processors)
    return Knobs(**{knob.name: knob.metadata["value"](inputs) for knob in fields(Knobs)})


def logprobs_code(params: SamplingParams) -> int:
    """Return the knob of a request's log-probabilities: alternatives per token, or a negative code."""
    if params.logprobs is None:
        return NO_LOGPROBS
    return max(params.logprobs, 0) if params.trace_decode_token_ids is None else TRACE_LOGPROBS


def needs_bias(params: SamplingParams, bad_words: Sequence[Sequence[int]]) -> bool:
    """True if a request needs a row of biases: a logit bias, allowed ids, or a bad word of one token."""
    single = any(len(sequence) == 1 for sequence in bad_words)
    return bool(params.logit_bias) or params.allowed_token_ids is not None or single


def needs_token_masks(params: SamplingParams) -> bool:
    """True if a request needs token masks: a grammar, or a trace that it replays."""
    return params.structured_outputs is not None or params.trace_decode_token_ids is not None


def stop_id_row(stop_ids: Sequence[int]) -> Int32[np.ndarray, " ids"]:
    """Return the distinct stop ids, padded with NO_TOKEN to MAX_STOP_IDS. Raises ValueError for more."""
    ids = list(dict.fromkeys(stop_ids))
    require_allowed(
        len(ids) <= MAX_STOP_IDS,
        "stop_token_ids",
        ids,
        f"at most {MAX_STOP_IDS} ids, the model's own included",
    )
    return np.array(ids + [NO_TOKEN] * (MAX_STOP_IDS - len(ids)), np.int32)


def bad_word_rows(bad_words: Sequence[Sequence[int]]) -> Int32[np.ndarray, "words length"]:
    """Return the bad words of several tokens, each padded on the left. Raises ValueError above the limits."""
    long = [list(sequence) for sequence in bad_words if len(sequence) > 1]
    require_allowed(
        len(long) <= MAX_BAD_WORDS, "bad_words", long, f"at most {MAX_BAD_WORDS} sequences of several tokens"
    )
    rows = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH), NO_TOKEN, np.int32)
    for row, sequence in zip(rows, long, strict=False):
        require_allowed(len(sequence) <= len(row), "bad_words", sequence, f"at most {len(row)} tokens a word")
        row[-len(sequence) :] = sequence
    return rows
