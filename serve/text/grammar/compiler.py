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
from .compile_probe import CompileCost, CompileLimits, CompileProbe, ProbeStopped
from .constraint import NO_TOKEN_ALLOWED, Constraint, strip_parser_state
from .grammar_cache import (
    LARGE_BYTES,
    PARSER_LIMITS,
    CompiledGrammar,
    GrammarCache,
    compile_grammar,
    grammar_source,
)
from .vocabulary import TokenBytes, make_llguidance_tokenizer, panics_as_errors

if TYPE_CHECKING:
    import llguidance

DEFAULT_LIMITS = CompileLimits(2.0, 128 << 20)
QUICK_SECONDS = 0.05  # processor seconds; grammars that take longer go to the slow lane
SLOW_NICENESS = 10  # niceness of the slow lane's process
MAX_TRIES = 3  # child processes that one grammar may end
POLL_SECONDS = 0.05  # seconds between two checks of the memory for a large grammar


@dataclass(eq=False)
class CompileJob:
    """A grammar that requests wait for.

    text: its source
    future: its result
    num_waiting: number of requests that wait
    is_urgent: whether it may be compiled before other grammars leave memory
    num_tries: number of trials in a child process so far
    """

    grammar_compiler: "GrammarCompiler"
    text: str
    future: Future[CompiledGrammar] = field(default_factory=Future)
    num_waiting: int = 0
    is_urgent: bool = False
    num_tries: int = 0

    def __post_init__(self):
        self.future.set_running_or_notify_cancel()  # a request that leaves does not cancel it for others

    def release(self) -> None:
        """Count one request less. A grammar that no request waits for is not compiled."""
        self.grammar_compiler.release(self)

    def set_closed_error(self) -> None:
        """Set the error of a closed engine as the result."""
        with suppress(InvalidStateError):
            self.future.set_exception(RuntimeError("the engine is closed"))


class CompileLane:
    """A thread that compiles grammars, each after a trial in a child process.

    name: name of its thread
    limits: limits of one grammar
    probe: the child process
    job: the current job
    """

    def __init__(self, name: str, limits: CompileLimits):
        self.limits, self.probe = limits, CompileProbe(PARSER_LIMITS)
        self.pool = ThreadPoolExecutor(1, name)
        self.job: CompileJob | None = None

    def submit(self, run: Callable[["CompileLane", CompileJob], None], job: CompileJob) -> None:
        try:
            self.pool.submit(run, self, job)
        except RuntimeError:
            job.set_closed_error()

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        self.probe.stop()


