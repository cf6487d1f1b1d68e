"""A request on its way through the engine: one sequence of tokens, its pages, and when it has to stop."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ....checkpoints.adapters.adapter import Adapter
from ....model.pooling import Pooler
from ....model.transformer import Observed
from ....model.weights.adapted import NO_ADAPTER
from ....sampling.params import NO_TOKEN, SamplingParams
from ...kv.offload.mover import PageFetch
from ...text.grammar.constraint import Constraint
from ...text.grammar.trace import TraceConstraint
from ...text.outputs import Pass, RequestMetrics
from ...text.tokenizer.detokenizer import Detokenizer


@dataclass
class ScoreLog:
    """Log-probabilities as the device returned them: one entry a token."""

    logprob: list[float] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)
    top_ids: list[np.ndarray] = field(default_factory=list)
    top_logprobs: list[np.ndarray] = field(default_factory=list)

    def extend(
        self, logprob: np.ndarray, rank: np.ndarray, top_ids: np.ndarray, top_logprobs: np.ndarray
    ) -> None:
        """Append the scores of several tokens, the first axis of the arrays."""
        self.logprob += np.asarray(logprob).tolist()
        self.rank += np.asarray(rank).tolist()
        self.top_ids += list(top_ids)
        self.top_logprobs += list(top_logprobs)


@dataclass
class TokenRecord:
    """Inner values of a request's tokens in order, as steps observed them: experts [layers,A] and hidden
    states [layers,D] of each token that was computed."""

    experts: list[np.ndarray] = field(default_factory=list)
    hidden: list[np.ndarray] = field(default_factory=list)

    def take(self, observed: Observed, row: int, start: int, count: int) -> None:
        """Take a step's row of `count` tokens from position `start` on; they replace what was there."""
        for found, new in ((self.experts, observed.experts), (self.hidden, observed.hidden)):
            if new is not None:
                found[start:] = np.asarray(new)[row, :count]


def unknown_score(top: int) -> tuple[np.ndarray, ...]:
    """Return a score that stands for one that is not known, without alternatives."""
    most = max(top, 0)  # top may be -1, for all that an engine reports
    return np.zeros(1), np.zeros(1, np.int32), np.full((1, most), NO_TOKEN), np.zeros((1, most))


@dataclass
class RequestTimes:
    """Times of a request in monotonic seconds, 0 until they are known."""

    arrival: float = field(default_factory=time.monotonic)
    wall: float = field(default_factory=time.time)  # arrival by the wall clock
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    seen: float = 0.0  # time of the latest token that the engine's stats have observed
    finish: float = 0.0
    now: Callable[[], float] = time.monotonic  # returns the time


