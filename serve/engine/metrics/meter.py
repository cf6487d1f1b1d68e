"""Counts and times of an engine, as a report."""

import statistics
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

import jax
import numpy as np

from ....kvcache.tables import PageTables
from ...runtime.compiled.compile import THREADS
from ...runtime.compiled.shapes import PHASES, Shape
from ..core.guessing import RowResult
from ..core.request import Request
from .distributions import Distributions

SPANS = 256  # kept of each shape, the latest
FRESH = 16  # steps of a shape after which its median is taken anew
REQUESTS = 10_000  # whose spans are kept: up to this number the percentiles are exact


@dataclass
class Sample:
    """Numbers for percentiles in bounded memory: all of them up to `size`, then a uniform sample (Vitter's
    algorithm R)."""

    size: int = REQUESTS
    count: int = 0
    kept: list[float] = field(default_factory=list)
    random: Random = field(default_factory=lambda: Random(0))

    def add(self, number: float) -> None:
        self.count += 1
        if len(self.kept) < self.size:
            self.kept.append(number)
        elif (place := self.random.randrange(self.count)) < self.size:
            self.kept[place] = number

    def percentiles(self) -> dict[str, float]:
        """p50, p90 and p99; empty without any number."""
        return {f"p{p}": float(np.percentile(self.kept, p)) for p in (50, 90, 99) if self.kept}


