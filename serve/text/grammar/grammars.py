"""Grammars that requests ask for, each compiled once, in threads and processes of their own."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from ....sampling.structured import StructuredOutputsParams
from ..tokenizer.tokenizer import Tokenizer
from .compiled import LARGE, LIMITS, Compiled, GrammarCache, compiled, source
from .constraint import NOTHING, Constraint, readable
from .gauge import CompileCost, CompileLimits, CompileProbe, ProbeStopped
from .vocabulary import TokenBytes, panics_as_errors, vocabulary

if TYPE_CHECKING:
    import llguidance

BOUNDS = CompileLimits(2.0, 128 << 20)
SLICE = 0.05  # processor seconds; grammars that take longer go to the slow lane
NICE = 10  # niceness of the slow lane's process
TRIES = 3  # processes that may be lost to one grammar
POLL = 0.05  # seconds between two looks whether there is memory for a large grammar


@dataclass(eq=False)
class CompileJob:
    """A grammar that requests wait for. An `urgent` one does not wait for memory of others."""

    grammars: "Grammars"
    text: str
    future: Future[Compiled] = field(default_factory=Future)
    waiting: int = 0
    urgent: bool = False
    tries: int = 0

    def __post_init__(self):
        self.future.set_running_or_notify_cancel()  # a request that leaves does not cancel it for others

    def leave(self) -> None:
        """Stop waiting, as one request. A grammar that no request waits for is not compiled."""
        self.grammars.leave(self)

    def fail(self) -> None:
        """Fail: no lane compiles it any more."""
        with suppress(InvalidStateError):
            self.future.set_exception(RuntimeError("the engine is closed"))


class Lane:
    """A thread that compiles grammars, each after a trial in a child process; and its current job."""

    def __init__(self, bounds: CompileLimits):
        self.bounds, self.gauge = bounds, CompileProbe(LIMITS)
        self.pool = ThreadPoolExecutor(1, "duetto-grammars")
        self.job: CompileJob | None = None

    def submit(self, run: Callable[["Lane", CompileJob], None], job: CompileJob) -> None:
        try:
            self.pool.submit(run, self, job)
        except RuntimeError:
            job.fail()

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.gauge.stop()


class Grammars:
    """Compiles grammars over a model's V tokens. May be called from any thread; the first request also builds
    the vocabulary, which takes a tenth of a second for 50,000 tokens. A child process compiles each grammar
    first, and is killed at its `bounds`. A grammar that passes is compiled again here, in at most as much
    time and memory. Grammars that take longer than a `SLICE` go to a slow lane, so that quick ones do not
    wait behind them; after each of them `give_back` returns memory to the system. `tokenizer` may be the
    reason why there is none."""

    def __init__(
        self,
        tokenizer: Tokenizer | str,
        V: int,
        ends: Sequence[int],
        bounds: CompileLimits = BOUNDS,
        give_back: Callable[[], None] = lambda: None,
    ):
        self._tokenizer, self._V, self._ends, self._bounds = tokenizer, V, tuple(ends), bounds
        self._give_back = give_back
        self._lock = threading.Lock()
        self._kept = GrammarCache(self._bounds.bytes)
        self._jobs: dict[str, CompileJob] = {}
        self._quick = Lane(replace(self._bounds, seconds=min(SLICE, self._bounds.seconds)))
        self._slow = Lane(replace(self._bounds, nice=NICE))

    def constraint(self, params: StructuredOutputsParams, start: int) -> Constraint:
        """Return the constraint of an output that begins at position `start`. Raises ValueError with
        llguidance's reason if its grammar cannot be compiled, or without llguidance."""
        wanted = self.wanted(params, urgent=True)
        try:
            found = wanted.future.result()
        finally:
            wanted.leave()
        with panics_as_errors():
            return Constraint(found.matcher.deep_copy(), frozenset(self._ends), found.first, start, found)

    def wanted(self, params: StructuredOutputsParams, urgent: bool = False) -> CompileJob:
        """Begin to compile a grammar; the job is dropped when all its requests have left. Raises ValueError
        for invalid JSON or text, and for a model without what grammars need."""
        self._check()
        with panics_as_errors(), self._lock:
            _ = self._vocabulary  # before the library is used otherwise
        text = source(params)  # outside the lock, for which event loops wait
        with self._lock:
            job = self._jobs.get(text) or self._begin(text)
            job.waiting += 1
            job.urgent |= urgent
        return job

    def leave(self, job: CompileJob) -> None:
        """Drop one request from a job; the last one stops it."""
        with self._lock:
            job.waiting -= 1
            lanes = () if job.waiting else (self._quick, self._slow)
            left = [lane.gauge for lane in lanes if lane.job is job]
        for gauge in left:
            gauge.stop()

    def close(self) -> None:
        """End both processes, and fail all waiting jobs."""
        for lane in (self._quick, self._slow):
            lane.close()
        with self._lock:
            left = [*self._jobs.values()]
        for job in left:
            job.fail()

    def _check(self) -> None:
        lacking = self._tokenizer if isinstance(self._tokenizer, str) else ""
        if lacking or not self._ends:
            lacking = lacking or "the model has no end-of-sequence token"
            raise ValueError(f"structured_outputs is not allowed: {lacking}")

    @cached_property
    def _words(self) -> TokenBytes:
        assert not isinstance(self._tokenizer, str)
        return TokenBytes(self._tokenizer, self._V, self._ends)

    @cached_property
    def _vocabulary(self) -> "llguidance.LLTokenizer":
        return vocabulary(self._words)

    def _begin(self, text: str) -> CompileJob:
        job = CompileJob(self, text)
        if (found := self._kept.get(text)) is not None:
            job.future.set_result(found)
        else:
            self._jobs[text] = job
            self._quick.submit(self._run, job)
        return job

    def _run(self, lane: Lane, job: CompileJob) -> None:
        with self._lock:
            if not job.waiting:
                self._jobs.pop(job.text, None)
                return
            lane.job = job
        with suppress(InvalidStateError):  # closed meanwhile
            try:
                found = self._made(lane, job)
                self._end(job, found)
                job.future.set_result(found)
            except ProbeStopped:
                self._slow.submit(self._run, job)
            except BaseException as error:  # noqa: BLE001 - whatever it is, requests wait for it
                self._end(job)
                job.future.set_exception(error)

    def _end(self, job: CompileJob, found: Compiled | None = None) -> None:
        with self._lock:
            self._jobs.pop(job.text, None)
            if found is not None:
                self._kept.add(job.text, found)

    def _made(self, lane: Lane, job: CompileJob) -> Compiled:
        """Compile a grammar in a lane. Raises ValueError if it is rejected, ProbeStopped if it belongs in the
        slow lane."""
        cost = self._cost(lane, job)
        if lane is self._quick and (cost.is_too_long or cost.bytes > LARGE):
            raise ProbeStopped
        check(cost, self._bounds)
        if cost.bytes > LARGE:
            self._await_room(job, cost.bytes)
        try:
            with panics_as_errors():
                return compiled(self._vocabulary, cost.lark or job.text, cost.bytes)
        finally:
            if lane is self._slow:
                self._give_back()

    def _cost(self, lane: Lane, job: CompileJob) -> CompileCost:
        job.tries += 1
        try:
            return lane.gauge.cost(self._words, job.text, lane.bounds)
        except ProbeStopped:
            if job.tries > TRIES:
                raise RuntimeError("the process that compiles grammars ended again and again") from None
            raise
        finally:
            with self._lock:
                lane.job = None

    def _await_room(self, job: CompileJob, bytes: int) -> None:
        """Wait until other grammars leave memory for a large one."""
        while True:
            with self._lock:
                self._kept.leave_room(bytes)
                if job.urgent or not job.waiting or self._kept.alive + bytes <= 2 * self._bounds.bytes:
                    return
            time.sleep(POLL)


def check(cost: CompileCost, bounds: CompileLimits) -> None:
    """Raise ValueError for a grammar beyond its bounds, or that llguidance rejects."""
    reason = readable(cost.error) if cost.error else ""
    if cost.is_too_long:
        reason = f"compiling it takes more than the {bounds.seconds:g} s that max_grammar_seconds allows"
    elif cost.is_too_large or cost.bytes > bounds.bytes:
        reason = f"compiling it takes more than the {bounds.bytes >> 20} MiB that max_grammar_mib allows"
    elif cost.signal:
        reason = f"llguidance crashes on it (signal {cost.signal}): it is nested too deeply"
    if reason or cost.error:
        raise ValueError(f"structured_outputs is not allowed: {reason or NOTHING}")
