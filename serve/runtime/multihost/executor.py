"""Execution of programs on a mesh of several processes: each call on rank 0 is an order to the other ranks.

All processes of a group compile the same table. Until `make_group_executor`, model and options decide which
programs each process runs; from then on rank 0's engine decides.
"""

import signal
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from typing import Any, NoReturn

import jax
import numpy as np

from ....kvcache.pages import Batch
from ....model.draft_pair import EngineParams
from ...host.process import clear_frames
from ..compiled import executable_cache
from ..compiled.batch_arrays import empty_batch
from ..compiled.futures import PendingSample, StepFuture, wait_result
from ..compiled.local_executor import LocalExecutor
from ..compiled.lowering import ProgramLowering, StepArguments
from ..compiled.program_table import ProgramTable
from ..compiled.shapes import Shape
from ..compiled.small_programs import SLOT_PROGRAMS
from ..steps.output import NO_PROMPT_INPUTS, PromptInputs
from .group import ProcessGroup
from .messages import Order
from .rendezvous import check_same_facts, current_group
from .supervisor import end_process

MAX_STEPS_IN_FLIGHT = 2  # number of steps whose results a rank has not waited for, at most
MAX_HASHED_NUMBERS = 1 << 20  # numbers of a parameter that is compared between ranks, at most


def compile_in_group(lowering: ProgramLowering, params: EngineParams, *options: Any) -> ProgramTable:
    """Compile the table of a group's programs; a collective operation. Raises ValueError in all processes
    unless all have the same sizes, options, weights and programs.

    options: arguments of `ProgramTable` after the lowering.
    """
    require_group()
    check_same_facts({"sizes": repr((lowering.sizes, *options)), "weights": hash_small_params(params)})
    programs = ProgramTable(lowering, *options)
    check_same_facts({"programs": describe_programs(programs)})
    return programs


def make_group_executor(local: LocalExecutor, arguments: StepArguments) -> "GroupExecutor":
    """Return the executor of rank 0. On other ranks, run rank 0's orders and never return."""
    process_group = require_group()
    process_group.is_serving = True
    if process_group.rank:
        OrderFollower(local, process_group, arguments).follow()
    return GroupExecutor(local, process_group)


def require_group() -> ProcessGroup:
    """Return the group of this process, which has one."""
    process_group = current_group()
    assert process_group is not None, "parameters lie on other processes' devices, and there is no group"
    return process_group


class GroupExecutor:
    """Executor of rank 0: all processes of the group make its calls. It implements `Executor`.

    A thread sends each call to the other ranks and makes it: so a caller that is interrupted leaves no call
    incomplete. Results are futures. A call that fails ends the group.

    programs: table of the programs.
    """

    can_defer_sampling = False

    def __init__(self, local: LocalExecutor, process_group: ProcessGroup):
        self.programs, self.report = local.programs, local.report
        self._local, self._process_group = local, process_group
        self._dispatcher = ThreadPoolExecutor(1, "duetto-order-dispatcher")

    def close(self) -> None:
        """End the thread and the group."""
        self._dispatcher.shutdown()
        self._process_group.end_group()

    def run(
        self,
        shape: Shape,
        arguments: StepArguments,
        batch: Batch,
        prompt_inputs: PromptInputs = NO_PROMPT_INPUTS,
    ) -> tuple[Any, Any, Any]:
        params, cache, slots = arguments.params, arguments.cache, arguments.slots
        inputs = dict(prompt_inputs)
        job = self._dispatch_to_ranks(
            Order.from_tree("run", str(shape), (batch, inputs), inputs),
            lambda: self._local.run(
                shape, StepArguments(params, wait_result(cache), wait_result(slots)), batch, inputs
            ),
        )
        return job.part(0), job.part(1), job.part(2)

    def run_forward(self, shape: Shape, arguments: StepArguments, batch: Batch) -> tuple[Any, PendingSample]:
        raise NotImplementedError

    def encode(self, arguments: StepArguments, span: Any, rows: Any) -> Any:
        raise NotImplementedError

    def assign_slot(self, slots: Any, *contents: Any) -> StepFuture:
        return self._run_slot_program("assign_slot", self._local.assign_slot, slots, contents)

    def load_history(self, slots: Any, *history: Any) -> StepFuture:
        return self._run_slot_program("load_history", self._local.load_history, slots, history)

    def load_masks(self, slots: Any, *masks: Any) -> StepFuture:
        return self._run_slot_program("load_masks", self._local.load_masks, slots, masks)

    def fresh_arguments(self, params: EngineParams, failure: BaseException | None = None) -> StepArguments:
        """Return the parameters with an unused cache and unused slots on all ranks. A failure of the device
        ends the group."""
        self._dispatcher.submit(int).result()  # calls under way hold arrays
        if failure is not None and isinstance(failure, jax.errors.JaxRuntimeError):
            # other ranks' programs may wait for the program that failed here
            self._process_group.fail_group(failure)
        clear_frames(failure)
        small = self.programs.small_programs
        job = self._dispatch_to_ranks(Order("empty"), lambda: (small.fresh_cache(), small.fresh_slots()))
        return StepArguments(params, job.part(0), job.part(1))

    def _run_slot_program(
        self, name: str, program: Callable[..., Any], slots: Any, inputs: tuple[Any, ...]
    ) -> StepFuture:
        """Call a program that changes slots, by its name in `SLOT_PROGRAMS`, on all ranks."""
        order = Order.from_tree(name, "", inputs)
        return self._dispatch_to_ranks(order, lambda: program(wait_result(slots), *inputs))

    def _dispatch_to_ranks(self, order: Order, work: Callable[[], Any]) -> StepFuture:
        """Send an order and do the same work, in the thread; returns the future of the work's result."""

        def send_and_run() -> Any:
            self._process_group.broadcast(order)
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - other ranks run the order, and wait for this rank
                self._process_group.fail_group(error)

        return StepFuture(self._dispatcher.submit(send_and_run))


