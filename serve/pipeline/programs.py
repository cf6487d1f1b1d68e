"""The programs of a model whose layers lie in stages: called as those of one device are."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from ...kvcache.pages import KVCache
from ...kvcache.stages import cache_of, stages
from ...model.pair import Params
from ..programs.compile import Arguments, Programs, lower_zeros
from ..programs.kept import Lowered
from ..programs.phases import Alone
from ..programs.shapes import Shape
from ..programs.step import Front, Seat, Slots
from .lowering import Lowering
from .relay import Relay, StagedCache, StagedSlots, Stages
from .steps import heard, seat_front


@dataclass(frozen=True)
class Parts:
    """Programs of several stages that make one when they are compiled."""

    parts: Sequence[Lowered]
    join: Callable[..., Any]

    def compile(self, *, compiler_options: Any = None) -> Any:
        return self.join(*(part.compile(compiler_options=compiler_options) for part in self.parts))


class StagedPrograms(Programs):
    """Programs for parameters that lie in stages (`kvcache.stages`). What they give is promised; the cache
    and the slots are passed on as promises."""

    def __init__(self, phases: Any, params: Params, *sizes: Any):
        assert isinstance(phases, Alone), "models and heads draft on one device"
        self.stages = Stages(stages(params))
        super().__init__(phases, params, *sizes)

    def report(self) -> dict[str, Any]:
        spans = [f"{span.start}-{span.stop - 1}" for span in self.stages.spans]
        return super().report() | {"stages": {"layers": spans} | self.stages.clock.report()}

    def begin(self, state: Arguments) -> None:
        self.stages.clock.reset()

    def empty(self, params: Params, failed: BaseException | None = None) -> Arguments:
        self.stages.drain()  # jobs hold arrays, and raise the error that failed a step once more
        return super().empty(params, failed)

    # ------------------------------------------------------------ a step

    @cached_property
    def _stages(self) -> Lowering:
        phases: Any = self._phases
        return Lowering(phases, self.like, self.sizes, self.stages.spans)

    def _lower(self, shape: Shape) -> Parts:
        with self._lowering:
            programs = self._stages.lower(shape)
        hand = tuple(self._stages.place(stage) for stage in range(1, len(self.stages)))
        return Parts([*programs, self._lower_hear()], partial(self._relay, hand))

    def _relay(self, hand: tuple[Sharding, ...], *compiled: Any) -> Relay:
        *programs, hear = compiled
        return Relay(self.stages, tuple(programs), hand, self._stages.place(0), hear)

    # ------------------------------------------------------------ slots and cache

    def _lower_hear(self) -> jax.stages.Lowered:
        front = self._stages.front
        whose = jax.ShapeDtypeStruct(front.live.shape, bool)
        return jax.jit(heard, out_shardings=self._stages.place(0)).lower(front, front, whose)

    def _lower_seat(self) -> Parts:
        one, here = jax.ShapeDtypeStruct((), jnp.int32), self._stages.place(0)
        front = jax.jit(seat_front, out_shardings=here).lower(self._stages.front, one, one)
        return Parts([super()._lower_seat(), front], self._seats)

    def _seats(self, own: Any, front: Any) -> Any:
        def seat(slots: StagedSlots, slot: Any, new: Seat) -> StagedSlots:
            do = self.stages.do
            return StagedSlots(
                own=do(-1, own, slots.own, slot, new),
                front=do(0, front, slots.front, slot, new.end),
                news=slots.without(int(slot)),
            )

        return seat

    def _lower_history(self) -> Parts:
        def join(compiled: Any) -> Any:
            def load(slots: StagedSlots, *given: Any) -> StagedSlots:
                return replace(slots, own=self.stages.do(-1, compiled, slots.own, *given))

            return load

        return Parts([super()._lower_history()], join)

    def _lower_slots(self) -> Parts:
        return Parts([super()._lower_slots(), lower_zeros(self._stages.front)], self._slots)

    def _slots(self, own: Callable[[], Slots], front: Callable[[], Front]) -> Any:
        return lambda: StagedSlots(own(), front())

    def _lower_cache(self) -> Parts:
        caches = [cache_of(self.like.cache, span) for span in self.stages.spans]
        return Parts([lower_zeros(cache) for cache in caches], join_caches)


def join_caches(*fresh: Callable[[], KVCache]) -> Callable[[], StagedCache]:
    return lambda: StagedCache(tuple(make() for make in fresh))
