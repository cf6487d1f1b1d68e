"""Programs of a model whose layers lie in stages, or in halves, called as those of one device are."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from ....kvcache.pages import KVCache
from ....model.pair import Params
from ..compiled.compile import Programs, StepArguments, lower_zeros
from ..compiled.executable_cache import JoinedPrograms, Lowered
from ..compiled.shapes import Shape
from ..steps.phases import TargetOnly
from ..steps.step import Seat, Slots, StageZeroSlots
from .lowering import StageLowering
from .relay import SlotUpdateReceiver, StagedCache, StagedSlots, StageThreads
from .route import route
from .steps import seat_front, with_updates


class StagedPrograms(Programs):
    """Programs for parameters that lie in stages, or whose feed-forward layers lie apart (`kvcache.stages`).
    The cache, the slots and results are futures."""

    def __init__(self, phases: Any, params: Params, *sizes: Any):
        assert isinstance(phases, TargetOnly), "models and heads draft on one device"
        self._route = route(params)
        names = list(dict.fromkeys(stage.name for stage in self._route))
        self.stages = StageThreads(names, self._route[-1].group)
        super().__init__(phases, params, *sizes)

    @cached_property
    def lowering(self) -> StageLowering:
        phases: Any = self._phases
        return StageLowering(phases, self.like, self.sizes, self._route)

    def report(self) -> dict[str, Any]:
        return super().report() | {"stages": {"layers": self.stages.names} | self.stages.clock.report()}

    def begin(self, state: StepArguments) -> None:
        self.stages.clock.reset()

    def empty(self, params: Params, failed: BaseException | None = None) -> StepArguments:
        self.stages.drain()  # jobs hold arrays, and raise the error that failed a step once more
        return super().empty(params, failed)

    # ------------------------------------------------------------ a step

    def _lower(self, shape: Shape) -> JoinedPrograms:
        with self._lowering:
            return JoinedPrograms(self.lowering.lower(shape), self._join)

    @property
    def _join(self) -> Callable[..., Any]:
        return partial(self.lowering.joined, self.stages, self._ear)

    # ------------------------------------------------------------ slots and cache

    @property
    def _here(self) -> Sharding:
        """Where the first stage has what is on each of its devices."""
        return self.lowering.place(self._route[0])

    @cached_property
    def _ear(self) -> SlotUpdateReceiver:
        front = self.lowering.front
        whose = jax.ShapeDtypeStruct(front.live.shape, bool)
        hear: Any = jax.jit(with_updates, out_shardings=self._here).lower(front, front, whose)
        return SlotUpdateReceiver(self.stages, hear.compile(compiler_options=self._options()))

    def _lower_seat(self) -> JoinedPrograms:
        one, here = jax.ShapeDtypeStruct((), jnp.int32), self._here
        front = jax.jit(seat_front, out_shardings=here).lower(self.lowering.front, one, one, one)
        return JoinedPrograms([super()._lower_seat(), front], self._seats)

    def _seats(self, own: Any, front: Any) -> Any:
        def seat(slots: StagedSlots, slot: Any, new: Seat) -> StagedSlots:
            do = self.stages.do
            return StagedSlots(
                own=do(self.stages.exit, own, slots.own, slot, new),
                front=do(0, front, slots.front, slot, new.end, new.adapter),
                news=slots.without(int(slot)),
            )

        return seat

    def _lower_loads(self) -> list[Lowered]:
        return [JoinedPrograms([own], self._at_exit) for own in super()._lower_loads()]

    def _at_exit(self, compiled: Any) -> Any:
        def load(slots: StagedSlots, *given: Any) -> StagedSlots:
            return replace(slots, own=self.stages.do(self.stages.exit, compiled, slots.own, *given))

        return load

    def _lower_slots(self) -> JoinedPrograms:
        def join(own: Callable[[], Slots], front: Callable[[], StageZeroSlots]) -> Callable[[], StagedSlots]:
            return lambda: StagedSlots(own(), front())

        return JoinedPrograms([super()._lower_slots(), lower_zeros(self.lowering.front)], join)

    def _lower_cache(self) -> JoinedPrograms:
        def join(*fresh: Callable[[], KVCache]) -> Callable[[], StagedCache]:
            return lambda: StagedCache(tuple(make() for make in fresh))

        return JoinedPrograms([lower_zeros(cache) for cache in self.lowering.caches], join)