class OrderFollower:
    """Run of rank 0's orders on another rank, from a step's arguments on."""

    def __init__(self, local: LocalExecutor, process_group: ProcessGroup, arguments: StepArguments):
        self._local, self._process_group, self._arguments = local, process_group, arguments
        self._shapes = {str(shape): shape for shape in local.programs.steps}
        self._outputs: deque[Any] = deque()  # of steps in flight

    def follow(self) -> NoReturn:
        """Run orders, and end this process when the group ends."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 receives Ctrl-C too, and decides
        try:
            for order in self._process_group.receive_orders():
                self._run_order(order)
        except Exception as error:  # noqa: BLE001 - rank 0 would wait for this rank
            self._process_group.fail_group(error)
        if is_main:
            raise SystemExit(0)
        end_process(0)  # SystemExit would end this thread only

    def _run_order(self, order: Order) -> None:
        """Run an order, and keep the step's arguments after it."""
        if order.program == "run":
            self._run_step(self._shapes[order.shape], order)
        elif order.program in SLOT_PROGRAMS:
            slots = self._arguments.slots
            inputs = order.unflatten(SLOT_PROGRAMS[order.program](slots, self._local.programs.sizes))
            slots = getattr(self._local, order.program)(slots, *inputs)
            self._arguments = replace(self._arguments, slots=slots)
        else:
            assert order.program == "empty", order.program
            params = self._arguments.params
            del self._arguments  # frees the old cache: two may not fit
            self._arguments = self._local.fresh_arguments(params)

    def _run_step(self, shape: Shape, order: Order) -> None:
        """Run a step. Waits for the results of older ones, which raises errors of the device."""
        abstract_batch = empty_batch(self._local.programs.sizes, shape, 0)
        batch, inputs = order.unflatten((abstract_batch, dict.fromkeys(order.prompt_results, 0)))
        cache, slots, output = self._local.run(shape, self._arguments, batch, inputs)
        self._arguments = replace(self._arguments, cache=cache, slots=slots)
        self._outputs.append(output)
        if len(self._outputs) > MAX_STEPS_IN_FLIGHT:
            jax.block_until_ready(self._outputs.popleft())


def describe_programs(programs: ProgramTable) -> str:
    """Describe everything that the programs of all shapes depend on."""
    lowering = programs.lowering
    return repr(
        [
            executable_cache.describe_phase(lowering.phases, *lowering.describe(shape))
            for shape in sorted(programs.steps)
        ]
    )


def hash_small_params(params: EngineParams) -> str:
    """Return a hash of the replicated parameters of at most `MAX_HASHED_NUMBERS` numbers."""
    hasher = sha256()
    for x in jax.tree.leaves(params):
        if x.is_fully_replicated and x.size <= MAX_HASHED_NUMBERS:
            hasher.update(np.asarray(x).tobytes())
    return hasher.hexdigest()