@dataclass(eq=False)
class Request:
    """Bookkeeping of one sequence on the host. `computed` counts the tokens whose keys are in the pages, or
    on their way there."""

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    end: int  # tokens it may have at most, prompt included
    stop_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    text: Detokenizer | None = None
    priority: int = 0
    arrival: int = 0
    score_from: int = 1  # first position of the prompt that is scored
    pool: Pooler | None = None  # for an embedding of the prompt
    record: TokenRecord | None = None  # of what steps observe
    patience: float = 0.0  # seconds that its admission may be delayed to share a prefill
    source: str | None = None  # address of the prefill engine that computes its prompt
    constraint: Constraint | TraceConstraint | None = None  # limits on the next token
    adapter: Adapter | None = None

    tokens: list[int] = field(default_factory=list)
    known: int = 0  # generated tokens that came with it
    weights: list[tuple[int, int]] = field(
        default_factory=list
    )  # first generated token, and version of the weights
    computed: int = 0
    pages: list[list[int]] = field(default_factory=list)  # for each window
    names: list[bytes] = field(default_factory=list)
    marks: tuple[int, ...] = ()  # pages behind which recurrent states are kept
    slot: int | None = None
    place: int = NO_ADAPTER  # of its adapter, while it has a slot
    ticket: PageFetch | None = None  # for pages that are fetched from a tier
    reach: int = 0  # tokens up to which it can stay in its slot
    cached: int = 0
    preemptions: int = 0
    scores: ScoreLog = field(default_factory=ScoreLog)
    prompt_scores: ScoreLog = field(default_factory=ScoreLog)  # of its tokens from `score_from` on
    passes: list[Pass] = field(default_factory=list)  # kept with speculation only
    clock: RequestTimes = field(default_factory=RequestTimes)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def __post_init__(self):
        self.tokens = list(self.prompt)

    @property
    def rank(self) -> tuple[int, int]:
        """Key of every queue: lower priority values first, then first come, first served."""
        return self.priority, self.arrival

    def __lt__(self, other: "Request") -> bool:
        """An order for a heap of requests of equal rank: any one will do."""
        return id(self) < id(other)

    @property
    def is_whole(self) -> bool:
        """True if all of its tokens have to be computed, and no page is taken from the cache."""
        return self.record is not None or (self.pool is not None and self.pool.is_whole)

    @property
    def salt(self) -> bytes:
        """Part of the names of its pages besides tokens: its adapter's digest."""
        return b"" if self.adapter is None else self.adapter.digest

    @property
    def scored(self) -> bool:
        return self.params.prompt_logprobs is not None

    @property
    def unscored(self) -> int:
        """First position of a scored prompt whose score is not known yet."""
        return self.score_from + len(self.prompt_scores.logprob)

    @property
    def outputs(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def obey(self) -> None:
        """Pass new tokens to the grammar; abort a request that it cannot bring to an end."""
        if self.constraint is not None and not self.finished:
            self.constraint.follow(self.tokens)
            if self.constraint.failure is not None:
                self.finish("abort", f"structured_outputs: {self.constraint.failure}")

    def append(self, token: int) -> None:
        """Append a sampled token, and finish if it or the text so far ends the request."""
        self.tokens.append(token)
        self.clock.last_token = self.clock.now()
        self.clock.first_token = self.clock.first_token or self.clock.last_token
        self._stop_at(token)
        if not self.finished and len(self.tokens) >= self.end:
            self.finish("length")

    def resume(self, tokens: Sequence[int]) -> None:
        """Append tokens that another engine has sampled, whose scores are not known here. Raises ValueError
        for tokens behind the request's end."""
        for token in tokens:
            if self.finished:
                raise ValueError(
                    f"{len(tokens)} tokens are known, but the request ends after {self.generated}"
                )
            self.append(token)
            if self.params.logprobs is not None:
                self.scores.extend(*unknown_score(self.params.logprobs))
        self.known, self.clock = self.generated, RequestTimes()

    def made_by(self, version: int) -> None:
        """Record that tokens are of this version of the weights from now on; before the first token, scores
        too."""
        if self.weights and self.weights[-1][0] == self.generated:
            self.weights.pop()
        self.weights.append((self.generated, version))
        if self.generated == self.known:
            self.prompt_scores = ScoreLog()

    def _stop_at(self, token: int) -> None:
        below_min = self.generated <= self.params.min_tokens
        is_stop = token in self.stop_ids
        if self.text is not None and (not is_stop or self.params.include_stop_str_in_output):
            self.text.push([token], below_min=int(below_min))
            if self.text.stop_hit is not None:
                self.finish("stop", self.text.stop_hit)
        if is_stop and not self.finished:
            self.finish("stop", None if token in self.eos_ids else token)

    def finish(self, reason: str, stop: int | str | None = None) -> None:
        assert not self.finished, f"request {self.id} finishes twice"
        self.finish_reason, self.stop_reason = reason, stop
        if len(self.weights) > 1 and self.weights[-1][0] == self.generated:  # which have made none
            self.weights.pop()
        self.clock.finish = self.clock.now()
        if self.text is not None:
            self.text.finish()

    def metrics(self) -> RequestMetrics:
        c, generated = self.clock, self.generated
        admitted, first, finish = c.admitted or c.finish, c.first_token or c.finish, c.finish
        return RequestMetrics(
            arrival=c.arrival,
            queued=admitted - c.arrival,
            ttft=first - c.arrival,
            tpot=(finish - first) / (generated - 1) if generated > 1 else 0.0,
            e2e=finish - c.arrival,
            preemptions=self.preemptions,
            num_generation_tokens=generated,
            arrival_time=c.wall,
            last_token_ts=c.last_token,
        )
