"""Execution of a table's programs by this process alone."""

from collections.abc import Mapping
from typing import Any

from ....kvcache.pages import Batch
from ....model.draft_pair import EngineParams
from ...host.process import clear_frames
from .batches import BatchRow, make_batch, with_packed_indices
from .futures import PendingSample
from .lowering import StepArguments
from .program_table import ProgramTable
from .shapes import Shape


class LocalExecutor:
    """Executor that calls the programs of a table in the caller's thread. It implements `Executor`.

    programs: the table.
    assign_slot, load_history, load_masks: compiled programs that change slots.
    """

    def __init__(self, programs: ProgramTable):
        self.programs, small = programs, programs.small_programs
        self.assign_slot, self.load_history, self.load_masks = small[:3]

    @property
    def can_defer_sampling(self) -> bool:
        return self.programs.lowering.choose_sampler(Shape("decode", 1, 1)) is not None

    def batch(self, shape: Shape, rows: Mapping[int, BatchRow]) -> Batch:
        return make_batch(self.programs.sizes, shape, rows)

    def run(self, shape: Shape, arguments: StepArguments, batch: Batch) -> tuple[Any, Any, Any]:
        """Dispatch a step; returns cache, slots and Output. The given cache and slots are donated."""
        batch = with_packed_indices(batch, shape, self.programs.sizes)
        return self.programs.steps[shape](arguments.params, arguments.cache, arguments.slots, batch)

    def run_forward(self, shape: Shape, arguments: StepArguments, batch: Batch) -> tuple[Any, PendingSample]:
        """Dispatch the forward pass of a step; returns the cache and the pending draw. The given cache is
        donated."""
        step = self.programs.steps[shape]
        return step.run_forward(arguments.params, arguments.cache, arguments.slots, batch)

    def fresh_arguments(self, params: EngineParams, failure: BaseException | None = None) -> StepArguments:
        """Return the parameters with an unused cache and unused slots. They are made after the arrays of a
        step that raised `failure` are released."""
        clear_frames(failure)
        small = self.programs.small_programs
        return StepArguments(params, small.fresh_cache(), small.fresh_slots())

    def report(self) -> dict[str, Any]:
        return self.programs.report()

    def close(self) -> None:
        """Do nothing: the programs have no threads."""
