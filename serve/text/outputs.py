"""Results that callers receive, with names and meaning of vLLM's offline API."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32


@dataclass(frozen=True)
class Logprob:
    """A token's natural-log probability under the logits of the engine's `logprobs_mode`, and its rank (1 is
    the most likely)."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times of one request in seconds; spans begin at its arrival.

    arrival: on the monotonic clock
    queued: until its admission
    ttft: until its first token
    tpot: mean time of each further token
    e2e: until its end

    The other names are those of vLLM's RequestStateStats: `arrival_time` is on the wall clock, `..._ts` on
    the monotonic one; 0 stands for an event that has not happened.
    """

    arrival: float
    queued: float
    ttft: float
    tpot: float
    e2e: float
    preemptions: int = 0
    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    last_token_ts: float = 0.0

    @property
    def queued_ts(self) -> float:
        return self.arrival

    @property
    def scheduled_ts(self) -> float:
        return self.arrival + self.queued

    @property
    def first_token_ts(self) -> float:
        return self.arrival + self.ttft if self.num_generation_tokens else 0.0

    @property
    def first_token_latency(self) -> float:
        return self.ttft if self.num_generation_tokens else 0.0


class Pass(NamedTuple):
    """A step of a request: the draft tokens that it verified, each ON_DEVICE (-1) if the device made it, and
    the number of tokens that it gave."""

    guesses: tuple[int, ...]
    tokens: int

    @property
    def accepted(self) -> int:
        return min(self.tokens - 1, len(self.guesses))


@dataclass
class CompletionOutput:
    """Continuation `index` of a request's `n`; in a stream, what is new of it since the last output.

    The last output of a continuation has the finish reason. Outputs of a stream have no `cumulative_logprob`,
    `passes`, `weights` and observed values. As a string an output is its text.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    # log-probabilities of the tokens, float32 [tokens], as the device computed them; None without `logprobs`
    logprob_array: Any = field(default=None, compare=False, kw_only=True)
    finish_reason: str | None = None  # "stop", "length", "abort" or "error"
    stop_reason: int | str | None = None
    passes: list[Pass] | None = None  # with speculation, in the order of their tokens
    weights: list[tuple[int, int]] | None = None  # (first token, version of the weights) pairs
    text_offsets: list[int] | None = None  # of each token in the text, where OpenAI's answers report them
    # of each token of prompt and continuation but the last: the experts that were chosen, int32 [tokens,
    # layers, A], and hidden states, float32 [tokens, layers, D]
    routed_experts: Any = field(default=None, compare=False)
    hidden_states: Any = field(default=None, compare=False)

    def __str__(self) -> str:
        return self.text

    @property
    def token_array(self) -> Int32[np.ndarray, " tokens"]:
        """Token ids, int32 [tokens]."""
        return np.array(self.token_ids, np.int32)

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
    lora_request: Any = None  # LoRARequest: the adapter that was asked for


@dataclass(frozen=True)
class EmbeddingOutput:
    """The embedding of a text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0


CUT_REASONS = ("abort", "error")  # finish reasons of incomplete outputs


class GenerationError(RuntimeError):
    """The model computed NaN for a request."""

    CODE = "nan_logits"  # for programs


def require_complete(what: str, results: Iterable[RequestOutput]) -> None:
    """Raise RuntimeError if a request was aborted whose result is needed, GenerationError if it failed."""
    for result in results:
        require_finite_logits(result)
        if any(completion.finish_reason == "abort" for completion in result.outputs):
            raise RuntimeError(f"{what}: request {result.request_id} was aborted")


def require_finite_logits(request_output: RequestOutput) -> None:
    """Raise GenerationError if the model computed NaN for one of a request's outputs."""
    for completion in request_output.outputs:
        if completion.finish_reason == "error":
            raise GenerationError(str(completion.stop_reason))
