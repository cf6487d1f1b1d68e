"""Execution of a table's programs on the stages of a pipeline."""

from typing import Any

from ....model.draft_pair import EngineParams
from ..compiled.local_executor import LocalExecutor
from ..compiled.lowering import StepArguments
from .pipelined_step import StageThreads


class PipelineExecutor:
    """Executor whose calls return futures: threads dispatch the stages' programs. It implements `Executor`,
    and counts the stages' seconds from its construction on.

    programs: table of the programs.
    stages: the threads.
    """

    can_defer_sampling = False

    def __init__(self, local: LocalExecutor, stages: StageThreads):
        self.programs, self.stages, self._local = local.programs, stages, local
        self.run, self.run_forward = local.run, local.run_forward
        self.encode = local.encode  # start_engine refuses encoders here
        self.assign_slot, self.load_history = local.assign_slot, local.load_history
        self.load_masks, self.close = local.load_masks, local.close
        stages.clock.reset()

    def fresh_arguments(self, params: EngineParams, failure: BaseException | None = None) -> StepArguments:
        """Return the parameters with an unused cache and unused slots, once all jobs of the stages are done
        or have failed: jobs hold arrays, and raise the error of the failed step again."""
        self.stages.drain()
        return self._local.fresh_arguments(params, failure)

    def report(self) -> dict[str, Any]:
        """Return the report of the programs, with the layers and the seconds of the stages."""
        return self._local.report() | {"stages": {"layers": self.stages.names} | self.stages.clock.report()}
