"""Admission of requests to the event loop's helpers: memory for bodies, and threads that parse and tokenize
them. Clients share both in a fair order."""

import asyncio
import os
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from threading import Lock
from typing import Any, TypeVar

from starlette.types import Receive

from ...options.server import ServerOptions
from ...text.openai.errors import parse_request_object
from .client_connection import run_while_connected
from .errors import HttpError
from .fair_queue import FairQueue

T = TypeVar("T")
SMALL_BYTES = 1 << 14  # a body up to this is parsed faster than its connection is watched and threads change
SHORT_BYTES = 1 << 16  # a body up to this is buffered by the HTTP protocol before a route reads it
POOL_BYTES = SHORT_BYTES, 1 << 20  # a body up to these does not wait behind a longer one
MARK_BYTES = 16  # bytes of the longest body for each mark (comma, colon, opening bracket) that it may have
MAX_BODIES = 8  # longest bodies that are in memory at a time
MAX_CLIENT_BODIES = 2  # longest bodies of one client that are in memory at a time
POOL_THREADS = max(1, min(4, (os.cpu_count() or 1) // 8))  # more would slow the engine's thread


@dataclass(order=True)
class Waiter:
    """Request in a fair line.

    position: position in the fair queue
    arrival: order of arrival
    client: name of the API key that sent it, "" without keys
    size: bytes of its body
    future: future that is done when the request is served, or has an error if it is refused
    work: work that a thread does when the request is served
    undo: called with a result that no caller awaits any more
    is_served: whether it has been served
    """

    position: int
    arrival: int
    client: str = field(compare=False)
    size: int = field(compare=False)
    future: Any = field(compare=False)
    work: Callable[[], Any] = field(default=int, compare=False)
    undo: Callable[[Any], Any] = field(default=bool, compare=False)
    is_served: bool = field(default=False, compare=False)

    def finish(self, result: Any, error: BaseException | None, is_over: bool = False) -> None:
        """Set the result of the work or its error. If the future is done or the event loop is over, undo the
        result."""
        is_over = is_over or self.future.done()
        if error is None:
            (self.undo if is_over else self.future.set_result)(result)
        elif not is_over:
            self.future.set_exception(error)


class WaitQueue:
    """Waiting requests, in the order of a fair queue by bytes. If more than `max_waiting` wait, the last one
    is refused: its client has many bytes in line, and need not be the latest."""

    def __init__(self, max_waiting: int):
        self._max_waiting, self._queue, self._arrivals = max_waiting, FairQueue(), count()
        self.waiting: list[Waiter] = []

    def add(self, client: str, size: int, *others: Any) -> Waiter:
        """Add a request in its position. `others` are further fields of the Waiter."""
        waiter = Waiter(
            self._queue.assign_position(client, size), next(self._arrivals), client, size, *others
        )
        insort(self.waiting, waiter)
        return waiter

    def mark_served(self, waiter: Waiter) -> None:
        self.waiting.remove(waiter)
        self._queue.on_served(waiter.position)
        waiter.is_served = True

    def remove(self, waiter: Waiter) -> None:
        if waiter in self.waiting:
            self.waiting.remove(waiter)

    def refuse_last(self) -> None:
        """Refuse the last request with HttpError, if too many wait."""
        if len(self.waiting) > self._max_waiting and not (future := self.waiting.pop().future).done():
            reason = f"{self._max_waiting} requests wait already to be read"
            future.set_exception(HttpError(429, reason, "too_many_requests"))


class FairByteSemaphore:
    """Lends bytes of memory to requests: at most `capacity` to all, and `share` to one client. Other requests
    wait. It is used in one event loop."""

    def __init__(self, capacity: int, share: int, max_waiting: int):
        self._free, self._share = capacity, share
        self._acquired_bytes, self._wait_queue = Counter[str](), WaitQueue(max_waiting)

    @asynccontextmanager
    async def acquire(self, client: str, size: int) -> AsyncIterator[Waiter]:
        """Wait for `size` bytes, and yield the Waiter that has them. Its bytes are returned after the block.
        Raises HttpError if too many wait."""
        assert size <= min(self._share, self._free + self._acquired_bytes.total())
        future = asyncio.get_running_loop().create_future()
        waiter = self._wait_queue.add(client, size, future)
        self._grant_waiting()
        self._wait_queue.refuse_last()
        try:
            await future
            yield waiter
        finally:
            self._release(waiter)

    def shrink_acquired(self, waiter: Waiter, size: int) -> None:
        """Reduce a waiter's bytes to `size`, and lend the rest to others."""
        surplus, waiter.size = waiter.size - size, size
        self._free += surplus
        self._acquired_bytes[waiter.client] -= surplus
        self._grant_waiting()

    def _grant_waiting(self) -> None:
        """Lend bytes to waiting requests in order. A smaller request does not overtake another client's
        larger one."""
        for waiter in list(self._wait_queue.waiting):
            if self._acquired_bytes[waiter.client] + waiter.size > self._share:
                continue
            if waiter.size > self._free:
                return
            self._wait_queue.mark_served(waiter)
            self._free -= waiter.size
            self._acquired_bytes[waiter.client] += waiter.size
            if not waiter.future.done():  # else its client has left
                waiter.future.set_result(None)

    def _release(self, waiter: Waiter) -> None:
        self._wait_queue.remove(waiter)
        if waiter.is_served:
            self._free += waiter.size
            self._acquired_bytes[waiter.client] -= waiter.size
            self._acquired_bytes += Counter()  # forgets clients that have none
        self._grant_waiting()


class FairThreadPool:
    """Threads for the work of clients, in a fair order. Threads choose the next request themselves, since the
    event loop may be busy for longer than the work."""

    def __init__(self, max_waiting: int):
        self._wait_queue, self._lock = WaitQueue(max_waiting), Lock()
        self._threads = ThreadPoolExecutor(POOL_THREADS, "duetto-request-reader")

    async def run(
        self, client: str, size: int, work: Callable[[], T], undo: Callable[[T], Any] = lambda _: None
    ) -> T:
        """Do work in a thread, and return its result. If this coroutine is cancelled, waiting work never
        begins, and `undo` gets the result of running work. Raises HttpError if too many wait."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with self._lock:
            waiter = self._wait_queue.add(client, size, future, work, undo)
            self._wait_queue.refuse_last()
        loop.run_in_executor(self._threads, self._run_next)
        try:
            return await future
        finally:
            if future.cancelled():
                with self._lock:
                    self._wait_queue.remove(waiter)
            del future, waiter  # as in `_run_next`

    def _run_next(self) -> None:
        with self._lock:
            if not self._wait_queue.waiting:
                return
            waiter = self._wait_queue.waiting[0]
            self._wait_queue.mark_served(waiter)
        result, error = capture_outcome(waiter.work)
        try:
            waiter.future.get_loop().call_soon_threadsafe(waiter.finish, result, error)
        except RuntimeError:  # the loop is closed
            waiter.finish(result, error, is_over=True)
        # the frames of an error would keep it, and what the work had, in a cycle
        del waiter, result, error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def capture_outcome(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """Call `work`. Returns its result and None, or None and its error."""
    try:
        return work(), None
    except BaseException as error:  # noqa: BLE001 - the caller gets it
        return None, error


@dataclass
class ClientBody:
    """The body of a request on its way to the engine.

    admission: limits that it shares with other bodies
    client: name of the API key that sent it, "" without keys
    cost: its bytes, 1 or more
    max_seconds: maximum seconds from the arrival to the first token
    receive: reports the client's disconnect; None if it is not noticed
    data: its bytes, until `release`
    deadline: deadline of the first token, on the event loop's clock
    """

    admission: "Admission"
    client: str
    cost: int
    max_seconds: float
    receive: Receive | None
    data: bytes = b""

    def __post_init__(self):
        self._memory, self._waiter = AsyncExitStack(), None
        self.renew_deadline()

    def renew_deadline(self) -> None:
        """Set the deadline of the first token anew, for the next part of a request."""
        self.deadline = asyncio.get_running_loop().time() + self.max_seconds

    def set_data(self, data: bytes) -> None:
        """Set the whole body, and return the reserved bytes that it does not fill."""
        self.data, self.cost = data, max(1, len(data))
        if self._waiter is not None:
            self.admission.body_semaphore.shrink_acquired(self._waiter, len(data))

    def parse_object(self) -> dict[str, Any]:
        """Parse the body as a JSON object. Raises RequestError."""
        return parse_request_object(self.data, "body", self.admission.max_marks)

    async def run_in_thread(self, work: Callable[[], T], undo: Callable[[T], Any] = lambda _: None) -> T:
        """Do work in a thread for bodies of this size, and return its result. `undo` gets a result that comes
        too late. Raises as `await_while_connected` does (a small body ignores a disconnect), and HttpError if
        too many requests wait."""
        running = self.admission.body_pool(self.cost).run(self.client, self.cost, work, undo)
        return await (
            self._run_until_deadline(running) if self.is_small else self.await_while_connected(running)
        )

    @property
    def is_small(self) -> bool:
        return self.cost <= SMALL_BYTES

    async def await_while_connected(self, work: Awaitable[T]) -> T:
        """Return the result of work. Cancels it and raises ClientLeft if the client disconnects, HttpError at
        `deadline`."""
        return await self._run_until_deadline(
            work if self.receive is None else run_while_connected(self.receive, work)
        )

    async def _run_until_deadline(self, work: Awaitable[T]) -> T:
        try:
            async with asyncio.timeout_at(self.deadline):
                return await work
        except TimeoutError:
            raise self.timeout_error() from None

    def timeout_error(self) -> HttpError:
        return HttpError(503, f"nothing was generated within {self.max_seconds:g} s", "max_wait")

    async def acquire_memory(self, size: int) -> None:
        """Wait until `size` bytes may be read. Raises HttpError at the deadline, or if too many wait."""
        room = self.admission.body_semaphore.acquire(self.client, size)
        self._waiter = await self._run_until_deadline(self._memory.enter_async_context(room))

    async def release(self) -> None:
        """Drop the bytes of the body, and return its room to other bodies."""
        self.data = b""
        await self._memory.aclose()


class Admission:
    """Limits the bodies of all clients: their memory, and the work on them before the engine.

    body_semaphore: gate to the memory of bodies above SHORT_BYTES, in bytes; without keys all clients share
    it
    answer_pool: threads that write whole answers, in a fair order by their tokens
    max_marks: maximum commas, colons and opening brackets of a body's JSON
    """

    def __init__(self, options: ServerOptions):
        self.options = options
        self.max_marks = max(SHORT_BYTES, options.max_body // MARK_BYTES)
        capacity = MAX_BODIES * options.max_body
        share = capacity if options.api_key_file is None else MAX_CLIENT_BODIES * options.max_body
        self.body_semaphore = FairByteSemaphore(capacity, share, options.max_queued)
        self.answer_pool = FairThreadPool(options.max_queued)
        self._body_pools = [FairThreadPool(options.max_queued) for _ in range(len(POOL_BYTES) + 1)]

    def new_body(self, client: str = "", receive: Receive | None = None) -> ClientBody:
        return ClientBody(self, client, 1, self.options.queue_timeout, receive)

    def body_pool(self, size: int) -> FairThreadPool:
        return self._body_pools[bisect_left(POOL_BYTES, size)]

    def close(self) -> None:
        for lane in (self.answer_pool, *self._body_pools):
            lane.close()
