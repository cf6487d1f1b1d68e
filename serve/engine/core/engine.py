"""The engine: parameters, cache and slots on the device, a scheduler on the host, and a loop of plan,
dispatch, commit."""

import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import jax

from ....kvcache.kernels.cpu_attention import count_kernel_layers
from ....kvcache.pages import KVCache
from ....kvcache.quantised import choose_cache_format
from ....model.draft_pair import EngineParams, target_params, with_target
from ....model.transformer import Decoder
from ....model.weights.cpu.packed import kernel_ffi_target, kernel_isa
from ....model.weights.lora import drop_lora
from ...host.process import use_huge_pages
from ...kv.offload.mover import PageMover
from ...kv.offload.page_finder import KVOffloader, PageFinder
from ...options.checks import round_up
from ...runtime.compiled.futures import wait_result
from ...runtime.compiled.lowering import PromptKey, StepArguments
from ...runtime.compiled.shapes import Shape, min_row_tokens
from ...runtime.equal_bits.classes import ShapeClasses
from ...runtime.equal_bits.warmup import Warmup
from ...runtime.executor import Executor
from ..lora.writer import AdapterWriter
from ..metrics.stats import Compilations, EngineStats
from ..weights.sleep import SleepState
from ..weights.weight_update import adapt_new_params, make_root_hash
from .batch import MakeBatch, make_batch, make_prompt_inputs, split_into_calls
from .compile_planner import CompilePlanner
from .embedding_pool import EmbeddingPool, SpanLimits
from .prefill_delayer import PrefillDelayer
from .request import Request
from .results import DispatchedCall, InFlightSteps, await_and_append_results, record_verify_passes
from .scheduler import Scheduler
from .scheduler_output import ScheduledTokens, SchedulerConfig, SchedulerOutput
from .slot_setup import (
    LogitBiasCache,
    dispatch_deferred_sampling,
    load_grammar_masks,
    make_page_tables,
    setup_slot,
)
from .speculation import Speculation

MAX_FAILURES = 3  # steps that may fail without a new token between them before the error is the caller's