class GrammarCompiler:
    """Compiles grammars over a model's V tokens. May be called from any thread; the first request also builds
    the vocabulary, which takes a tenth of a second for 50,000 tokens. A child process compiles each grammar
    first, and is killed at its `limits`. A grammar that passes is compiled again here, in at most as much
    time and memory. Grammars that take longer than QUICK_SECONDS go to a slow lane, so that quick ones do
    not wait behind them; after each of them `release_memory` returns memory to the system. If `tokenizer`
    is a string, it is the reason why there is no tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer | str,
        V: int,
        eos_ids: Sequence[int],
        limits: CompileLimits = DEFAULT_LIMITS,
        release_memory: Callable[[], None] = lambda: None,
    ):
        self._tokenizer, self._V, self._eos_ids, self._limits = tokenizer, V, tuple(eos_ids), limits
        self._release_memory = release_memory
        self._lock = threading.Lock()
        self.grammar_cache = GrammarCache(self._limits.bytes)
        self.jobs: dict[str, CompileJob] = {}
        quick_limits = replace(self._limits, seconds=min(QUICK_SECONDS, self._limits.seconds))
        self.quick_lane = CompileLane("duetto-grammar-quick", quick_limits)
        self.slow_lane = CompileLane("duetto-grammar-slow", replace(self._limits, nice=SLOW_NICENESS))

    def compile_constraint(self, params: StructuredOutputsParams, output_start: int) -> Constraint:
        """Return the constraint of an output that begins at position `output_start`. Raises ValueError with
        llguidance's reason if its grammar cannot be compiled, or without llguidance."""
        job = self.submit(params, is_urgent=True)
        try:
            grammar = job.future.result()
        finally:
            job.release()
        with panics_as_errors():
            return Constraint(
                grammar.matcher.deep_copy(),
                frozenset(self._eos_ids),
                grammar.first_mask,
                output_start,
                grammar,
            )

    def submit(self, params: StructuredOutputsParams, is_urgent: bool = False) -> CompileJob:
        """Begin to compile a grammar, and return its job. The job is dropped when all its requests have left.
        Raises ValueError for invalid JSON or text, and for a model without tokenizer or end token."""
        self._check_available()
        with panics_as_errors(), self._lock:
            _ = self._vocabulary  # before the library is used otherwise
        text = grammar_source(params)  # outside the lock, for which event loops wait
        with self._lock:
            job = self.jobs.get(text) or self._start_job(text)
            job.num_waiting += 1
            job.is_urgent |= is_urgent
        return job

    def release(self, job: CompileJob) -> None:
        """Drop one request from a job; the last one stops it."""
        with self._lock:  # until the process is stopped: it would compile another job's grammar next
            job.num_waiting -= 1
            for lane in () if job.num_waiting else (self.quick_lane, self.slow_lane):
                if lane.job is job:
                    lane.probe.stop()

    def close(self) -> None:
        """End both processes, and fail all waiting jobs."""
        for lane in (self.quick_lane, self.slow_lane):
            lane.close()
        with self._lock:
            jobs = [*self.jobs.values()]
        for job in jobs:
            job.set_closed_error()

    def _check_available(self) -> None:
        reason = self._tokenizer if isinstance(self._tokenizer, str) else ""
        if reason or not self._eos_ids:
            reason = reason or "the model has no end-of-sequence token"
            raise ValueError(f"structured_outputs is not allowed: {reason}")

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        assert not isinstance(self._tokenizer, str)
        return TokenBytes(self._tokenizer, self._V, self._eos_ids)

    @cached_property
    def _vocabulary(self) -> "llguidance.LLTokenizer":
        return make_llguidance_tokenizer(self._token_bytes)

    def _start_job(self, text: str) -> CompileJob:
        job = CompileJob(self, text)
        if (grammar := self.grammar_cache.get(text)) is not None:
            job.future.set_result(grammar)
        else:
            self.jobs[text] = job
            self.quick_lane.submit(self._run_job, job)
        return job

    def _run_job(self, lane: CompileLane, job: CompileJob) -> None:
        with self._lock:
            if not job.num_waiting:
                self.jobs.pop(job.text, None)
                return
            lane.job = job
        with suppress(InvalidStateError):  # closed meanwhile
            try:
                grammar = self._compile_in_lane(lane, job)
                self._end_job(job, grammar)
                job.future.set_result(grammar)
            except ProbeStopped:
                self.slow_lane.submit(self._run_job, job)
            except BaseException as error:  # noqa: BLE001 - whatever it is, requests wait for it
                self._end_job(job)
                job.future.set_exception(error)

    def _end_job(self, job: CompileJob, grammar: CompiledGrammar | None = None) -> None:
        with self._lock:
            self.jobs.pop(job.text, None)
            if grammar is not None:
                self.grammar_cache.add(job.text, grammar)

    def _compile_in_lane(self, lane: CompileLane, job: CompileJob) -> CompiledGrammar:
        """Compile a grammar in a lane. Raises ValueError if it is rejected, ProbeStopped if it belongs in the
        slow lane."""
        cost = self._measure_cost(lane, job)
        if lane is self.quick_lane and (cost.is_too_long or cost.bytes > LARGE_BYTES):
            raise ProbeStopped
        check_compile_cost(cost, self._limits)
        if cost.bytes > LARGE_BYTES:
            self._wait_for_memory(job, cost.bytes)
        try:
            with panics_as_errors():
                return compile_grammar(self._vocabulary, cost.lark or job.text, cost.bytes)
        finally:
            if lane is self.slow_lane:
                self._release_memory()

    def _measure_cost(self, lane: CompileLane, job: CompileJob) -> CompileCost:
        job.num_tries += 1
        try:
            return lane.probe.try_compile(self._token_bytes, job.text, lane.limits)
        except ProbeStopped:
            if job.num_tries > MAX_TRIES:
                raise RuntimeError("the process that compiles grammars ended again and again") from None
            raise
        finally:
            with self._lock:
                lane.job = None

    def _wait_for_memory(self, job: CompileJob, bytes: int) -> None:
        """Wait until other grammars leave memory for a large one."""
        while True:
            with self._lock:
                self.grammar_cache.evict_for(bytes)
                if (
                    job.is_urgent
                    or not job.num_waiting
                    or self.grammar_cache.alive_bytes + bytes <= 2 * self._limits.bytes
                ):
                    return
            time.sleep(POLL_SECONDS)


def check_compile_cost(cost: CompileCost, limits: CompileLimits) -> None:
    """Raise ValueError for a grammar beyond its bounds, or that llguidance rejects."""
    reason = strip_parser_state(cost.error) if cost.error else ""
    if cost.is_too_long:
        reason = f"compiling it takes more than the {limits.seconds:g} s that max_grammar_seconds allows"
    elif cost.is_too_large or cost.bytes > limits.bytes:
        reason = f"compiling it takes more than the {limits.bytes >> 20} MiB that max_grammar_mib allows"
    elif cost.signal:
        reason = f"llguidance crashes on it (signal {cost.signal}): it is nested too deeply"
    if reason or cost.error:
        raise ValueError(f"structured_outputs is not allowed: {reason or NO_TOKEN_ALLOWED}")
