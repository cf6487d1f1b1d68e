"""A request on its way through the engine: one sequence of tokens, its pages, and when it has to stop."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ....checkpoints.adapters.adapter import Adapter
from ....model.embeddings.prompt import EmbeddingSpan
from ....model.pooling import Pooler
from ....model.transformer import Observed
from ....model.weights.lora import NO_ADAPTER
from ....sampling.params import NO_TOKEN, SamplingParams
from ...kv.offload.mover import PageFetch
from ...text.grammar.constraint import Constraint
from ...text.grammar.trace_constraint import TraceConstraint
from ...text.outputs import Pass, RequestMetrics
from ...text.tokenizer.detokenizer import Detokenizer


@dataclass
class ScoreLog:
    """Log-probabilities as the device returned them: one entry a token. `has_nan`: one of them is NaN."""

    logprob: list[float] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    top_ids: list[np.ndarray] = field(default_factory=list)
    top_logprobs: list[np.ndarray] = field(default_factory=list)
    has_nan: bool = False

    def extend(
        self, logprob: np.ndarray, rank: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray
    ) -> None:
        """Append the scores of several tokens, the first axis of the arrays."""
        self.logprob += (new := np.asarray(logprob).tolist())
        self.has_nan = self.has_nan or any(map(math.isnan, new))
        self.rank += np.asarray(rank).tolist()
        self.top_ids += list(top_ids)
        self.top_logprobs += list(top_logprobs)


@dataclass
class TokenRecord:
    """Values inside the model for each computed token of a request, in order.

    experts: [layers,A] of each token.
    hidden: hidden states [layers,D] of each token.
    """

    experts: list[np.ndarray] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)

    def store_row(self, observed: Observed, row: int, start: int, count: int) -> None:
        """Store a step's row of `count` tokens at position `start`, in place of all values from there on."""
        for stored, new in ((self.experts, observed.experts), (self.hidden, observed.hidden)):
            if new is not None:
                stored[start:] = np.asarray(new)[row, :count]


def unknown_score(num_top: int) -> tuple[np.ndarray, ...]:
    """Return the score of one token whose score is unknown, with `num_top` empty alternatives."""
    count = max(num_top, 0)  # -1 asks for all alternatives that an engine reports
    return np.zeros(1), np.zeros(1, np.int32), np.full((1, count), NO_TOKEN), np.zeros((1, count))


NAN_LOGITS = "the model computed NaN or infinity: its dtype is too narrow, or weights or memory are damaged"


@dataclass
class RequestTimes:
    """Times of a request in monotonic seconds, 0 until they are known."""

    arrival: float = field(default_factory=time.monotonic)
    wall_arrival: float = field(default_factory=time.time)  # arrival by the wall clock
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    last_observed_token: float = 0.0  # time of the latest token that the engine's stats have observed
    finish: float = 0.0
    now: Callable[[], float] = time.monotonic  # returns the time