class Engine:
    """Serves requests with one model on one device or mesh.

    A step of each group of slots is always in flight; only a pipeline has several groups. The next step is
    planned and dispatched before the tokens of the last one are read: the device keeps each slot's last
    token. Two kinds of steps read those tokens first: steps that verify draft tokens, and steps that sample
    under a grammar if sampling may not be deferred.

    Not thread-safe: one thread calls at a time.

    executor: runs the compiled programs, which `executor.programs` lists.
    classes: shapes that serve now. One of the last classes holds every row of decode and of verification.
    arguments: parameters, cache and slots on the device.
    scheduler_config: limits of a step. The scheduler cuts prompts into chunks that fit them.
    warmup: compiles more programs while the engine serves; `speculation` begins when it is done.
    clock: returns the time in seconds, for all times in reports.
    kernels: checks of the device's kernels (`kernel_checks.KernelCheck`), by kernel and sizes.
    make_batch: makes the input of a call from its rows; a simulation's executor takes the rows.
    cpu_kernels_reason: reason why steps on a CPU use no kernels of duetto's own; "" if they do.
    """

    def __init__(
        self,
        executor: Executor,
        classes: ShapeClasses,
        arguments: StepArguments,
        scheduler_config: SchedulerConfig,
        prefix_caching: bool,
        speculation: Speculation | None = None,
        warmup: Warmup | None = None,
        clock: Callable[[], float] = time.monotonic,
        kernels: Mapping[str, Any] | None = None,
        cpu_kernels_reason: str = "",
        make_batch: MakeBatch = make_batch,
    ):
        self.kernels, self._cpu_kernels_reason = kernels or {}, cpu_kernels_reason
        self.executor, self.make_batch = executor, make_batch
        self._arguments, self._scheduler_config = arguments, scheduler_config
        self.programs = programs = executor.programs
        self.config, self.sizes = programs.config, programs.sizes
        self._bias_cache = LogitBiasCache(self.config.target.vocab_size)
        self._adapter_writer = AdapterWriter(target_params(arguments.params))
        self.stats, self.compilations, self.sleep_state = EngineStats(clock), Compilations(), SleepState()
        self.host_parts = self.stats.host_parts
        engine = weakref.proxy(self)  # no cycle keeps the cache on its device
        self.tables = make_page_tables(self.config.windows, self.sizes, scheduler_config)
        self.prefill_delayer = PrefillDelayer(lambda: engine.classes, self.stats.cached_median_seconds, clock)
        self.scheduler = Scheduler(
            scheduler_config,
            self.tables,
            make_root_hash(self.config, self.all_params, self.sizes.kv_cache_dtype)
            if prefix_caching
            else None,
            recompute_outputs=classes.same_bits,
            longrope_boundary=self.config.longrope_boundary,
            prefill_delayer=self.prefill_delayer,
            lora_slots=self._adapter_writer.lora_slots,
            embedding_pool=EmbeddingPool(self.sizes.embedding_rows, self.config.prefill_alignment),
        )
        self.in_flight_steps = InFlightSteps(self.scheduler.group_of)
        self.num_failures = self.weights_version = 0  # of steps; version of the weights, which counts updates
        self._ended_requests: list[Request] = []  # that `take_ended` returns
        self.speculation, self.warmup = speculation, warmup
        # deferred until grammars have read the last step; drafters need each token at once
        self.can_defer_sampling = executor.can_defer_sampling and not scheduler_config.max_draft_tokens
        self.compile_planner = CompilePlanner(self.sizes, self.stats, classes)
        self.serving_since: dict[Shape, float] = {}  # seconds from the start until a shape serves
        self._set_shape_classes(classes)

    def attach_mover(self, mover: PageMover) -> None:
        """Offload pages that the pools evict to tiers, and look prefixes up there."""
        self.scheduler.page_finder = KVOffloader(mover, self.tables, self.stats.prefill_token_seconds)
        weakref.finalize(self, mover.close)

    def close(self) -> None:
        """Write pages to the tiers that outlive the process, if the cache can still be read."""
        self.page_finder.close(self.cache if hasattr(self, "_arguments") and not self.is_sleeping else None)
        self.executor.close()

    @property
    def page_finder(self) -> PageFinder:
        return self.scheduler.page_finder

    @cached_property
    def matmul_tuning_hash(self) -> str | None:
        """Hash of how matrix products were configured in the shapes that serve
        (`StepPrograms.matmul_tuning_hash`)."""
        return self.programs.matmul_tuning_hash(self.classes.shapes)

    @property
    def params(self) -> Decoder:
        return target_params(self.all_params)

    @property
    def all_params(self) -> EngineParams:
        """Parameters of the model and of its drafter, without adapters."""
        return drop_lora(self._arguments.params)

    @property
    def cache(self) -> KVCache:
        return wait_result(self._arguments.cache)

    @property
    def has_work(self) -> bool:
        return bool(self.in_flight_steps) or self.scheduler.has_work

    def submit(self, request: Request) -> None:
        """Put a request into the queue, which has no limit. Raises ValueError for spans of embeddings that
        cannot be computed."""
        assert 0 < len(request.prompt) < request.end <= self.sizes.max_model_len
        if request.spans:
            limits = SpanLimits.from_config(self.config.target, self.sizes.embedding_rows)
            limits.check(request.spans, len(request.prompt))
        request.record_weights_version(self.weights_version)
        hashes, salt = self.scheduler.prefix_hashes(request), request.cache_salt
        request.page_fetch = self.page_finder.start_remote_prefill(
            request.prompt, hashes, request.prefill_address, salt
        )
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request now and keep what it has generated. A finished request stays as it is."""
        if not request.is_finished:
            request.finish("abort")
            self.scheduler.abort(request)
            self._on_request_end(request)

    def take_ended(self) -> list[Request]:
        """Return the requests that have ended since the last call."""
        ended, self._ended_requests = self._ended_requests, []
        return ended

    def step(self) -> list[Request]:
        """Plan and dispatch a step, then read the results of the one before; returns the requests that got
        tokens.

        A step that fails on the device, or is interrupted, costs the cache: every running request is put back
        into the queue, and its pages are computed again. Raises the device's error if that fails too, and
        RuntimeError while the engine sleeps.
        """
        self.sleep_state.check_awake()
        try:
            is_compiling = self.warmup is not None and self.warmup.is_compiling
            with self.stats.time_step(is_compiling), self.host_parts.other:
                updated = self._step_unguarded()
        except BaseException as error:
            self._rebuild_device_state(error)
            self.num_failures += 1
            if not isinstance(error, jax.errors.JaxRuntimeError) or self.num_failures >= MAX_FAILURES:
                raise
            return []
        self.num_failures = 0 if updated else self.num_failures
        return updated

    def report(self) -> dict[str, Any]:
        """Return counts of the engine, its scheduler, tiers and programs, and what was compiled after the
        warm-up, which should be nothing."""
        counts: dict[str, Any] = {
            "waiting_reasons": self.scheduler.waiting_reasons.report(),
            "gathering": self.prefill_delayer.report(),
            "dtype": str(self.params.embed.dtype),
            "cpu_kernels": kernel_isa(self.params),
            "cpu_kernels_target": kernel_ffi_target(self.params),
            "without_cpu_kernels": self._cpu_kernels_reason or None,
            "cpu_attention_layers": self._count_cpu_attention_layers(),
            "steps_beside_compiling_seconds": self.stats.compiling_seconds,
            "serving_since": {str(s): round(t, 3) for s, t in sorted(self.serving_since.items())},
            "compilations": self.compilations.count,
            "preemptions": self.scheduler.preemptions,
            "cache_pages": self.sizes.shards * sum(self.sizes.pages),
            "page_size": self.sizes.page_size,
            "kernels": {name: asdict(check) for name, check in self.kernels.items()},
        }
        if self.speculation is not None:
            counts["speculation"] = self.speculation.report()
        if not self.warmup and self.matmul_tuning_hash is not None:
            counts["products"] = self.matmul_tuning_hash
        return self.stats.report() | self.page_finder.report() | self.executor.report() | counts

    def _count_cpu_attention_layers(self) -> int:
        """Layers whose pages the CPU kernels read."""
        if kernel_isa(self.params) is None:
            return 0
        dtype = self.params.embed.dtype
        return count_kernel_layers(
            self.config.layers, choose_cache_format(self.sizes.kv_cache_dtype, dtype), dtype
        )

    def update_params(self, params: Decoder, keep: bool = False, donate: bool = False) -> None:
        """Serve other weights of the same shapes, without a compilation, and forget cached prefixes.

        keep: unfinished requests continue, and their tokens are computed again.
        donate: a weight that is served in another form is deleted once this form is ready.

        Raises RuntimeError for unfinished requests without `keep`, ValueError if a shape, dtype or placement
        differs.
        """
        if self.scheduler.has_work and not keep:
            raise RuntimeError("update_params: requests are unfinished; run or abort them, or keep them")
        params = adapt_new_params(target_params(self._arguments.params), params, donate)
        use_huge_pages(params)
        if self.scheduler.has_work:
            self.preempt_and_reset_cache()
        if self.warmup is not None:
            self.warmup.on_weights_replaced()
        self.tables.reset_prefix_cache()
        self.scheduler.embedding_pool.clear()
        self._arguments = replace(self._arguments, params=with_target(self._arguments.params, params))
        self.sleep_state.on_params_replaced(params)
        self.page_finder.on_weights_replaced(self.all_params)
        self.weights_version += 1
        for _, request in self.scheduler.waiting:
            request.record_weights_version(self.weights_version)

    def preempt_and_reset_cache(self) -> None:
        """Put every running request back into the queue and forget the cache: pages are computed again."""
        self.in_flight_steps.clear()
        self.stats.forget_in_flight()
        for request in list(self.scheduler.running.values()):
            if request.is_finished:
                self.on_tokens_computed(ScheduledTokens(request, len(request.tokens) - 1, 1))
            else:
                self.scheduler.preempt(request)
        self.tables.reset_prefix_cache()
        self.scheduler.embedding_pool.clear()
        self.scheduler.cancel_page_fetches()
        self.page_finder.discard_evicted()

    @property
    def is_sleeping(self) -> bool:
        return bool(self.sleep_state.missing)

    def sleep(self, level: int) -> None:
        """Take no steps until `wake_up`. From level 1 on, release the memory of the cache and of the
        parameters.

        Level 1 keeps the parameters on the host. Level 2 discards them: `update_params` has to give new
        ones.
        """
        if level == 0:
            return self.sleep_state.pause()
        self.preempt_and_reset_cache()
        self.scheduler.lora_slots.clear()
        self._arguments = self.sleep_state.release_arguments(
            self._arguments, self.programs.abstract_arguments, discard=level == 2
        )

    def wake_up(self, tags: Iterable[str]) -> None:
        """Restore the "weights" or the "kv_cache" that `tags` name. Steps are taken once both are
        restored."""
        self._arguments = self.sleep_state.restore(self._arguments, tags, self.executor.fresh_arguments)
        self.page_finder.on_wake(self.all_params)

    def advance_warmup_if_idle(self) -> bool:
        """Advance the warm-up by one comparison if there is nothing to serve; returns True if it did."""
        if self.warmup is None or self.scheduler.has_work:
            return False
        has_params = not (self.is_sleeping or self.sleep_state.discarded)
        if not has_params or not self.warmup.has_work:
            self.warmup.is_idle = self.compile_planner.is_engine_idle and has_params
            return False
        try:
            self._advance_warmup()
        except jax.errors.JaxRuntimeError as error:  # of a step whose requests have all ended
            self._rebuild_device_state(error)
        return True

    def _advance_warmup(self) -> list[Request]:
        """Advance the warm-up by one comparison, if there is one to make. It needs free pages, for which the
        last requests may be preempted, and no step in flight. Returns the requests that got tokens from
        these."""
        if (warmup := self.warmup) is None or not warmup.has_work:
            return []
        updated = self._commit_steps_in_flight()
        self.scheduler.preempt_until_free(warmup.needed_pages)
        if (cache := warmup.advance(self._arguments, self.tables)) is None:
            self._rebuild_device_state()
        else:
            self._arguments = replace(self._arguments, cache=cache)
        self.page_finder.discard_evicted()  # the comparison has overwritten these pages
        if warmup.classes != self.classes:
            self._set_shape_classes(warmup.classes)
        if warmup.is_done:
            self.warmup, self.speculation = None, warmup.speculation
        return updated

    def _set_shape_classes(self, classes: ShapeClasses) -> None:
        """Serve with the shapes of `classes` from now on, and fit the scheduler's limits to them."""
        self.classes, age = classes, self.programs.uptime_seconds
        self.compile_planner.reset()
        self.serving_since = dict.fromkeys(classes.shapes, age) | self.serving_since
        steps = min(self._scheduler_config.decode_steps, max(s.tokens for s in classes.decode))
        multi_step_rows, single_step_rows = (
            max(s.rows for s in classes.decode if s.tokens >= n) for n in (steps, 1)
        )
        self._scheduler_config = self._scheduler_config._replace(
            row_tokens=round_up(min_row_tokens(classes.prefill), self.config.prefill_alignment)
        )
        self.scheduler.config = self._scheduler_config._replace(
            decode_steps=steps,
            multi_step_rows=multi_step_rows if multi_step_rows < single_step_rows else None,
        )
        self.scheduler.recompute_outputs = classes.same_bits

    def _step_unguarded(self) -> list[Request]:
        """Take a step like `step`, for a caller that handles errors of the device."""
        updated, propose_drafts = self._advance_warmup(), None
        self.scheduler.select_next_group()
        if self.speculation is not None:
            propose_drafts = self.speculation.proposer_if_speculative(
                self.scheduler.num_decoding, is_idle=not self.in_flight_steps
            )
        if propose_drafts or self.in_flight_steps.must_await_results(self.can_defer_sampling):
            updated += self._commit_steps_in_flight(self.scheduler.group)
        with self.host_parts.schedule:
            scheduler_output = self.scheduler.schedule(not self.in_flight_steps, propose_drafts)
        if scheduler_output is None:
            updated += self._commit_steps_in_flight()
            with self.host_parts.schedule:
                scheduler_output = self.scheduler.schedule(is_drained=True)
            assert scheduler_output is not None
        if not (scheduler_output or self.in_flight_steps):
            with self.host_parts.wait:
                self.page_finder.wait_for_pages()
        self.in_flight_steps.add(self.dispatch(scheduler_output))
        due_steps = self.in_flight_steps.pop_excess(
            self.scheduler.max_in_flight if scheduler_output else len(self.in_flight_steps) - 1
        )
        updated += [request for step in due_steps for request in self._commit_step(step)]
        if self.can_defer_sampling:
            with self.host_parts.dispatch:
                self._arguments = dispatch_deferred_sampling(
                    self.executor, self._arguments, self.in_flight_steps.unsampled_calls
                )
        return updated

    def _commit_steps_in_flight(self, group: int | None = None) -> list[Request]:
        """Read the results of all steps in flight, or of those up to the last with rows of a group."""
        return [
            r
            for step in self.in_flight_steps.pop_until_group(group)
            for r in self._commit_step(step, was_awaited=True)
        ]

    def dispatch(self, scheduler_output: SchedulerOutput) -> list[DispatchedCall]:
        """Set up the slots of admitted requests, and dispatch the calls of a step; returns the calls."""
        with self.host_parts.put:
            self._put_arguments(scheduler_output)
        calls = [
            self._dispatch_call(*call)
            for call in split_into_calls(self.classes, scheduler_output, self.sizes)
        ]
        with self.host_parts.schedule:
            if self.warmup is not None:
                self.compile_planner.on_step(self.warmup, self.classes, scheduler_output, self.scheduler)
            self.scheduler.on_dispatch(scheduler_output)
            self.stats.record_occupancy(self.tables)
        return calls

    def _put_arguments(self, scheduler_output: SchedulerOutput) -> None:
        """Put on the device what a step needs besides its batches: fetched pages, adapters, masks of
        grammars, embeddings, and the slots of admitted requests."""
        cache = self.page_finder.move_pages(
            self._arguments.cache, [request.page_fetch for request in scheduler_output.admitted]
        )
        slots = load_grammar_masks(self.executor, self._arguments.slots, scheduler_output.scheduled_rows)
        params = self._adapter_writer.write_due_adapters(self._arguments.params)
        self._arguments = replace(self._arguments, params=params, cache=cache, slots=slots)
        for span, rows in scheduler_output.encodes:
            embeddings = self.executor.encode(self._arguments, span, rows)
            self._arguments = replace(self._arguments, embeddings=embeddings)
        for request in scheduler_output.admitted:
            request.page_fetch = None
            slots = setup_slot(self.executor, self._arguments.slots, request, self._bias_cache)
            self._arguments = replace(self._arguments, slots=slots)
            self.stats.on_admit(request)

    def _dispatch_call(self, shape: Shape, scheduled_rows: dict[int, ScheduledTokens]) -> DispatchedCall:
        """Dispatch one call of a step, with its rows by number."""
        count = sum(row.count for row in scheduled_rows.values())
        cached = sum(row.start for row in scheduled_rows.values())
        with self.host_parts.batch:
            batch = self.make_batch(self.sizes, shape, scheduled_rows)
            inputs = make_prompt_inputs(shape, scheduled_rows, self.sizes.shards)
        for result in inputs:  # the call's time is without a compilation
            self.programs.load_or_compile(PromptKey(result, shape.rows, shape.tokens))
        self.stats.on_dispatch(shape, count, cached, self.sizes.shards)
        with self.host_parts.dispatch:
            if any(row.is_awaiting_mask for row in scheduled_rows.values()):
                cache, output = self.executor.run_forward(shape, self._arguments, batch)
                self._arguments = replace(self._arguments, cache=cache)
            else:
                cache, slots, output = self.executor.run(shape, self._arguments, batch, inputs)
                self._arguments = replace(self._arguments, cache=cache, slots=slots)
        return DispatchedCall(shape, scheduled_rows, output)

    def _commit_step(self, step: list[DispatchedCall], was_awaited: bool = False) -> list[Request]:
        """Read the tokens of a dispatched step and release finished requests; returns the requests with
        tokens.

        was_awaited: the next step is dispatched after this read.
        """
        with self.host_parts.commit:
            results = await_and_append_results(step, self.stats, self.sizes.shards)
            if self._scheduler_config.max_draft_tokens:
                record_verify_passes(results)
            if self.speculation is not None and results:
                arrived = self.stats.last_arrival - self.stats.phase_seconds["prefill"]
                self.speculation.record_step(results, arrived, was_awaited)
            for result in results:
                if result.scheduled.request.slot is not None and result.has_changed_request:
                    self.on_tokens_computed(result.scheduled)
        return [result.scheduled.request for result in results if result.tokens]

    def on_tokens_computed(self, scheduled: ScheduledTokens) -> None:
        """Let a request's full pages be found by their hashes after a step has computed its tokens, and
        release its slot if it is done.

        If the model computed NaN for the request, its pages lose their hashes. A request that has reached
        `Request.slot_end` is preempted: its keys are valid up to that length.
        """
        request, tokens = scheduled.request, len(scheduled.request.tokens)
        if request.has_failed:
            self.tables.drop_hashes(request.pages)
        elif tokens <= request.slot_end:
            self.scheduler.cache_pages(
                request, scheduled.start, min(scheduled.end, request.num_computed_tokens, tokens - 1)
            )
        if request.is_finished:
            self.scheduler.release(request)
            self._on_request_end(request)
        elif tokens >= request.slot_end:
            self.scheduler.preempt(request)

    def _on_request_end(self, request: Request) -> None:
        """Count an ended request, and release its drafter's state."""
        self.stats.on_finish(request)
        if self.speculation is not None:
            self.speculation.forget(request)
        self._ended_requests.append(request)

    def _rebuild_device_state(self, error: BaseException | None = None) -> None:
        """Restart from the host's tokens: arrays that a failed step consumed cannot be read any more."""
        self.preempt_and_reset_cache()
        params = self._arguments.params
        del self._arguments  # its cache goes first: two may not fit
        self._arguments = self.executor.fresh_arguments(params, error)
