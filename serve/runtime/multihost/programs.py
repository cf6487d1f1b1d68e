"""Programs on a mesh of several processes: each call on rank 0 is an order to the other ranks."""

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
from ..compiled.batches import empty_batch
from ..compiled.compile import SLOT_PROGRAMS, Programs
from ..compiled.futures import StepFuture, wait_result
from ..compiled.lowering import StepArguments, abstract_operands
from ..compiled.shapes import Shape
from .group import ProcessGroup
from .messages import Order
from .rendezvous import check_same_facts, current_group
from .supervisor import end_process

MAX_STEPS_IN_FLIGHT = 2  # number of steps whose results a rank has not waited for, at most
MAX_HASHED_NUMBERS = 1 << 20  # numbers of a parameter that is compared between ranks, at most


class SharedPrograms(Programs):
    """Programs that all processes of a group compile, and run together.

    Until `start_serving`, model and options decide which programs each process runs. From then on rank 0's
    engine decides. A thread of rank 0 sends each call to the other ranks and makes it: so a caller that is
    interrupted leaves no call incomplete. Results are futures. A call that fails ends the group.
    """

    def __init__(self, phases: Any, params: EngineParams, *others: Any):
        process_group = current_group()
        assert process_group is not None, "parameters lie on other processes' devices, and there is no group"
        self.process_group: ProcessGroup = process_group
        self._dispatcher: ThreadPoolExecutor | None = None  # rank 0's thread, from `begin` on
        self._outputs: deque[Any] = deque()  # outputs of steps in flight, on the other ranks
        check_same_facts({"sizes": repr(others), "weights": hash_small_params(params)})
        super().__init__(phases, params, *others)
        check_same_facts({"programs": self._describe_programs()})

    def start_serving(self, arguments: StepArguments) -> None:
        """Prepare rank 0 for requests. On other ranks, run rank 0's orders and never return."""
        self.process_group.is_serving = True
        if self.process_group.rank:
            self._follow_orders(arguments)
        self._dispatcher = ThreadPoolExecutor(1, "duetto-order-dispatcher")
        for program in SLOT_PROGRAMS:
            setattr(self, program, self._wrap_slot_program(program, getattr(self, program)))

    def _describe_programs(self) -> str:
        """Describe everything that the programs of all shapes depend on."""
        phase_operands = (
            (shape.phase, abstract_operands(shape, self.abstract_arguments, self.sizes))
            for shape in sorted(self.steps)
        )
        return repr([executable_cache.describe_phase(self._phases, *phase) for phase in phase_operands])

    def close(self) -> None:
        if self._dispatcher is not None:
            self._dispatcher.shutdown()
            self.process_group.end_group()

    # ------------------------------------------------------------ rank 0

    @property
    def can_defer_sampling(self) -> bool:
        return False

    def run(self, shape: Shape, arguments: StepArguments, batch: Batch) -> tuple[Any, Any, Any]:
        if self._dispatcher is None:
            return super().run(shape, arguments, batch)
        cache, slots = arguments.cache, arguments.slots
        job = self._dispatch_to_ranks(
            Order.from_tree("run", str(shape), batch),
            lambda: self._run_locally(
                shape, StepArguments(arguments.params, wait_result(cache), wait_result(slots)), batch
            ),
        )
        return job.part(0), job.part(1), job.part(2)

    def fresh_arguments(self, params: EngineParams, failure: BaseException | None = None) -> StepArguments:
        if self._dispatcher is None:
            return super().fresh_arguments(params, failure)
        self._dispatcher.submit(int).result()  # calls under way hold arrays
        if failure is not None and isinstance(failure, jax.errors.JaxRuntimeError):
            # other ranks' programs may wait for the program that failed here
            self.process_group.fail_group(failure)
        clear_frames(failure)
        job = self._dispatch_to_ranks(Order("empty"), lambda: (self.fresh_cache(), self.fresh_slots()))
        return StepArguments(params, job.part(0), job.part(1))

    def _run_locally(self, *call: Any) -> tuple[Any, Any, Any]:
        return super().run(*call)

    def _wrap_slot_program(
        self, program: str, program_function: Callable[..., Any]
    ) -> Callable[..., StepFuture]:
        """Wrap a program that changes slots so that all processes call it."""

        def dispatch(slots: Any, *inputs: Any) -> StepFuture:
            return self._dispatch_to_ranks(
                Order.from_tree(program, "", inputs), lambda: program_function(wait_result(slots), *inputs)
            )

        return dispatch

    def _dispatch_to_ranks(self, order: Order, work: Callable[[], Any]) -> StepFuture:
        """Send an order and do the same work, in rank 0's thread; returns the future of the work's result."""
        assert self._dispatcher is not None

        def send_and_run() -> Any:
            self.process_group.broadcast(order)
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - other ranks run the order, and wait for this rank
                self.process_group.fail_group(error)

        return StepFuture(self._dispatcher.submit(send_and_run))

    # ------------------------------------------------------------ other ranks

    def _follow_orders(self, arguments: StepArguments) -> NoReturn:
        """Run rank 0's orders, and end this process when the group ends."""
        shapes, held_arguments = {str(shape): shape for shape in self.steps}, [arguments]
        is_main = threading.current_thread() is threading.main_thread()
        if is_main:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 receives Ctrl-C too, and decides
        try:
            for order in self.process_group.receive_orders():
                held_arguments.append(self._run_order(order, held_arguments.pop(), shapes.get(order.shape)))
        except Exception as error:  # noqa: BLE001 - rank 0 would wait for this rank
            self.process_group.fail_group(error)
        if is_main:
            raise SystemExit(0)
        end_process(0)  # SystemExit would end this thread only

    def _run_order(self, order: Order, arguments: StepArguments, shape: Shape | None) -> StepArguments:
        """Run an order; returns the step's arguments after it."""
        if order.program == "run" and shape is not None:
            batch = order.unflatten(empty_batch(self.sizes, shape, 0))
            cache, slots, output = super().run(shape, arguments, batch)
            self._outputs.append(output)
            if len(self._outputs) > MAX_STEPS_IN_FLIGHT:  # waiting raises errors of the device
                jax.block_until_ready(self._outputs.popleft())
            return replace(arguments, cache=cache, slots=slots)
        if order.program in SLOT_PROGRAMS:
            inputs = order.unflatten(SLOT_PROGRAMS[order.program](arguments.slots, self.sizes))
            return replace(arguments, slots=getattr(self, order.program)(arguments.slots, *inputs))
        assert order.program == "empty", order.program
        params = arguments.params
        del arguments  # frees the old cache: two may not fit
        return super().fresh_arguments(params)


def hash_small_params(params: EngineParams) -> str:
    """Return a hash of the replicated parameters of at most `MAX_HASHED_NUMBERS` numbers."""
    hasher = sha256()
    for x in jax.tree.leaves(params):
        if x.is_fully_replicated and x.size <= MAX_HASHED_NUMBERS:
            hasher.update(np.asarray(x).tobytes())
    return hasher.hexdigest()
