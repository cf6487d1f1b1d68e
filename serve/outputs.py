"""What a caller gets back; names and meaning are those of vLLM's offline API."""

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Logprob:
    """One token's natural-log probability under the raw logits, and its rank (1 is the most likely)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds of one request: arrival and finish on the monotonic clock, and the spans between.

    `ttft` is arrival to first token, `tpot` the mean time of each further token, `e2e` arrival to finish.
    """

    arrival: float
    queued: float
    ttft: float
    tpot: float
    e2e: float
    preemptions: int = 0


class Pass(NamedTuple):
    """A step of one request: the guesses that it verified, below zero where the device made them, and the tokens that it gave."""

    guesses: tuple[int, ...]
    tokens: int

    @property
    def accepted(self) -> int:
        return min(self.tokens - 1, len(self.guesses))


@dataclass
class CompletionOutput:
    """One of a request's `n` continuations."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None  # "stop", "length" or "abort"
    stop_reason: int | str | None = None
    passes: list[Pass] | None = None  # with speculation, in the order of their tokens

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """A request and its continuations so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class Delta:
    """What a stream adds: text and tokens since the last one; the last of completion `index` has a finish reason."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Score:
    """Teacher-forced natural-log probabilities of a text after the first of its tokens, or of a continuation."""

    token_ids: list[int]
    logprobs: list[float]

    @property
    def total(self) -> float:
        return sum(self.logprobs)


def score_of(result: RequestOutput, start: int) -> Score:
    """The score of a prompt's tokens from position `start` on, of a result with `prompt_logprobs`."""
    entries: list[dict[int, Logprob] | None] = result.prompt_logprobs or []
    ids = result.prompt_token_ids[start:]
    return Score(ids, [entry[t].logprob for t, entry in zip(ids, entries[start:], strict=True) if entry])
