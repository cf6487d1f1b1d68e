"""The engine: parameters, cache and slots on the device, a scheduler on the host, and a loop of plan,
dispatch, commit."""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import jax

from ....kvcache.kernels.cpu_attention import layers_read
from ....kvcache.pages import KVCache
from ....kvcache.quantised import kept_as
from ....model.pair import Params, target_of, with_target
from ....model.transformer import Decoder
from ....model.weights.adapted import unadapted
from ....model.weights.cpu.packed import kernels_in, target_in
from ...host.process import use_huge_pages
from ...kv.offload.mover import PageMover
from ...kv.offload.tiering import KVOffloader, PageFinder
from ...options.checks import round_up
from ...runtime.compiled.compile import StepArguments
from ...runtime.compiled.futures import arrived
from ...runtime.compiled.shapes import Shape, least_row
from ...runtime.equal_bits.classes import ShapeClasses
from ...runtime.equal_bits.warmup import Warmup
from ...runtime.programs import StepPrograms
from ..lora.writer import Writer
from ..metrics.meter import Compilations, EngineStats
from ..weights.params import exchanged, root_of
from ..weights.sleep import Sleep
from .gathering import PrefillBatcher
from .guessing import Speculation
from .need import Need
from .plan import ScheduledTokens, SchedulerConfig, SchedulerOutput
from .request import Request
from .results import DispatchedStep, InFlightSteps, note_passes, take_all
from .rows import calls_of_plan
from .scheduler import Scheduler
from .seats import drawn, seated, tables_of, with_masks

MAX_FAILURES = 3  # steps that may fail without a new token between them before the error is the caller's


