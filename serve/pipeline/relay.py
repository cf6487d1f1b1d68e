"""How a step runs through the stages: each has a thread that dispatches its programs in order, hands hidden
states on, and goes on with the next step. No step waits for the host: the last stage sends the tokens that it
samples to the first, on the devices.

One program a stage (as PipeDream has them, Harlap et al., arXiv 1806.03377) lets stages differ in size and
compute different phases at the same time.
"""

import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from ...kvcache.pages import ON_DEVICE, Batch, KVCache
from ...kvcache.stages import joined, params_of
from ...model.transformer import Decoder
from ..programs.promise import Promise, arrived
from .clock import Clock

MOST_NEWS = 32  # steps whose tokens the first stage has not heard of


class Stages:
    """A thread for each stage, in which its programs are dispatched one after the other."""

    def __init__(self, spans: Sequence[range]):
        self.spans, self.clock = spans, Clock(len(spans))
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"duetto-stage-{span}") for span in spans]
        weakref.finalize(self, self.clock.stop)

    def __len__(self) -> int:
        return len(self.spans)

    def drain(self) -> None:
        """Until all that was asked so far is done, or has failed: no job holds arrays any more."""
        for thread in self._threads:
            thread.submit(lambda: None).result()

    def do(self, stage: int, work: Callable[..., Any], *given: Any) -> Promise:
        """Call work in a stage's thread with what was given, once all of it has arrived."""
        return Promise(self._threads[stage % len(self)].submit(with_arrived, work, given))


def with_arrived(work: Callable[..., Any], given: Sequence[Any]) -> Any:
    return work(*map(arrived, given))


@dataclass(frozen=True)
class StagedCache:
    """Pools by stages; `arrived` has those of all."""

    parts: tuple[Any, ...]  # of each stage a KVCache, or the promise of one

    def arrived(self) -> KVCache:
        return joined(map(arrived, self.parts))


class News(NamedTuple):
    """What a step has changed: the slots of its rows, and what the last stage knows of them."""

    slots: frozenset[int]
    front: Promise


@dataclass(frozen=True)
class StagedSlots:
    """The slots, which are the last stage's own; what the first knows of them, and what it has yet to
    hear."""

    own: Any
    front: Any
    news: tuple[News, ...] = ()

    def arrived(self) -> Any:
        return arrived(self.own)

    def without(self, slot: int) -> tuple[News, ...]:
        """The news, but for those of a slot that has another request."""
        return tuple(news._replace(slots=news.slots - {slot}) for news in self.news)


@dataclass(frozen=True)
class Relay:
    """A shape's programs, one a stage, called as the program of one device is. `hand` are the shardings of
    what stages 1, 2, ... are handed, `back` that of what the first is told; `hear` takes it in."""

    stages: Stages
    programs: tuple[Any, ...]
    hand: tuple[Sharding, ...]
    back: Sharding
    hear: Any

    def __call__(
        self, params: Decoder, cache: StagedCache, slots: StagedSlots, batch: Batch
    ) -> tuple[StagedCache, StagedSlots, Promise]:
        do, last = self.stages.do, len(self.stages) - 1
        weights = [params_of(params, span) for span in self.stages.spans]
        front, news = self._front(slots, awaited(batch))
        done = do(0, self._enter, weights[0], cache.parts[0], front, batch)
        parts = [done.part(0)]
        for stage in range(1, last):
            done = do(stage, self._go_on(stage), weights[stage], cache.parts[stage], done.part(1), batch)
            parts.append(done.part(0))
        done = do(last, self._leave, weights[last], cache.parts[last], slots.own, done.part(1), batch)
        rows = frozenset(batch.slot[batch.count > 0].tolist())
        told = do(last, lambda front: front, done.part(3))  # alone: the rest of the results may go
        news = (*news, News(rows, told))
        return StagedCache((*parts, done.part(0))), StagedSlots(done.part(1), front, news), done.part(2)

    def as_text(self) -> str:
        """The compiled programs."""
        return "\n".join(program.as_text() or "" for program in self.programs)

    def _front(self, slots: StagedSlots, rows: frozenset[int]) -> tuple[Any, tuple[News, ...]]:
        """What the first stage knows once it has heard of the last step of each of some rows' slots, and what
        it has yet to hear."""
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

    def _enter(self, params: Any, cache: Any, front: Any, batch: Batch) -> Any:
        entered = time.perf_counter()
        cache, handed = self.programs[0](params, cache, front, batch)
        self.stages.clock.ran(0, entered, entered, front, handed.hidden)
        return cache, (jax.device_put(handed, self.hand[0]), entered)

    def _go_on(self, stage: int) -> Callable[..., Any]:
        def go_on(params: Any, cache: Any, given: Any, batch: Batch) -> Any:
            (handed, entered), called = given, time.perf_counter()
            cache, out = self.programs[stage](params, cache, handed, batch)
            self.stages.clock.ran(stage, entered, called, handed, out.hidden)
            return cache, (jax.device_put(out, self.hand[stage]), entered)

        return go_on

    def _leave(self, params: Any, cache: Any, slots: Any, given: Any, batch: Batch) -> Any:
        (handed, entered), called = given, time.perf_counter()
        cache, slots, output, front = self.programs[-1](params, cache, slots, handed, batch)
        self.stages.clock.ran(len(self.stages) - 1, entered, called, handed, output.sampled.token)
        return cache, slots, output, jax.device_put(front, self.back)


def awaited(batch: Batch) -> frozenset[int]:
    """The slots whose last tokens only the device knows."""
    return frozenset(batch.slot[(batch.count > 0) & (batch.tokens[:, 0] == ON_DEVICE)].tolist())
