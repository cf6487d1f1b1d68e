"""Execution of a step on a route. Each group of devices has a thread, which dispatches its programs and hands
hidden states on. No step waits for the host: the last stage sends the tokens that it samples to the first, on
the devices.

One program a stage (as in PipeDream, Harlap et al., arXiv 1806.03377) lets stages differ in size and compute
different phases at the same time.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from ....kvcache.pages import ON_DEVICE, Batch, KVCache
from ....kvcache.stages import joined
from ....model.transformer import Decoder
from ..compiled.futures import StepFuture, arrived
from .clock import StageClock
from .route import FFN, Stage

MOST_NEWS = 32  # steps whose tokens the first stage has not heard of


class StageThreads:
    """A thread for each group of devices. It dispatches programs one after the other, each as soon as its
    inputs have arrived. Steps end in the group `exit`."""

    def __init__(self, names: Sequence[Any], exit: int = -1):
        self.names, self.exit, self.clock = names, exit, StageClock(len(names), exit)
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"duetto-stage-{name}") for name in names]
        self._asked: set[Future[Any]] = set()
        weakref.finalize(self, self.clock.stop)

    def __len__(self) -> int:
        return len(self.names)

    def drain(self) -> None:
        """Wait until all jobs so far are done or have failed, so that no job holds arrays any more."""
        wait(list(self._asked))
        for thread in self._threads:
            thread.submit(lambda: None).result()

    def do(self, stage: int, work: Callable[..., Any], *given: Any) -> StepFuture:
        """Call work in a stage's thread once all inputs have arrived. No thread waits for them, so an input
        may come from later work of the same stage."""
        return self.results(1, stage, lambda *arrived: (work(*arrived),), *given)[0]

    def results(self, count: int, stage: int, work: Callable[..., Any], *given: Any) -> list[StepFuture]:
        """The same for work with `count` results, each of which can be freed while others are held."""
        promised = [Future[Any]() for _ in range(count)]
        for one in promised:
            self._asked.add(one)
            one.add_done_callback(self._asked.discard)
        jobs = [promise.job for promise in given if isinstance(promise, StepFuture)]
        held = [(work, given, promised)]  # until it starts: a future keeps whom it has called back

        def start() -> None:
            work, given, promised = held.pop()
            # no closure: it would keep the arrays as long as an error's frames live
            job = self._threads[stage].submit(with_arrived, work, given)
            job.add_done_callback(partial(settle, promised))

        when_done(jobs, start)
        return list(map(StepFuture, promised))


def when_done(jobs: Iterable[Future[Any]], then: Callable[[], Any]) -> None:
    """Call `then` once all jobs are done: here, or in the thread that ends the last of them."""
    rest = iter(jobs)

    def go_on(_: Any = None) -> None:
        for job in rest:
            if not job.done():
                job.add_done_callback(go_on)
                return
        then()

    go_on()


def with_arrived(work: Callable[..., Any], given: Sequence[Any]) -> Any:
    return work(*map(arrived, given))


def settle(promised: "Sequence[Future[Any]]", job: "Future[Any]") -> None:
    """Pass on the results of a job that is done, or what it raised."""
    if (error := job.exception()) is not None:
        for one in promised:
            one.set_exception(error)
        return
    for one, result in zip(promised, job.result(), strict=True):
        one.set_result(result)


@dataclass(frozen=True)
class StagedCache:
    """The cache in parts; `arrived` joins them."""

    parts: tuple[Any, ...]  # of each stage a KVCache, or the promise of one

    def arrived(self) -> KVCache:
        return joined(map(arrived, self.parts))


class SlotUpdate(NamedTuple):
    """Change of the slots by a step: the slots of its rows, and their state in the last stage."""

    slots: frozenset[int]
    front: StepFuture


@dataclass(frozen=True)
class StagedSlots:
    """The slots.

    own: in the last stage.
    front: what the first stage knows of them.
    news: updates that the first stage has not merged yet.
    """

    own: Any
    front: Any
    news: tuple[SlotUpdate, ...] = ()

    def arrived(self) -> Any:
        return arrived(self.own)

    def without(self, slot: int) -> tuple[SlotUpdate, ...]:
        """Return the updates without those of a slot that has another request."""
        return tuple(news._replace(slots=news.slots - {slot}) for news in self.news)


@dataclass(frozen=True)
class SlotUpdateReceiver:
    """Merges updates from the last stage into the first stage's slots, by the program `hear`."""

    stages: StageThreads
    hear: Any

    def front(self, slots: StagedSlots, rows: frozenset[int]) -> tuple[Any, tuple[SlotUpdate, ...]]:
        """Apply pending updates up to the newest one that these rows depend on. Returns the first stage's
        slots, and the updates still pending."""
        wanted = [i + 1 for i, news in enumerate(slots.news) if news.slots & rows]
        count = max([*wanted, len(slots.news) - MOST_NEWS, 0])
        front = slots.front
        for news in slots.news[:count]:
            front = self.stages.do(0, self._hear, front, news.front, news.slots)
        return front, slots.news[count:]

    def _hear(self, front: Any, news: Any, whose: frozenset[int]) -> Any:
        mask = np.zeros(front.live.shape, bool)
        mask[list(whose)] = True
        return self.hear(front, news, mask)


