"""Programs of a mesh over several processes: each call of rank 0 is an order to the other ranks."""

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
from ....model.pair import Params
from ...host.process import release
from ..compiled import executable_cache
from ..compiled.batches import empty_batch
from ..compiled.compile import SLOT_PROGRAMS, Programs, StepArguments, operands
from ..compiled.futures import StepFuture, arrived
from ..compiled.shapes import Shape
from .group import ProcessGroup
from .messages import Order
from .rendezvous import agree, group
from .supervisor import end_process

FLIGHTS = 2  # steps whose results a rank has not waited for, at most
SMALL = 1 << 20  # numbers of a parameter that ranks are compared by, at most


class SharedPrograms(Programs):
    """Programs that all processes of a group compile, and run together.

    Until `begin` each process runs the same programs by itself: model and options decide which. From then on
    rank 0's engine decides. A thread of it sends each call to the other ranks and makes it, so that an
    interrupted caller leaves no call half made; results are futures. A call that fails ends the group.
    """

    def __init__(self, phases: Any, params: Params, *given: Any):
        found = group()
        assert found is not None, "parameters lie on other processes' devices, and there is no group"
        self.group: ProcessGroup = found
        self._calls: ThreadPoolExecutor | None = None  # of rank 0
        self._outputs: deque[Any] = deque()  # of the others' steps in flight
        agree({"sizes": repr(given), "weights": fingerprint(params)})
        super().__init__(phases, params, *given)
        agree({"programs": self._facts()})

    def begin(self, state: StepArguments) -> None:
        self.group.serves = True
        if self.group.rank:
            self._follow(state)
        self._calls = ThreadPoolExecutor(1, "duetto-orders")
        for program in SLOT_PROGRAMS:
            setattr(self, program, self._ordered(program, getattr(self, program)))

    def _facts(self) -> str:
        """Describe all that the programs of all shapes depend on."""
        every = ((shape.phase, operands(shape, self.like, self.sizes)) for shape in sorted(self.steps))
        return repr([executable_cache.described(self._phases, *one) for one in every])

    def close(self) -> None:
        if self._calls is not None:
            self._calls.shutdown()
            self.group.end()

    # ------------------------------------------------------------ rank 0

    def run(self, shape: Shape, arguments: StepArguments, batch: Batch) -> tuple[Any, Any, Any]:
        if self._calls is None:
            return super().run(shape, arguments, batch)
        cache, slots = arguments.cache, arguments.slots
        job = self._call(
            Order.of("run", str(shape), batch),
            lambda: self._run(shape, StepArguments(arguments.params, arrived(cache), arrived(slots)), batch),
        )
        return job.part(0), job.part(1), job.part(2)

    def empty(self, params: Params, failed: BaseException | None = None) -> StepArguments:
        if self._calls is None:
            return super().empty(params, failed)
        self._calls.submit(int).result()  # calls under way hold arrays
        if failed is not None and isinstance(failed, jax.errors.JaxRuntimeError):
            self.group.refuse(failed)  # the others' programs may wait for the one that failed here
        release(failed)
        job = self._call(Order("empty"), lambda: (self.fresh_cache(), self.fresh_slots()))
        return StepArguments(params, job.part(0), job.part(1))

    def _run(self, *call: Any) -> tuple[Any, Any, Any]:
        return super().run(*call)

    def _ordered(self, program: str, compiled: Callable[..., Any]) -> Callable[..., StepFuture]:
        """Wrap a program of the slots so that all processes call it."""

        def call(slots: Any, *given: Any) -> StepFuture:
            return self._call(Order.of(program, "", given), lambda: compiled(arrived(slots), *given))

        return call

    def _call(self, order: Order, work: Callable[[], Any]) -> StepFuture:
        assert self._calls is not None

        def make() -> Any:
            self.group.tell(order)
            try:
                return work()
            except Exception as error:  # noqa: BLE001 - the others have begun it, and wait for this rank
                self.group.refuse(error)

        return StepFuture(self._calls.submit(make))

    # ------------------------------------------------------------ the others

    def _follow(self, state: StepArguments) -> NoReturn:
        """Run rank 0's orders, and end this process when the group ends."""
        shapes, held = {str(shape): shape for shape in self.steps}, [state]
        is_main = threading.current_thread() is threading.main_thread()
        if is_main:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 has it too, and decides
        try:
            for order in self.group.orders():
                held.append(self._obey(order, held.pop(), shapes.get(order.shape)))
        except Exception as error:  # noqa: BLE001 - rank 0 would wait for this rank
            self.group.refuse(error)
        if is_main:
            raise SystemExit(0)
        end_process(0)  # SystemExit would end the thread alone

    def _obey(self, order: Order, state: StepArguments, shape: Shape | None) -> StepArguments:
        if order.program == "run" and shape is not None:
            batch = order.tree(empty_batch(self.sizes, shape, 0))
            cache, slots, output = super().run(shape, state, batch)
            self._outputs.append(output)
            if len(self._outputs) > FLIGHTS:  # so that errors of the device are raised
                jax.block_until_ready(self._outputs.popleft())
            return replace(state, cache=cache, slots=slots)
        if order.program in SLOT_PROGRAMS:
            given = order.tree(SLOT_PROGRAMS[order.program](state.slots, self.sizes))
            return replace(state, slots=getattr(self, order.program)(state.slots, *given))
        assert order.program == "empty", order.program
        params = state.params
        del state  # its cache goes first: two may not fit
        return super().empty(params)


def fingerprint(params: Params) -> str:
    """Hash the small parameters that every device has."""
    found = sha256()
    for x in jax.tree.leaves(params):
        if x.is_fully_replicated and x.size <= SMALL:
            found.update(np.asarray(x).tobytes())
    return found.hexdigest()
