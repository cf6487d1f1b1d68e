"""The programs of a model whose layers lie in stages, or in halves: called as those of one device are."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from ....kvcache.pages import KVCache
from ....kvcache.stages import is_apart, stages
from ....model.pair import Params
from ..compiled.compile import Arguments, Programs, lower_zeros
from ..compiled.kept import Parts
from ..compiled.shapes import Shape
from ..steps.phases import Alone
from ..steps.step import Front, Seat, Slots
from .apart import Apart
from .lowering import Course, Lowering, front_at
from .relay import Ear, StagedCache, StagedSlots, Stages
from .ring import ATTENTION, PARTS
from .steps import heard, seat_front


class StagedPrograms(Programs):
    """Programs for parameters that lie in stages, or whose feed-forward layers lie apart (`kvcache.stages`).
    What they give is promised; the cache and the slots are passed on as promises."""

    def __init__(self, phases: Any, params: Params, *sizes: Any):
        assert isinstance(phases, Alone), "models and heads draft on one device"
        self._spans = [] if is_apart(params) else stages(params)
        self.stages = Stages(self._spans, len(self._spans) - 1) if self._spans else Stages(PARTS, ATTENTION)
        super().__init__(phases, params, *sizes)

    @cached_property
    def course(self) -> Course:
        phases: Any = self._phases
        if not self._spans:
            return Apart(phases, self.like, self.sizes)
        return Lowering(phases, self.like, self.sizes, self._spans)

    def report(self) -> dict[str, Any]:
        names = [f"{span.start}-{span.stop - 1}" for span in self._spans] or [*PARTS]
        return super().report() | {"stages": {"layers": names} | self.stages.clock.report()}

    def begin(self, state: Arguments) -> None:
        self.stages.clock.reset()

    def empty(self, params: Params, failed: BaseException | None = None) -> Arguments:
        self.stages.drain()  # jobs hold arrays, and raise the error that failed a step once more
        return super().empty(params, failed)

    # ------------------------------------------------------------ a step

    def _lower(self, shape: Shape) -> Parts:
        with self._lowering:
            programs = self.course.lower(shape)
        return Parts([*programs, self._lower_hear()], self._joined)

    def _joined(self, *compiled: Any) -> Any:
        *programs, hear = compiled
        return self.course.joined(self.stages, Ear(self.stages, hear), programs)

    @property
    def _front(self) -> Front:
        return front_at(self.like, self.course.place(0))

    # ------------------------------------------------------------ slots and cache

    def _lower_hear(self) -> jax.stages.Lowered:
        front = self._front
        whose = jax.ShapeDtypeStruct(front.live.shape, bool)
        return jax.jit(heard, out_shardings=self.course.place(0)).lower(front, front, whose)

    def _lower_seat(self) -> Parts:
        one, here = jax.ShapeDtypeStruct((), jnp.int32), self.course.place(0)
        front = jax.jit(seat_front, out_shardings=here).lower(self._front, one, one)
        return Parts([super()._lower_seat(), front], self._seats)

    def _seats(self, own: Any, front: Any) -> Any:
        def seat(slots: StagedSlots, slot: Any, new: Seat) -> StagedSlots:
            do = self.stages.do
            return StagedSlots(
                own=do(self.stages.exit, own, slots.own, slot, new),
                front=do(0, front, slots.front, slot, new.end),
                news=slots.without(int(slot)),
            )

        return seat

    def _lower_history(self) -> Parts:
        return Parts([super()._lower_history()], self._at_exit)

    def _lower_masks(self) -> Parts:
        return Parts([super()._lower_masks()], self._at_exit)

    def _at_exit(self, compiled: Any) -> Any:
        def load(slots: StagedSlots, *given: Any) -> StagedSlots:
            return replace(slots, own=self.stages.do(self.stages.exit, compiled, slots.own, *given))

        return load

    def _lower_slots(self) -> Parts:
        return Parts([super()._lower_slots(), lower_zeros(self._front)], self._slots)

    def _slots(self, own: Callable[[], Slots], front: Callable[[], Front]) -> Any:
        return lambda: StagedSlots(own(), front())

    def _lower_cache(self) -> Parts:
        return Parts([lower_zeros(cache) for cache in self.course.caches], join_caches)


def join_caches(*fresh: Callable[[], KVCache]) -> Callable[[], StagedCache]:
    return lambda: StagedCache(tuple(make() for make in fresh))