class Engine:
    """Serves requests with one model on one device or mesh.

    A step of each group of slots is always in flight (only a pipeline has several groups): the next step is
    planned and dispatched before the tokens of the last are read, since the device remembers the last token
    of each slot. Draft tokens need those tokens first. So do draws under a grammar, or whole steps if no draw
    may be deferred.

    Not thread-safe: callers take turns.

    programs: calls of a step, by shape.
    classes: shapes that serve now; one of the last classes holds every row of decode and of verification.
    state: parameters, cache and slots on the device.
    limits: what the scheduler may give out. Prompts are cut to fit.
    warmup: programs that come while the engine serves; `speculation` begins when it is done.
    later: makes a warm-up of deferred draws, which begins with the first step that waits for a grammar.
    clock: seconds, for all times in reports.
    kernels: checks of the device's kernels (`kernel_checks.KernelCheck`), by kernel and sizes.
    without_cpu_kernels: why steps on a CPU have no kernels of duetto's own.
    """

    def __init__(
        self,
        programs: StepPrograms,
        classes: ShapeClasses,
        state: StepArguments,
        limits: SchedulerConfig,
        prefix_caching: bool,
        speculation: Speculation | None = None,
        warmup: Warmup | None = None,
        later: Callable[[ShapeClasses], Warmup] | None = None,
        clock: Callable[[], float] = time.monotonic,
        kernels: Mapping[str, Any] | None = None,
        without_cpu_kernels: str = "",
    ):
        self.kernels, self._without_cpu_kernels = kernels or {}, without_cpu_kernels
        self.programs, self._state, self._limits = programs, state, limits
        self.config, self.sizes = programs.config, programs.sizes
        self._adapters = Writer(target_of(state.params))
        self.meter, self.compilations, self.sleeper = EngineStats(clock), Compilations(), Sleep()
        alive = weakref.proxy(self)  # no cycle keeps the cache on its device
        self.tables = tables_of(self.config.windows, self.sizes, limits)
        self.gathering = PrefillBatcher(lambda: alive.classes, self.meter.typical, clock)
        self.scheduler = Scheduler(
            limits,
            self.tables,
            root_of(self.config, self.everything, self.sizes.kv_cache_dtype) if prefix_caching else None,
            recompute_outputs=classes.same_bits,
            boundary=self.config.boundary,
            gathering=self.gathering,
        )
        self.scheduler.places, self.flights = self._adapters.places, InFlightSteps(self.scheduler.group_of)
        self._failures = self.weights = 0  # the latter is their version: how often others came
        self.on_end: Callable[[Request], None] | None = None  # called with each request that ends
        self.on_warmup: Callable[[Warmup], None] | None = None  # called with a warm-up that is to begin
        self.speculation, self.warmup, self._later = speculation, warmup, later
        self.need = Need(self.sizes, self.meter, classes)
        self.since: dict[Shape, float] = {}  # seconds after the start from which on a shape serves
        self._serve_with(classes)

    def attach(self, mover: PageMover) -> None:
        """Offload pages that the pools evict to tiers, and look prefixes up there."""
        self.scheduler.tiers = KVOffloader(mover, self.tables, self.meter.token_seconds)
        weakref.finalize(self, mover.close)

    def close(self) -> None:
        """Write pages to the tiers that outlive the process, if the cache can still be read."""
        self.tiers.close(self.cache if hasattr(self, "_state") and not self.is_sleeping else None)
        self.programs.close()

    @property
    def tiers(self) -> PageFinder:
        return self.scheduler.tiers

    @cached_property
    def products(self) -> str | None:
        """Hash of how matrix products were configured in the shapes that serve (`StepPrograms.products`)."""
        return self.programs.products(s for s in self.classes.shapes if s.phase != "deferred")

    @property
    def params(self) -> Decoder:
        return target_of(self.everything)

    @property
    def everything(self) -> Params:
        """Parameters of the model and of its drafter, without adapters."""
        return unadapted(self._state.params)

    @property
    def cache(self) -> KVCache:
        return arrived(self._state.cache)

    @property
    def has_work(self) -> bool:
        return bool(self.flights) or self.scheduler.has_work

    def submit(self, request: Request) -> None:
        """Put a request into the queue, which has no limit."""
        assert 0 < len(request.prompt) < request.end <= self.sizes.max_model_len
        request.made_by(self.weights)
        request.ticket = self.tiers.expect(request.prompt, self.scheduler.usable(request), request.source)
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request now and keep what it has generated. A finished request stays as it is."""
        if not request.finished:
            request.finish("abort")
            self.scheduler.abort(request)
            self._ended(request)

    def step(self) -> list[Request]:
        """Plan and dispatch a step, then read the results of the one before; returns the requests that got
        tokens.

        A step that fails on the device, or is interrupted, costs the cache: every running request is put back
        into the queue, and its pages are computed again. Raises the device's error if that fails too, and
        RuntimeError while the engine sleeps.
        """
        self.sleeper.check()
        try:
            with self.meter.working(self.warmup is not None and self.warmup.is_compiling):
                touched = self._advance()
        except BaseException as error:
            self._recover(error)
            self._failures += 1
            if not isinstance(error, jax.errors.JaxRuntimeError) or self._failures >= MAX_FAILURES:
                raise
            return []
        self._failures = 0 if touched else self._failures
        return touched

    def report(self) -> dict[str, Any]:
        """Return counts of the engine, its scheduler, tiers and programs, and what was compiled after the
        warm-up, which should be nothing."""
        own: dict[str, Any] = {
            "waiting_reasons": self.scheduler.reasons.report(),
            "gathering": self.gathering.report(),
            "dtype": str(self.params.embed.dtype),
            "cpu_kernels": kernels_in(self.params),
            "cpu_kernels_target": target_in(self.params),
            "without_cpu_kernels": self._without_cpu_kernels or None,
            "cpu_attention_layers": self._cpu_attention_layers(),
            "steps_beside_compiling_seconds": self.meter.beside_compiling,
            "serving_since": {str(s): round(t, 3) for s, t in sorted(self.since.items())},
            "compilations": self.compilations.count,
            "preemptions": self.scheduler.preemptions,
            "cache_pages": self.sizes.shards * sum(self.sizes.pages),
            "page_size": self.sizes.page_size,
            "kernels": {name: asdict(check) for name, check in self.kernels.items()},
        }
        if self.speculation is not None:
            own["speculation"] = self.speculation.report()
        if not self.warmup and self.products is not None:
            own["products"] = self.products
        return self.meter.report() | self.tiers.report() | self.programs.report() | own

    def _cpu_attention_layers(self) -> int:
        """Layers whose pages the CPU kernels read."""
        if kernels_in(self.params) is None:
            return 0
        dtype = self.params.embed.dtype
        return layers_read(self.config.layers, kept_as(self.sizes.kv_cache_dtype, dtype), dtype)

    def update_params(self, params: Decoder, keep: bool = False) -> None:
        """Serve other weights of the same shapes from now on, without a compilation. Cached prefixes are
        forgotten.

        keep: unfinished requests continue, and their tokens are computed again.

        Raises RuntimeError for unfinished requests without `keep`, ValueError if a shape, dtype or placement
        differs.
        """
        if self.scheduler.has_work and not keep:
            raise RuntimeError("update_params: requests are unfinished; run or abort them, or keep them")
        params = exchanged(target_of(self._state.params), params)
        use_huge_pages(params)
        if self.scheduler.has_work:
            self.vacate()
        if self.warmup is not None:
            self.warmup.replaced(self.tables)
        self.tables.forget()
        self._state = replace(self._state, params=with_target(self._state.params, params))
        self.sleeper.replaced(params)
        self.tiers.replaced(self.everything)
        self.weights += 1
        for _, request in self.scheduler.waiting:
            request.made_by(self.weights)

    def vacate(self) -> None:
        """Put every running request back into the queue and forget the cache: pages are computed again."""
        self.flights.clear()
        self.meter.lost()
        if self.warmup is not None:
            self.warmup.interrupt(self.tables)
        for request in list(self.scheduler.running.values()):
            if request.finished:
                self.conclude(ScheduledTokens(request, len(request.tokens) - 1, 1))
            else:
                self.scheduler.preempt(request)
        self.tables.forget()
        self.scheduler.drop_tickets()
        self.tiers.lose()

    @property
    def is_sleeping(self) -> bool:
        return bool(self.sleeper.missing)

    def sleep(self, level: int) -> None:
        """Take no steps until `wake_up`. From level 1 on, release the memory of the cache and of the
        parameters.

        Level 1 keeps the parameters on the host; level 2 discards them, so `update_params` has to bring
        others.
        """
        if level == 0:
            return self.sleeper.pause()
        self.vacate()
        self.scheduler.places.forget()
        self._state = self.sleeper.begin(self._state, self.programs.like, discard=level == 2)

    def wake_up(self, tags: Iterable[str]) -> None:
        """Restore "weights" or "kv_cache", as `tags` say. Steps are taken once both are there."""
        self._state = self.sleeper.end(self._state, tags, self.programs.empty)
        self.tiers.woke(self.everything)

    def warm(self) -> bool:
        """Advance the warm-up by one run if there is nothing to serve; returns True if it ran."""
        if self.warmup is None or self.scheduler.has_work:
            return False
        has_params = not (self.is_sleeping or self.sleeper.discarded)
        if not has_params or not self.warmup.busy:
            self.warmup.idle = self.need.is_over and has_params
            return False
        try:
            self._settle()
        except jax.errors.JaxRuntimeError as error:  # of a step whose requests have all ended
            self._recover(error)
        self._warm()
        return True

    def _warm(self) -> None:
        if (warmup := self.warmup) is None or not warmup.busy:
            return
        if (cache := warmup.advance(self._state, self.tables, self.scheduler.growth)) is None:
            self._recover()
        else:
            self._state = replace(self._state, cache=cache)
        self.tiers.lose()  # what was lent has been written over
        if warmup.classes != self.classes:
            self._serve_with(warmup.classes)
        if warmup.done:
            self.warmup, self.speculation = None, warmup.speculation

    def _warm_later(self) -> None:
        if self._later is None or self.on_warmup is None:
            return
        if self.warmup is not None:
            return self.warmup.hurry()
        self.warmup, self._later = self._later(self.classes), None
        self.on_warmup(self.warmup)

    def _serve_with(self, classes: ShapeClasses) -> None:
        self.classes, age = classes, self.programs.age
        self.need.forget()
        self.since = dict.fromkeys(classes.shapes, age) | self.since
        steps = min(self._limits.decode_steps, max(s.tokens for s in classes.decode))
        several, most = (max(s.rows for s in classes.decode if s.tokens >= n) for n in (steps, 1))
        self._limits = self._limits._replace(row=round_up(least_row(classes.prefill), self.config.block))
        self.scheduler.limits = self._limits._replace(
            decode_steps=steps, multi_step_rows=several if several < most else None
        )
        self.scheduler.recompute_outputs = classes.same_bits

    def _advance(self) -> list[Request]:
        self._warm()
        self.scheduler.next_turn()
        touched, guess = [], None
        if self.speculation is not None:
            guess = self.speculation.proposer(self.scheduler.decoding, idle=not self.flights)
        if guess or self.flights.are_awaited(self.classes.may_defer):
            self._warm_later()
            touched = self._settle(self.scheduler.group)
        plan = self.scheduler.plan(not self.flights, guess)
        if plan is None:
            touched += self._settle()
            plan = self.scheduler.plan(settled=True)
            assert plan is not None
        if not (plan or self.flights):
            self.tiers.pause()
        self.flights.add(self.dispatch(plan))
        due = self.flights.beyond(self.scheduler.most_flights if plan else len(self.flights) - 1)
        touched += [request for flight in due for request in self._commit(flight)]
        self._state = drawn(self.programs, self._state, self.flights.undrawn)
        return touched

    def _settle(self, group: int | None = None) -> list[Request]:
        """Read the results of all steps in flight, or of those up to the last with rows of a group."""
        return [r for flight in self.flights.until(group) for r in self._commit(flight, waited=True)]

    def dispatch(self, plan: SchedulerOutput) -> list[DispatchedStep]:
        cache = self.tiers.step(self._state.cache, [request.ticket for request in plan.admitted])
        slots = with_masks(self.programs, self._state.slots, plan.works)
        self._state = StepArguments(self._adapters.write(self._state.params), cache, slots)
        for request in plan.admitted:
            request.ticket = None
            self._state = replace(self._state, slots=seated(self.programs, self._state.slots, request))
            self.meter.admitted(request)
        ran = [self._run(*call) for call in calls_of_plan(self.classes, plan, self.sizes)]
        self.need.observe(self.warmup, self.classes, plan, self.scheduler)
        self.scheduler.dispatched(plan)
        self.meter.planned(self.tables)
        return ran

    def _run(self, shape: Shape, works: dict[int, ScheduledTokens]) -> DispatchedStep:
        count, cached = sum(w.count for w in works.values()), sum(w.start for w in works.values())
        batch = self.programs.batch(shape, works)
        self.meter.ran(shape, count, cached, self.sizes.shards)
        cache, slots, output = self.programs.run(shape, self._state, batch)
        self._state = replace(self._state, cache=cache, slots=slots)
        return DispatchedStep(shape, works, output)

    def _commit(self, flight: list[DispatchedStep], waited: bool = False) -> list[Request]:
        """Read what a dispatched step sampled, and release finished requests; returns those that got tokens.

        waited: the next step is not dispatched yet.
        """
        taken = take_all(flight, self.meter)
        if self._limits.guesses:
            note_passes(taken)
        if self.speculation is not None and taken:
            self.speculation.record(taken, self.meter.arrived - self.meter.phase_seconds["prefill"], waited)
        for row in taken:
            if row.work.request.slot is not None and row.has_news:
                self.conclude(row.work)
        return [row.work.request for row in taken if row.tokens]

    def conclude(self, work: ScheduledTokens) -> None:
        """Name the full pages of a request after a step computed its tokens. It leaves its slot if it has
        finished, or if it has reached the length that its keys are valid for."""
        request, tokens = work.request, len(work.request.tokens)
        if tokens <= request.reach:
            self.scheduler.name_pages(request, work.start, min(work.end, request.computed, tokens - 1))
        if request.finished:
            self.scheduler.release(request)
            self._ended(request)
        elif tokens >= request.reach:
            self.scheduler.preempt(request)

    def _ended(self, request: Request) -> None:
        self.meter.finished(request)
        if self.speculation is not None:
            self.speculation.forget(request)
        if self.on_end is not None:
            self.on_end(request)

    def _recover(self, error: BaseException | None = None) -> None:
        """Restart from the host's tokens: arrays that a failed step consumed cannot be read any more."""
        self.vacate()
        params = self._state.params
        del self._state  # its cache goes first: two may not fit
        self._state = self.programs.empty(params, error)