@dataclass
class EngineStats:
    """Counts and times since the engine's start, in bounded memory; called at each event of a step or a
    request."""

    now: Callable[[], float] = time.monotonic
    seconds: float = 0.0  # in steps
    computed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    padded: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    steps: dict[str, int] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)  # tokens in the cache of all rows, by shape
    spans: dict[str, deque[float]] = field(default_factory=dict)  # the last seconds, by shape
    medians: dict[str, tuple[int, float]] = field(default_factory=dict)  # as of the last call of `typical`
    flight: deque[tuple[Shape, int, float]] = field(
        default_factory=deque
    )  # dispatched calls, cached tokens and the time
    on_call: Callable[[Shape, int, float], None] | None = None  # cached tokens and seconds of each call
    arrived: float = 0.0  # time of the last results
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    beside_compiling: float = 0.0  # of `seconds`
    ttft: Sample = field(default_factory=Sample)
    tpot: Sample = field(default_factory=Sample)
    e2e: Sample = field(default_factory=Sample)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    occupancy: float = 0.0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    distributions: Distributions = field(default_factory=Distributions)

    @contextmanager
    def working(self, compiling: bool = False) -> Iterator[None]:
        """Count the time spent inside as seconds of work, and as beside a compilation if there is one."""
        begin = self.now()
        try:
            yield
        finally:
            span = self.now() - begin
            self.seconds += span
            self.beside_compiling += span if compiling else 0.0

    def ran(self, shape: Shape, tokens: int, cached: int, shards: int = 1) -> None:
        """Record the dispatch of a call: its real `tokens`, and the tokens in the cache of its rows."""
        name = str(shape)
        self.computed[shape.phase] += tokens
        self.padded[shape.phase] += shards * shape.area - tokens
        self.steps[name] = self.steps.get(name, 0) + 1
        self.cached[name] = self.cached.get(name, 0) + cached
        self.flight.append((shape, cached, self.now()))

    def took(self) -> None:
        """Record the arrival of the oldest call's results. Its time counts from its dispatch or from the
        results before, whichever is later."""
        (shape, cached, begun), now = self.flight.popleft(), self.now()
        span = now - max(begun, self.arrived)
        self.spans.setdefault(str(shape), deque(maxlen=SPANS)).append(span)
        self.phase_seconds[shape.phase] += span
        self.arrived = now
        if self.on_call is not None:
            self.on_call(shape, cached, span)

    def seconds_of(self, shape: Shape) -> float:
        """Return the median of a shape's last times."""
        return statistics.median(self.spans[str(shape)])

    def brought(self, taken: Sequence[RowResult]) -> None:
        """Record the results of a step's rows."""
        self.distributions.step(sum(row.work.count * row.prompt + len(row.tokens) for row in taken))
        for row in taken:
            self.generated_tokens += len(row.tokens)
            if row.tokens:
                self.distributions.arrival(row.work.request.clock)

    def typical(self, shape: Shape) -> float | None:
        """Return the median of a shape's last times, taken anew after every FRESH calls; None if it has none.
        Of a decode and its deferred twin that counts which ran more often."""
        name = max(str(shape), str(shape.deferred), key=lambda name: self.steps.get(name, 0))
        spans = self.spans.get(name)
        if not spans:
            return None
        turn = self.steps[name] // FRESH
        if self.medians.get(name, (-1, 0.0))[0] != turn:
            self.medians[name] = turn, statistics.median(spans)
        return self.medians[name][1]

    def token_seconds(self) -> float | None:
        """Return the mean prefill seconds of a token; None before any."""
        seconds = self.phase_seconds["prefill"]
        return seconds / self.computed["prefill"] if seconds else None

    def lost(self) -> None:
        """Forget the calls in flight, whose results will not arrive."""
        self.flight.clear()

    def planned(self, tables: PageTables) -> None:
        self.occupancy = max(self.occupancy, tables.occupancy)

    def admitted(self, request: Request) -> None:
        """Record an admission, the first one of each request."""
        if not request.clock.admitted:
            request.clock.admitted = request.clock.now()
            self.prompt_tokens += len(request.prompt)
            self.cached_tokens += request.cached

    def finished(self, request: Request) -> None:
        metrics = request.metrics()
        self.distributions.finished(len(request.prompt), metrics)
        self.ttft.add(metrics.ttft)
        self.e2e.add(metrics.e2e)
        if metrics.tpot > 0:
            self.tpot.add(metrics.tpot)
        reason = request.finish_reason or "unfinished"
        self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1

    def report(self) -> dict[str, Any]:
        """Return the run so far as plain numbers: seconds, tokens, tokens per second, shares between 0 and
        1."""
        seconds = max(self.seconds, 1e-9)
        return {
            "requests": self.e2e.count,
            "seconds": self.seconds,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "cached_tokens": self.cached_tokens,
            "prefill_tokens_per_second": self.computed["prefill"] / seconds,
            "decode_tokens_per_second": self.generated_tokens / seconds,
            "ttft": self.ttft.percentiles(),
            "tpot": self.tpot.percentiles(),
            "e2e": self.e2e.percentiles(),
            **paddings([self]),
            "peak_cache_occupancy": self.occupancy,
            "prefix_hit_rate": self.cached_tokens / max(self.prompt_tokens, 1),
            "steps": dict(sorted(self.steps.items())),
            "step_seconds": {name: statistics.median(spans) for name, spans in sorted(self.spans.items())},
            "finish_reasons": self.finish_reasons,
        }


def paddings(meters: Sequence[EngineStats]) -> dict[str, float]:
    """Return the share of padding in all that was computed, in prefill and in decode."""

    def share(*phases: str) -> float:
        padded = sum(meter.padded[phase] for meter in meters for phase in phases)
        return padded / max(padded + sum(meter.computed[phase] for meter in meters for phase in phases), 1)

    return {
        "padding": share(*PHASES),
        "padding_prefill": share("prefill"),
        "padding_decode": share("decode", "deferred"),
    }


class Compilations:
    """Counts XLA's compilations in this process from now on, by jax's monitoring events, without those of a
    warm-up's threads."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(listener(weakref.ref(self)))


def listener(counter: "weakref.ref[Compilations]") -> Callable[..., None]:
    """A listener that does not keep its counter alive, since jax never lets go of listeners."""

    def on_duration(event: str, duration: float, **_: Any) -> None:
        alive = counter()
        waited = not threading.current_thread().name.startswith(THREADS)
        if alive is not None and event == Compilations.EVENT and waited:
            alive.count += 1

    return on_duration
