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
from ...host.streams import warn_once
from ...runtime.compiled.program_table import WARMUP_THREAD_PREFIX
from ...runtime.compiled.shapes import PHASES, Shape
from ..core.request import Request
from ..core.scheduler_output import RowResult
from .distributions import Distributions
from .host_parts import HostParts

MAX_SPANS = 256  # latest times kept for each shape
MEDIAN_PERIOD_CALLS = 16  # calls of a shape after which its median is computed anew
MAX_SAMPLE_NUMBERS = 10_000  # requests whose times are kept: up to this number percentiles are exact


@dataclass
class Sample:
    """Numbers for percentiles in bounded memory: all of them up to `size`, then a uniform sample (Vitter's
    algorithm R)."""

    size: int = MAX_SAMPLE_NUMBERS
    count: int = 0
    numbers: list[float] = field(default_factory=list)
    random: Random = field(default_factory=lambda: Random(0))

    def add(self, number: float) -> None:
        self.count += 1
        if len(self.numbers) < self.size:
            self.numbers.append(number)
        elif (index := self.random.randrange(self.count)) < self.size:
            self.numbers[index] = number

    def percentiles(self) -> dict[str, float]:
        """Return p50, p90 and p99 by name; empty without any number."""
        return {f"p{p}": float(np.percentile(self.numbers, p)) for p in (50, 90, 99) if self.numbers}


