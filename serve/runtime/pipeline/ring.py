"""How a step goes to and fro between the part that attends and the part that has the feed-forward layers.

While one micro-batch is in one part, another is in the other (the ping-pong of MegaScale-Infer, Zhu et al.,
arXiv 2504.02263). A half that is dispatched is waited for before the next: which micro-batch a part takes
next depends on whose hidden states are there, and an accelerator that was handed a whole step ahead would
keep the others out.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from ....kvcache.pages import Batch
from ....kvcache.stages import around, attention_of
from ....model.transformer import Decoder
from ..compiled.futures import StepFuture
from .halves import behind
from .relay import SlotUpdate, SlotUpdateReceiver, StagedCache, StagedSlots, StageThreads, awaited, changed

PARTS = "attention", "ffn"
ATTENTION, FFN = range(2)


class RingStep(NamedTuple):
    """A step on its way: its batch, on the part that attends, and when it entered."""

    batch: Batch
    entered: float


@dataclass(frozen=True)
class Ring:
    """A shape's programs, called as the program of one device is: `attends` and `feeds` have one for each
    layer. `here` and `there` are the shardings of what either part is handed."""

    stages: StageThreads
    enter: Any
    attends: tuple[Any, ...]
    feeds: tuple[Any, ...]
    leave: Any
    here: Sharding
    there: Sharding
    ear: SlotUpdateReceiver

    def __call__(
        self, params: Decoder, cache: StagedCache, slots: StagedSlots, batch: Batch
    ) -> tuple[StagedCache, StagedSlots, StepFuture]:
        results, ends = self.stages.results, around(params)
        front, news = self.ear.front(slots, awaited(batch))
        handed, step = results(2, ATTENTION, self._enter, ends, front, batch)
        parts, made, before = [], None, None
        for i, layer in enumerate(params.layers):
            own, attend = attention_of(layer), self._attend(i)
            given = own, before, cache.parts[i], handed, made, step
            part, handed, inner = results(3, ATTENTION, attend, *given)
            made, before = self.stages.do(FFN, self._feed(i), layer.ffn, inner, step), behind(layer)
            parts.append(part)
        given = ends, before, slots.own, handed, made, step
        own, output, told = results(3, ATTENTION, self._leave, *given)
        news = (*news, SlotUpdate(changed(batch), told))
        return StagedCache(tuple(parts)), StagedSlots(own, front, news), output

    def as_text(self) -> str:
        """The compiled programs."""
        each = dict.fromkeys((self.enter, *self.attends, *self.feeds, self.leave))
        return "\n".join(program.as_text() or "" for program in each)

    def _enter(self, ends: Decoder, front: Any, batch: Batch) -> tuple[Any, RingStep]:
        step = RingStep(jax.device_put(batch, self.here), time.perf_counter())
        return self._run(ATTENTION, step, self.enter, ends, front, step.batch), step

    def _attend(self, i: int) -> Callable[..., Any]:
        def attend(own: Any, before: Any, cache: Any, handed: Any, made: Any, step: RingStep) -> Any:
            given = own, before, cache, handed, made, step.batch
            cache, handed, inner = self._run(ATTENTION, step, self.attends[i], *given)
            return cache, handed, jax.device_put(inner, self.there)

        return attend

    def _feed(self, i: int) -> Callable[..., Any]:
        def feed(weights: Any, inner: Any, step: RingStep) -> Any:
            return jax.device_put(self._run(FFN, step, self.feeds[i], weights, inner), self.here)

        return feed

    def _leave(self, ends: Any, before: Any, slots: Any, handed: Any, made: Any, step: RingStep) -> Any:
        return self._run(ATTENTION, step, self.leave, ends, before, slots, handed, made, step.batch)

    def _run(self, part: int, step: RingStep, program: Any, *given: Any) -> Any:
        """What a half's program makes, once it is there."""
        called = time.perf_counter()
        made = jax.block_until_ready(program(*given))
        self.stages.clock.ran(part, step.entered, called, None, None)
        return made
