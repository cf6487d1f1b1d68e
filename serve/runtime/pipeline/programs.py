"""Programs of a model that is split into stages or halves of layers. They are called like the programs of one
device."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from ....kvcache.pages import KVCache
from ....model.draft_pair import EngineParams
from ..compiled.compile import Programs
from ..compiled.executable_cache import JoinedPrograms, Lowered
from ..compiled.lowering import StepArguments, lower_zeros
from ..compiled.shapes import Shape
from ..steps.phases import TargetOnly
from ..steps.step import FirstStageSlots, SlotContents, Slots
from .lowering import StageLowering
from .pipelined_step import SlotUpdateReceiver, StagedCache, StagedSlots, StageThreads
from .route import make_route
from .steps import assign_first_stage_slot, merge_slot_update


class StagedPrograms(Programs):
    """Programs for parameters in pipeline stages, or with feed-forward layers on separate devices
    (`kvcache.stages`). Cache, slots and outputs are futures.

    stages: threads that dispatch the stages' programs.
    """

    def __init__(self, phases: Any, params: EngineParams, *sizes: Any):
        assert isinstance(phases, TargetOnly), "models and heads draft on one device"
        self._route = make_route(params)
        names = list(dict.fromkeys(stage.name for stage in self._route))
        self.stages = StageThreads(names, self._route[-1].group)
        super().__init__(phases, params, *sizes)

    @cached_property
    def lowering(self) -> StageLowering:
        """Lowering of the stages' programs."""
        phases: Any = self._phases
        return StageLowering(phases, self.abstract_arguments, self.sizes, self._route)

    def report(self) -> dict[str, Any]:
        return super().report() | {"stages": {"layers": self.stages.names} | self.stages.clock.report()}

    def start_serving(self, arguments: StepArguments) -> None:
        """Start to count the stages' seconds."""
        self.stages.clock.reset()

    def fresh_arguments(self, params: EngineParams, failure: BaseException | None = None) -> StepArguments:
        self.stages.drain()  # jobs hold arrays, and raise the error of the failed step again
        return super().fresh_arguments(params, failure)

    # ------------------------------------------------------------ a step

    def _choose_sampler(self, shape: Shape) -> None:
        """Return None: the last stage samples in its program."""

    def _lower(self, program: Any) -> JoinedPrograms:
        with self._lowering_lock:
            return JoinedPrograms(self.lowering.lower(program), self._part_joiner)

    @property
    def _part_joiner(self) -> Callable[..., Any]:
        return partial(self.lowering.make_pipelined_step, self.stages, self._slot_update_receiver)

    # ------------------------------------------------------------ slots and cache

    @property
    def _first_stage_sharding(self) -> Sharding:
        """Sharding of arrays that are replicated on the first stage's devices."""
        return self.lowering.stage_sharding(self._route[0])

    @cached_property
    def _slot_update_receiver(self) -> SlotUpdateReceiver:
        """Receiver that merges the last stage's updates into the first stage's slots."""
        first_stage_slots = self.lowering.abstract_first_stage_slots
        mask = jax.ShapeDtypeStruct(first_stage_slots.live.shape, bool)
        lowered_merge: Any = jax.jit(merge_slot_update, out_shardings=self._first_stage_sharding).lower(
            first_stage_slots, first_stage_slots, mask
        )
        return SlotUpdateReceiver(self.stages, lowered_merge.compile(compiler_options=self._xla_options()))

    def _lower_slot_assignment(self) -> JoinedPrograms:
        scalar, sharding = jax.ShapeDtypeStruct((), jnp.int32), self._first_stage_sharding
        lowered_assignment = jax.jit(assign_first_stage_slot, out_shardings=sharding).lower(
            self.lowering.abstract_first_stage_slots, scalar, scalar, scalar
        )
        return JoinedPrograms(
            [super()._lower_slot_assignment(), lowered_assignment], self._join_slot_assignment
        )

    def _join_slot_assignment(self, assign_last_stage: Any, assign_first_stage: Any) -> Any:
        """Join the programs that assign a slot in the last stage (`assign_last_stage`) and in the first
        (`assign_first_stage`)."""

        def assign_slot(slots: StagedSlots, slot: Any, contents: SlotContents) -> StagedSlots:
            submit = self.stages.submit
            return StagedSlots(
                last_stage_slots=submit(
                    self.stages.last_group, assign_last_stage, slots.last_stage_slots, slot, contents
                ),
                first_stage_slots=submit(
                    0, assign_first_stage, slots.first_stage_slots, slot, contents.end, contents.adapter
                ),
                updates=slots.updates_without_slot(int(slot)),
            )

        return assign_slot

    def _lower_loads(self) -> list[Lowered]:
        return [JoinedPrograms([load], self._wrap_slot_loader) for load in super()._lower_loads()]

    def _wrap_slot_loader(self, compiled: Any) -> Any:
        """Wrap a program that changes the last stage's slots to take and return all slots."""

        def load_into_last_stage(slots: StagedSlots, *inputs: Any) -> StagedSlots:
            submit, exit_group = self.stages.submit, self.stages.last_group
            return replace(
                slots, last_stage_slots=submit(exit_group, compiled, slots.last_stage_slots, *inputs)
            )

        return load_into_last_stage

    def _lower_slots(self) -> JoinedPrograms:
        def join_slots(
            fresh_last_stage: Callable[[], Slots], fresh_first_stage: Callable[[], FirstStageSlots]
        ) -> Callable[[], StagedSlots]:
            return lambda: StagedSlots(fresh_last_stage(), fresh_first_stage())

        return JoinedPrograms(
            [super()._lower_slots(), lower_zeros(self.lowering.abstract_first_stage_slots)], join_slots
        )

    def _lower_cache(self) -> JoinedPrograms:
        def join_caches(*fresh: Callable[[], KVCache]) -> Callable[[], StagedCache]:
            return lambda: StagedCache(tuple(make() for make in fresh))

        return JoinedPrograms(
            [lower_zeros(cache) for cache in self.lowering.abstract_cache_parts], join_caches
        )