@dataclass
class EngineStats:
    """Counts and times since the engine's start, in bounded memory; called at each event of a step or a
    request."""

    now: Callable[[], float] = time.monotonic
    seconds: float = 0.0  # spent in steps
    computed_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    padded_tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PHASES, 0))
    calls_by_shape: dict[str, int] = field(default_factory=dict)
    cached_by_shape: dict[str, int] = field(default_factory=dict)  # tokens in the cache of all rows, by shape
    call_seconds: dict[str, deque[float]] = field(default_factory=dict)  # of the latest calls, by shape
    medians: dict[str, tuple[int, float]] = field(default_factory=dict)  # by shape: period, and its median
    # Shape, cached tokens and time of the dispatch of each call.
    in_flight_calls: deque[tuple[Shape, int, float]] = field(default_factory=deque)
    on_call: Callable[[Shape, int, float], None] | None = None  # cached tokens and seconds of each call
    last_arrival: float = 0.0  # time of the last results
    phase_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    compiling_seconds: float = 0.0  # part of `seconds` while programs were compiled
    ttft: Sample = field(default_factory=Sample)
    tpot: Sample = field(default_factory=Sample)
    e2e: Sample = field(default_factory=Sample)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    peak_occupancy: float = 0.0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    distributions: Distributions = field(default_factory=Distributions)
    host_parts: HostParts = field(default_factory=HostParts)

    @contextmanager
    def time_step(self, is_compiling: bool = False) -> Iterator[None]:
        """Count the time of the block as seconds in steps, and as beside a compilation if `is_compiling`."""
        begin = self.now()
        try:
            yield
        finally:
            span = self.now() - begin
            self.seconds += span
            self.compiling_seconds += span if is_compiling else 0.0

    def on_dispatch(self, shape: Shape, tokens: int, cached: int, shards: int = 1) -> None:
        """Record the dispatch of a call: its `tokens` without padding, and its rows' tokens in the cache."""
        name = str(shape)
        self.computed_tokens[shape.phase] += tokens
        self.padded_tokens[shape.phase] += shards * shape.area - tokens
        self.calls_by_shape[name] = self.calls_by_shape.get(name, 0) + 1
        self.cached_by_shape[name] = self.cached_by_shape.get(name, 0) + cached
        self.in_flight_calls.append((shape, cached, self.now()))

    def on_result(self) -> None:
        """Record the arrival of the oldest call's results.

        The time of the call begins at its dispatch, or at the last results if these came later.
        """
        (shape, cached, dispatch_time), now = self.in_flight_calls.popleft(), self.now()
        span = now - max(dispatch_time, self.last_arrival)
        self.call_seconds.setdefault(str(shape), deque(maxlen=MAX_SPANS)).append(span)
        self.phase_seconds[shape.phase] += span
        self.last_arrival = now
        if self.on_call is not None:
            self.on_call(shape, cached, span)

    def median_seconds(self, shape: Shape) -> float:
        """Return the median seconds of a shape's latest calls. Raises KeyError before any."""
        return statistics.median(self.call_seconds[str(shape)])

    def on_tokens(self, results: Sequence[RowResult]) -> None:
        """Record the results of a step's rows."""
        self.distributions.observe_step(
            sum(row.scheduled.count * row.is_prompt + len(row.tokens) for row in results)
        )
        for row in results:
            self.generated_tokens += len(row.tokens)
            if row.tokens:
                self.distributions.observe_token_arrival(row.scheduled.request.times)

    def cached_median_seconds(self, shape: Shape) -> float | None:
        """Return the median seconds of a shape's latest calls, or None; computed anew every
        MEDIAN_PERIOD_CALLS calls."""
        name = str(shape)
        spans = self.call_seconds.get(name)
        if not spans:
            return None
        period = self.calls_by_shape[name] // MEDIAN_PERIOD_CALLS
        if self.medians.get(name, (-1, 0.0))[0] != period:
            self.medians[name] = period, statistics.median(spans)
        return self.medians[name][1]

    def prefill_token_seconds(self) -> float | None:
        """Return the mean prefill seconds of a token; None before any."""
        seconds = self.phase_seconds["prefill"]
        return seconds / self.computed_tokens["prefill"] if seconds else None

    def forget_in_flight(self) -> None:
        """Forget the calls in flight, whose results will not arrive."""
        self.in_flight_calls.clear()

    def record_occupancy(self, tables: PageTables) -> None:
        """Record the share of the cache's pages in use, of which the peak is reported."""
        self.peak_occupancy = max(self.peak_occupancy, tables.occupancy)

    def on_admit(self, request: Request) -> None:
        """Record an admission, the first one of each request."""
        if not request.times.admitted:
            request.times.admitted = request.times.now()
            self.prompt_tokens += len(request.prompt)
            self.cached_tokens += request.num_cached_tokens

    def on_finish(self, request: Request) -> None:
        """Record an ended request: its times, and the reason of its end."""
        metrics = request.metrics()
        self.distributions.observe_finish(len(request.prompt), metrics)
        self.ttft.add(metrics.ttft)
        self.e2e.add(metrics.e2e)
        if metrics.tpot > 0:
            self.tpot.add(metrics.tpot)
        reason = request.finish_reason or "unfinished"
        if reason == "error":
            warn_once(
                f"a request has ended with an error, {request.stop_reason}; metrics count others like it"
            )
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
            "prefill_tokens_per_second": self.computed_tokens["prefill"] / seconds,
            "decode_tokens_per_second": self.generated_tokens / seconds,
            "ttft": self.ttft.percentiles(),
            "tpot": self.tpot.percentiles(),
            "e2e": self.e2e.percentiles(),
            **padding_shares([self]),
            "peak_cache_occupancy": self.peak_occupancy,
            "prefix_hit_rate": self.cached_tokens / max(self.prompt_tokens, 1),
            "steps": dict(sorted(self.calls_by_shape.items())),
            "step_seconds": {
                name: statistics.median(spans) for name, spans in sorted(self.call_seconds.items())
            },
            "host_seconds": self.host_parts.report(),
            "finish_reasons": self.finish_reasons,
        }


def padding_shares(all_stats: Sequence[EngineStats]) -> dict[str, float]:
    """Return the share of padding in all that was computed, in prefill and in decode."""

    def share(*phases: str) -> float:
        padded = sum(stats.padded_tokens[phase] for stats in all_stats for phase in phases)
        return padded / max(
            padded + sum(stats.computed_tokens[phase] for stats in all_stats for phase in phases), 1
        )

    return {
        "padding": share(*PHASES),
        "padding_prefill": share("prefill"),
        "padding_decode": share("decode"),
    }


class Compilations:
    """Counts XLA's compilations in this process from now on, by jax's monitoring events, without those of a
    warm-up's threads."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(make_compilation_listener(weakref.ref(self)))


def make_compilation_listener(counter: "weakref.ref[Compilations]") -> Callable[..., None]:
    """Return a listener that does not keep its counter alive: jax never releases a listener."""

    def on_duration(event: str, duration: float, **_: Any) -> None:
        compilations = counter()
        is_foreground = not threading.current_thread().name.startswith(WARMUP_THREAD_PREFIX)
        if compilations is not None and event == Compilations.EVENT and is_foreground:
            compilations.count += 1

    return on_duration