@dataclass(eq=False)
class Request:
    """Bookkeeping of one sequence on the host. `num_computed_tokens` counts the tokens whose keys are in the
    pages, or on their way there."""

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    end: int  # tokens it may have at most, prompt included
    stop_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    detokenizer: Detokenizer | None = None
    priority: int = 0
    arrival: int = 0
    score_from: int = 1  # first position of the prompt that is scored
    pooler: Pooler | None = None  # for an embedding of the prompt
    token_record: TokenRecord | None = None  # values that steps observe
    max_prefill_delay: float = 0.0  # seconds that admission may be delayed to share a prefill
    prefill_address: str | None = None  # address of the prefill engine that computes its prompt
    constraint: Constraint | TraceConstraint | None = None  # limits on the next token
    adapter: Adapter | None = None
    cache_salt: bytes = b""  # digest; requests share pages only with an equal one
    spans: tuple[EmbeddingSpan, ...] = ()  # of the prompt, in order: their token ids are placeholders

    tokens: list[int] = field(default_factory=list)
    num_resumed_tokens: int = 0  # generated tokens that another engine sampled
    # Index of a generated token, and the version of the weights from there on.
    weights_versions: list[tuple[int, int]] = field(default_factory=list)
    num_computed_tokens: int = 0
    pages: list[list[int]] = field(default_factory=list)  # for each window
    page_hashes: list[bytes] = field(default_factory=list)
    state_checkpoints: tuple[int, ...] = ()  # pages after which recurrent states are kept
    slot: int | None = None
    lora_slot: int = NO_ADAPTER  # LoRA slot of its adapter, while it has a slot
    page_fetch: PageFetch | None = None  # for pages that are fetched from a tier
    slot_end: int = 0  # tokens with which it leaves its slot at the latest
    num_cached_tokens: int = 0
    preemptions: int = 0
    scores: ScoreLog = field(default_factory=ScoreLog)
    prompt_scores: ScoreLog = field(default_factory=ScoreLog)  # from position `score_from` on
    passes: list[Pass] = field(default_factory=list)  # kept with speculation only
    times: RequestTimes = field(default_factory=RequestTimes)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __post_init__(self):
        self.tokens = list(self.prompt)

    @property
    def queue_key(self) -> tuple[int, int]:
        """Key of every queue: lower priority values first, then first come, first served."""
        return self.priority, self.arrival

    def __lt__(self, other: "Request") -> bool:
        """An order for a heap of requests of equal rank: any one will do."""
        return id(self) < id(other)

    @property
    def must_compute_all(self) -> bool:
        """True if all tokens have to be computed: no page is taken from the prefix cache."""
        return self.token_record is not None or (self.pooler is not None and self.pooler.needs_all_tokens)

    @property
    def page_hash_salt(self) -> bytes:
        """Part of page hashes besides tokens: the digests of the adapter and of the cache salt."""
        return self.cache_salt if self.adapter is None else self.adapter.digest + self.cache_salt

    @property
    def needs_prompt_scores(self) -> bool:
        return self.params.prompt_logprobs is not None

    @property
    def first_unscored(self) -> int:
        """First position of a scored prompt whose score is not known yet."""
        return self.score_from + len(self.prompt_scores.logprob)

    @property
    def output_tokens(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def has_failed(self) -> bool:
        """True if the model computed NaN for the request, which ended by that."""
        return self.finish_reason == "error"

    @property
    def has_nan(self) -> bool:
        """True if a score of the prompt, or a hidden state that is pooled, is NaN."""
        return self.prompt_scores.has_nan or (self.pooler is not None and self.pooler.has_nan)

    def fail_with_nan(self) -> None:
        """End the request with an error: the model computed NaN for it."""
        self.finish("error", NAN_LOGITS)

    def advance_grammar(self) -> None:
        """Pass new tokens to the grammar. Abort the request if the grammar fails."""
        if self.constraint is not None and not self.is_finished:
            self.constraint.advance(self.tokens)
            if self.constraint.failure is not None:
                self.finish("abort", f"structured_outputs: {self.constraint.failure}")

    def append(self, token: int) -> None:
        """Append a sampled token, and finish if it or the text so far ends the request."""
        self.tokens.append(token)
        self.times.last_token = self.times.now()
        self.times.first_token = self.times.first_token or self.times.last_token
        self._finish_if_stopped(token)
        if not self.is_finished and len(self.tokens) >= self.end:
            self.finish("length")

    def append_resumed_tokens(self, tokens: Sequence[int]) -> None:
        """Append tokens that another engine has sampled, whose scores are not known here. Raises ValueError
        for tokens behind the request's end."""
        for token in tokens:
            if self.is_finished:
                raise ValueError(
                    f"{len(tokens)} tokens are known, but the request ends after {self.num_output_tokens}"
                )
            self.append(token)
            if self.params.logprobs is not None:
                self.scores.extend(*unknown_score(self.params.logprobs))
        self.num_resumed_tokens, self.times = self.num_output_tokens, RequestTimes()

    def record_weights_version(self, version: int) -> None:
        """Record that the next tokens come from this version of the weights.

        Without a token yet, prompt scores are discarded: they are computed again.
        """
        if self.weights_versions and self.weights_versions[-1][0] == self.num_output_tokens:
            self.weights_versions.pop()
        self.weights_versions.append((self.num_output_tokens, version))
        if self.num_output_tokens == self.num_resumed_tokens:
            self.prompt_scores = ScoreLog()

    def _finish_if_stopped(self, token: int) -> None:
        below_min = self.num_output_tokens <= self.params.min_tokens
        is_stop = token in self.stop_ids
        if self.detokenizer is not None and (not is_stop or self.params.include_stop_str_in_output):
            self.detokenizer.push([token], num_below_min=int(below_min))
            if self.detokenizer.stop_hit is not None:
                self.finish("stop", self.detokenizer.stop_hit)
        if is_stop and not self.is_finished:
            self.finish("stop", None if token in self.eos_ids else token)

    def finish(self, reason: str, stop: int | str | None = None) -> None:
        assert not self.is_finished, f"request {self.id} finishes twice"
        self.finish_reason, self.stop_reason = reason, stop
        versions = self.weights_versions
        if len(versions) > 1 and versions[-1][0] == self.num_output_tokens:  # no token came from the last
            self.weights_versions.pop()
        self.times.finish = self.times.now()
        if self.detokenizer is not None:
            self.detokenizer.finish()

    def metrics(self) -> RequestMetrics:
        times, generated = self.times, self.num_output_tokens
        admitted, first, finish = (
            times.admitted or times.finish,
            times.first_token or times.finish,
            times.finish,
        )
        return RequestMetrics(
            arrival=times.arrival,
            queued=admitted - times.arrival,
            ttft=first - times.arrival,
            tpot=(finish - first) / (generated - 1) if generated > 1 else 0.0,
            e2e=finish - times.arrival,
            preemptions=self.preemptions,
            num_generation_tokens=generated,
            arrival_time=times.wall_arrival,
            last_token_ts=times.last_token,
        )
