"""The engine: parameters, cache and slots on the device, a scheduler on the host, and a loop of plan,
dispatch, commit."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import numpy as np

from ...kvcache.names import root
from ...kvcache.pages import KVCache
from ...kvcache.tables import PageTables
from ...model.pair import Params, target_of, with_target
from ...model.transformer import Decoder
from ...model.tree import paths
from ...model.weights.turned import prepared_as
from ...sampling.params import NO_TOKEN, knobs_row
from ...sampling.state import dense_bias, needs_history
from ..programs.classes import Classes
from ..programs.compile import Arguments, Programs, fill
from ..programs.shapes import Shape
from ..programs.step import Output, Seat
from .guessing import Speculation, Taken
from .meter import Compilations, Meter
from .request import Request
from .rows import calls, prompt_rows
from .scheduler import Limits, Scheduler, StepPlan, Work
from .scores import score_fields, take_prompt_scores
from .sleep import Sleep, on_device, on_host, shapes_of

MAX_FAILURES = 3  # steps that may fail without a new token between them before the error is the caller's


class Ran(NamedTuple):
    """A dispatched step: its shape, its rows' work and its results, which may still be on their way."""

    shape: Shape
    rows: list[Work]
    output: Output


class Engine:
    """Serves requests with one model on one device (or one mesh).

    One step is always in flight: the next is planned and dispatched before the tokens of the last are read,
    since the device remembers each slot's last token. Only guesses need those tokens first. Not thread-safe;
    callers take turns. `limits` are such that one of `classes` holds every row of decode and verification;
    prompts are cut to fit.
    """

    def __init__(
        self,
        programs: Programs,
        classes: Classes,
        state: Arguments,
        limits: Limits,
        prefix_caching: bool,
        speculation: Speculation | None = None,
    ):
        self.programs, self.classes, self._state = programs, classes, state
        self.config, self.sizes = programs.config, programs.sizes
        sizes, work = self.sizes, limits.most_tokens
        self.tables = PageTables(self.config.windows, sizes.pages, sizes.page_size, work)
        salt = str(self.config), str(jax.tree.map(lambda x: x.dtype, state.params))
        self.scheduler = Scheduler(
            limits,
            self.tables,
            root(*salt) if prefix_caching else None,
            recompute_outputs=classes.same_bits,
            boundary=self.config.boundary,
        )
        self._flight: list[Ran] = []
        self._failures = 0
        self._sleep = Sleep()
        self.speculation = speculation
        self.meter, self._compilations = Meter(), Compilations()

    @cached_property
    def _products(self) -> str | None:
        return self.programs.products(self.classes.shapes)

    @property
    def params(self) -> Decoder:
        return target_of(self._state.params)

    @property
    def everything(self) -> Params:
        """The parameters of all that its programs run: the model's, and those of what guesses for it."""
        return self._state.params

    @property
    def cache(self) -> KVCache:
        return self._state.cache

    @property
    def has_work(self) -> bool:
        return bool(self._flight) or self.scheduler.has_work

    def submit(self, request: Request) -> None:
        """Put a request into the queue; capacity is a place there, never an error."""
        assert 0 < len(request.prompt) < request.end <= self.sizes.max_model_len
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request now; what it has generated stays. One that has finished is left alone."""
        if not request.finished:
            request.finish("abort")
            self.scheduler.abort(request)
            self._ended(request)

    def step(self) -> list[Request]:
        """StepPlan and dispatch one step, then take in the results of the one before; gives the requests that
        got tokens.

        A step that fails on the device, or is interrupted, costs its cache: every running request is put back
        into the queue, and its pages are computed again. Raises the device's error when that does not help
        either, and RuntimeError while the engine sleeps.
        """
        self._sleep.check()
        try:
            with self.meter.working():
                touched = self._advance()
        except BaseException as error:
            self._recover()
            self._failures += 1
            if not isinstance(error, jax.errors.JaxRuntimeError) or self._failures >= MAX_FAILURES:
                raise
            return []
        if touched:
            self._failures = 0
        return touched

    def report(self) -> dict[str, Any]:
        """The meter's counts, the scheduler's, and what was compiled (after the warm-up nothing must be)."""
        guesses = {} if self.speculation is None else {"speculation": self.speculation.report()}
        return (
            self.meter.report()
            | guesses
            | ({"products": self._products} if self._products else {})
            | {
                "dtype": str(self.params.embed.dtype),
                "programs": self.programs.count,
                "warmup_seconds": self.programs.seconds,
                "compilations": self._compilations.count,
                "preemptions": self.scheduler.preemptions,
            }
            | {"cache_pages": sum(self.sizes.pages), "page_size": self.sizes.page_size}
        )

    def update_params(self, params: Decoder) -> None:
        """Serve other weights of the same shapes from now on: no copy, no compilation; cached prefixes are
        forgotten.

        Raises RuntimeError while requests are unfinished, ValueError where a shape, dtype or sharding
        differs.
        """
        if self.scheduler.has_work:
            raise RuntimeError("update_params: requests are unfinished; run or abort them first")
        params = prepared_as(self.params, params)
        old, new = paths(self.params), paths(params)
        for path in old | new:
            a, b = old.get(path), new.get(path)
            if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
                raise ValueError(f"update_params: {path} is {describe(b)}, expected {describe(a)}")
            if not b.sharding.is_equivalent_to(a.sharding, a.ndim):
                raise ValueError(f"update_params: {path} lies in {b.sharding}, expected {a.sharding}")
        self.tables.forget()
        self._state = replace(self._state, params=with_target(self._state.params, params))
        self._sleep.replaced(params)

    # ------------------------------------------------------------ memory given back

    def vacate(self) -> None:
        """Put every running request back into the queue, and forget the cache: it is computed again."""
        self._flight = []
        self.meter.lost()
        for request in list(self.scheduler.running.values()):
            if request.finished:
                self.scheduler.release(request)
            else:
                self.scheduler.preempt(request)
        self.tables.forget()

    @property
    def is_sleeping(self) -> bool:
        return bool(self._sleep.missing)

    def sleep(self, level: int) -> None:
        """Take no steps until `wake_up`; from level 1 on, give back the cache's memory and the parameters'.

        Level 1 keeps the parameters on the host, level 2 discards them: `update_params` has to bring others.
        """
        if level == 0:
            return self._sleep.pause()
        self.vacate()
        params = self._state.params if self._sleep.params is None else self._sleep.params
        if level == 2:
            params = with_target(params, shapes_of(self.params))
        self._sleep.begin(on_host(params), discarded=self._sleep.discarded or level == 2)
        everything = self._state.params, self._state.cache, self._state.slots
        self._state = Arguments(*shapes_of(everything))

    def wake_up(self, tags: Iterable[str]) -> None:
        """Bring back what `tags` name of "weights" and "kv_cache"; steps are taken once both are there."""
        for tag in self._sleep.asked(tags):
            if tag == "weights":
                params = on_device(self._sleep.params, self._state.params)
                self._state = replace(self._state, params=params)
            elif tag == "kv_cache":
                self._state = self.programs.empty(self._state.params)
            self._sleep.woke(tag)

    def _advance(self) -> list[Request]:
        touched, guess = [], None
        if self.speculation is not None:
            guess = self.speculation.offers(self.scheduler.decoding, idle=not self._flight)
        if guess or any(ran.shape.phase == "verify" for ran in self._flight):
            touched = self._settle()
        plan = self.scheduler.plan(not self._flight, guess)
        if plan is None:
            touched = self._settle()
            plan = self.scheduler.plan(settled=True)
            assert plan is not None
        flight = self._dispatch(plan)
        before, self._flight = self._flight, flight
        return touched + self._commit(before)

    def _settle(self) -> list[Request]:
        flight, self._flight = self._flight, []
        return self._commit(flight, waited=True)

    def _dispatch(self, plan: StepPlan) -> list[Ran]:
        for request in plan.seats:
            self._seat(request)
        classes = self.classes
        phases = (
            (classes.prefill, prompt_rows(classes.prefill, plan.prefill)),
            (classes.decode, plan.decode),
            (classes.verify, plan.verify),
        )
        ran = [self._run(*call) for shapes, works in phases for call in calls(shapes, works)]
        self.scheduler.dispatched(plan)
        self.meter.planned(self.tables)
        return ran

    def _run(self, shape: Shape, works: list[Work]) -> Ran:
        batch = self.programs.empty_batch(shape, self.sizes.max_num_seqs)
        for row, work in enumerate(works):
            request, slot = work.request, work.request.slot
            assert slot is not None
            known = request.tokens[work.start : work.start + work.count]
            fill(batch, row, [*known, *work.guesses], work.start, request.pages, slot)
            batch.count[row] = work.count  # those beyond the known ones are the slot's own to find
        cache, slots, output = self.programs.run(shape, self._state, batch)
        self._state = replace(self._state, cache=cache, slots=slots)
        self.meter.ran(shape, sum(w.count for w in works), sum(w.start for w in works))
        return Ran(shape, works, output)

    def _seat(self, request: Request) -> None:
        """Tell the device whom a slot belongs to, and of the tokens that penalties and bad words look back
        on."""
        assert request.slot is not None
        prompt_len, slot = len(request.prompt), np.int32(request.slot)
        knobs = knobs_row(
            request.params,
            seed=request.seed,
            stop_ids=request.stop_ids,
            prompt_len=prompt_len,
            bad_words=request.bad_words,
        )
        scored = np.bool_(request.params.prompt_logprobs is not None)
        new = Seat(np.int32(len(request.tokens)), np.int32(request.reach), scored, knobs)
        slots = self.programs.seat(self._state.slots, slot, new)
        if needs_history(request.params):
            tokens = np.zeros(self.sizes.max_model_len, np.int32)
            tokens[: len(request.tokens)] = request.tokens
            bias = dense_bias(request.params, self.config.target.vocab_size, request.bad_words)
            lengths = np.int32(prompt_len), np.int32(len(request.tokens))
            slots = self.programs.load_history(slots, slot, tokens, *lengths, bias)
        self._state = replace(self._state, slots=slots)
        self.meter.admitted(request)

    def _commit(self, flight: list[Ran], waited: bool = False) -> list[Request]:
        """Take in what dispatched steps sampled; gives the requests that got tokens, the finished ones
        released.

        `waited` says that the next step is not on its way yet.
        """
        taken = []
        for ran in flight:
            tokens = np.asarray(ran.output.sampled.token)
            self.meter.took()
            for row, work in enumerate(ran.rows):
                taken.append(self._take(work, ran, row, tokens[row]))
        if self.speculation is not None and taken:
            self.speculation.took(taken, self.meter.arrived, waited)
        for row in taken:
            if row.work.request.slot is not None:
                self._conclude(row.work.request, len(row.tokens))
        return [row.work.request for row in taken if row.tokens]

    def _take(self, work: Work, ran: Ran, row: int, tokens: np.ndarray) -> Taken:
        """Append a row's sampled tokens to its request."""
        request, known, prompt = work.request, len(work.request.tokens), ran.shape.phase == "prefill"
        if request.finished:
            return Taken(
                work, 0, [], prompt
            )  # aborted, or stopped by its text, while this step was on its way
        take_prompt_scores(request, ran.output, row, work)
        emitted = np.flatnonzero(tokens != NO_TOKEN)
        if ran.shape.phase == "verify":
            request.computed = work.start + max(1, len(emitted))
        for i in emitted:
            if request.params.logprobs is not None:
                request.scores.append(*(np.asarray(x)[row, i] for x in score_fields(ran.output.sampled)))
            request.append(int(tokens[i]))
            if request.finished:
                break
        return Taken(work, len(emitted), request.tokens[known:], prompt)

    def _conclude(self, request: Request, new: int) -> None:
        """A request has got its new tokens from a step: its full pages are named, and it gives up its seat
        where it has finished, or reached what its keys are good for."""
        tokens = len(request.tokens)
        if self.classes.same_bits and tokens <= request.reach:
            self.scheduler.name_pages(request, tokens - new - 1, tokens - 1)
        if request.finished:
            self.scheduler.release(request)
            self._ended(request)
        elif tokens >= request.reach:
            self.scheduler.preempt(request)

    def _ended(self, request: Request) -> None:
        self.meter.finished(request)
        if self.speculation is not None:
            self.speculation.ended(request)

    def _recover(self) -> None:
        """Start again from the tokens that the host knows: what a failed step consumed cannot be read any
        more."""
        self.vacate()
        params = self._state.params
        del self._state  # its cache goes first: two may not fit
        self._state = self.programs.empty(params)


def describe(x: jax.Array | None) -> str:
    return "missing" if x is None else f"{x.dtype}{list(x.shape)}"
