"""Simulated time and processes: an event loop whose clock advances only when nothing is left to do, and
processes that end between two events."""

import asyncio
import contextvars
import hashlib
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

PROCESS: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)
THREAD = 0.002  # seconds after which work of another thread is done, at most


class Stuck(Exception):
    """No event is left, but the simulation has not ended."""


def hashed(loop: "SimulatedLoop", facts: Any) -> str:
    """Return a hash of what has happened in a loop."""
    return hashlib.sha256(repr((loop.events, loop.now, facts)).encode()).hexdigest()[:16]


class Process:
    """A process of the simulation: callbacks of its context run while it is alive."""

    def __init__(self, loop: "SimulatedLoop", name: str):
        self.loop, self.name, self.is_alive, self.is_silent = loop, name, True, False
        loop.processes.append(self)  # coroutines of a killed one must not be closed before the end
        self.on_end: list[Callable[[], None]] = []  # called when it ends
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def run(self, callback: Callable[..., Any], *args: Any) -> None:
        if self.is_alive:
            callback(*args)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self.loop.create_task(work, context=self.context.copy())
        task.add_done_callback(self.loop.note_error)
        self.tasks.append(task)
        return task

    def kill(self, silently: bool = False) -> None:
        """End now: nothing of the process runs any more, not even its `finally` blocks. The other ends of its
        connections hear of it, unless the machine ends `silently`."""
        self.is_alive, self.is_silent = False, silently
        for end in () if silently else self.on_end:
            end()
        for task in self.tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]


class SimulatedSelector:
    """Selector without files: waiting advances the clock."""

    def __init__(self, loop: "SimulatedLoop"):
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            raise Stuck("no event is left")
        self._loop.now += timeout
        return []

    def close(self) -> None: ...


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop in simulated time. Work of other threads is done a moment later in this one.

    connect: makes the connections that clients open.
    errors: exceptions that no code has handled, of live processes.
    """

    def __init__(self, random: Random):
        super().__init__()
        self.now, self.events, self.errors = 0.0, 0, list[BaseException]()
        self.connect: Callable[..., Coroutine[Any, Any, Any]] | None = None
        self._random, self.processes = random, list[Process]()
        self._selector = SimulatedSelector(self)
        self._clock_resolution = 1e-7
        self.set_exception_handler(self._failed)

    def time(self) -> float:
        return self.now

    def _process_events(self, events: Any) -> None: ...
    def _write_to_self(self) -> None: ...

    def _failed(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and not isinstance(error, asyncio.CancelledError):
            self.errors.append(error)

    def note_error(self, task: "asyncio.Task[Any]") -> None:
        """Record the error of a task that has ended."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> asyncio.Handle:
        context = contextvars.copy_context() if context is None else context
        owner = context.get(PROCESS)
        self.events += 1
        if owner is None:
            return super().call_soon(callback, *args, context=context)
        return super().call_soon(owner.run, callback, *args, context=context)

    call_soon_threadsafe = call_soon

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> asyncio.TimerHandle:
        context = contextvars.copy_context() if context is None else context
        owner = context.get(PROCESS)
        self.events += 1
        if owner is None:
            return super().call_at(when, callback, *args, context=context)
        return super().call_at(when, owner.run, callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done = self.create_future()

        def run() -> None:
            try:
                found = func(*args)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(found)

        self.call_later(self._random.random() * THREAD, run)
        return done

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any):
        assert self.connect is not None
        return await self.connect(protocol_factory, host, port)