@dataclass(frozen=True)
class PipelinedStep:
    """A shape's programs, called as the program of one device is.

    programs, places: of each stage of the route.
    """

    stages: StageThreads
    route: tuple[Stage, ...]
    programs: tuple[Any, ...]
    places: tuple[Sharding, ...]
    ear: SlotUpdateReceiver

    def __call__(
        self, params: Decoder, cache: StagedCache, slots: StagedSlots, batch: Batch
    ) -> tuple[StagedCache, StagedSlots, StepFuture]:
        handed, news = self.ear.front(slots, awaited(batch))
        front, own, pools, parts = handed, batch, iter(cache.parts), []
        if self.returns:  # many programs take it
            own = self.stages.do(0, lambda: jax.device_put(batch, self.places[0]))
        kept: dict[int, Any] = {}  # by groups: what the next visit needs
        output = None
        for i, stage in enumerate(self.route):
            pool, seen = next(pools) if stage.pools else None, None if stage.half == FFN else own
            given = pool, slots.own if stage.last else None, kept.get(stage.group), handed, seen
            run = partial(self._run, i)
            part, kept[stage.group], output, handed = self.stages.results(
                4, stage.group, run, stage.params(params), *given
            )
            parts += [part] if stage.pools else []
        assert output is not None, "a route has a stage at least"
        news = (*news, SlotUpdate(changed(batch), handed))
        return StagedCache(tuple(parts)), StagedSlots(kept[self.route[-1].group], front, news), output

    @property
    def returns(self) -> bool:
        """A step visits a group of devices again."""
        return len(self.route) > len(self.stages)

    def as_text(self) -> str:
        """The compiled programs."""
        return "\n".join(program.as_text() or "" for program in dict.fromkeys(self.programs))

    def _run(
        self, i: int, params: Any, pool: Any, slots: Any, kept: Any, given: Any, batch: Any
    ) -> tuple[Any, Any, Any, Any]:
        """Dispatch a stage's program: its pools, what its group keeps, the output, and what the next stage
        is handed: results on its devices, and when the step entered the first."""
        called = time.perf_counter()
        handed, entered = given if i else (given, called)
        pool, kept, output, out = self.programs[i](params, pool, slots, kept, handed, batch)
        if self.returns:
            # Which micro-batch a group takes next depends on whose hidden states are there. An accelerator
            # that was handed a whole step ahead would keep the others out.
            jax.block_until_ready((pool, kept, output, out))
        self.stages.clock.ran(self.route[i].group, entered, called, handed, out)
        out = jax.device_put(out, self.places[(i + 1) % len(self.route)])
        return pool, kept, output, out if self.route[i].last else (out, entered)


def changed(batch: Batch) -> frozenset[int]:
    """The slots of a batch's rows."""
    return frozenset(batch.slot[batch.count > 0].tolist())


def awaited(batch: Batch) -> frozenset[int]:
    """The slots whose last tokens only the device knows."""
    return frozenset(batch.slot[(batch.count > 0) & (batch.tokens[:, 0] == ON_DEVICE)].tolist())
