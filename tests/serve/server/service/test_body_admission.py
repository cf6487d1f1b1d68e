"""Who is read and worked on next, and what is never done for clients that have left."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from duetto.serve.options.server import ServerOptions
from duetto.serve.server.service import body_admission as admissions
from duetto.serve.server.service.body_admission import POOL_BYTES, SMALL_BYTES, Admission, FairByteSemaphore
from duetto.serve.server.service.client_connection import ClientLeft
from duetto.serve.server.service.errors import HttpError


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """A lane has more on larger machines."""
    monkeypatch.setattr(admissions, "POOL_THREADS", 1)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


class GateLog:
    """Clients that hold units of a gate until a test ends their turns."""

    def __init__(self, gate: FairByteSemaphore):
        self._gate, self.begun = gate, []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    def ask(self, name: str, units: int = 1) -> None:
        """Ask for units; the first letter of the name is the client."""
        self._ends[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._hold(name, units))

    async def _hold(self, name: str, units: int) -> None:
        async with self._gate.acquire(name[0], units):
            self.begun.append(name)
            await self._ends[name].wait()

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await asyncio.gather(self._tasks[name], return_exceptions=True)
        await settle()

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await self.end(name)

    async def error(self, name: str) -> BaseException | None:
        (found,) = await asyncio.gather(self._tasks[name], return_exceptions=True)
        return found


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_many_requests_do_not_delay_another_client():
    async def test() -> None:
        log = GateLog(FairByteSemaphore(1, 1, 100))
        for name in ("a0", "a1", "a2", "a3", "b0"):
            log.ask(name)
        await settle()
        assert log.begun == ["a0"]
        for name in ("a0", "b0", "a1"):
            await log.end(name)
        assert log.begun == ["a0", "b0", "a1", "a2"]

    run(test)


def test_a_client_holds_at_most_its_share():
    async def test() -> None:
        log = GateLog(FairByteSemaphore(10, 4, 100))
        for name, units in (("a0", 3), ("a1", 3), ("b0", 4), ("c0", 3)):
            log.ask(name, units)
        await settle()
        assert log.begun == ["a0", "b0", "c0"]
        await log.end("a0")
        assert log.begun[-1] == "a1"

    run(test)


def test_small_requests_do_not_pass_a_large_one():
    """Or it might wait for ever."""

    async def test() -> None:
        log = GateLog(FairByteSemaphore(10, 10, 100))
        for name, units in (("a0", 6), ("b0", 8), ("c0", 1)):
            log.ask(name, units)
        await settle()
        assert log.begun == ["a0"]
        await log.end("a0")
        assert log.begun == ["a0", "b0", "c0"]

    run(test)


def test_beyond_the_limit_the_last_request_is_refused():
    """Not the latest: a flood does not fill the queue for others."""

    async def test() -> None:
        log = GateLog(FairByteSemaphore(1, 1, 3))
        for name in ("a0", "a1", "a2", "a3", "b0"):
            log.ask(name)
            await settle()
        error = await log.error("a3")
        assert isinstance(error, HttpError) and error.status == 429
        assert error.to_response().headers["retry-after"] == "1"
        await log.end("a0")
        assert log.begun == ["a0", "b0"]

    run(test)


def test_leaving_clients_release_what_they_hold_or_await():
    async def test() -> None:
        gate = FairByteSemaphore(1, 1, 100)
        log = GateLog(gate)
        for name in ("a0", "a1", "b0", "c0"):
            log.ask(name)
        await settle()
        for name in ("b0", "a0"):
            await log.leave(name)
        assert log.begun == ["a0", "c0"]
        for name in ("c0", "a1"):
            await log.leave(name)
        assert (gate._free, gate._acquired_bytes, gate._wait_queue.waiting) == (1, {}, [])

    run(test)


class Leaver:
    """A connection whose client leaves when a test says so."""

    def __init__(self):
        self.has_left = asyncio.Event()

    async def receive(self) -> Any:
        await self.has_left.wait()
        return {"type": "http.disconnect"}


def test_work_of_clients_that_have_left_is_never_begun():
    async def test() -> None:
        admission, leaver = Admission(ServerOptions()), Leaver()
        goes_on, begun = threading.Event(), []

        def work() -> None:
            begun.append(threading.current_thread().name)
            goes_on.wait()

        bodies = [admission.new_body("a", leaver.receive) for _ in range(60)]
        for body in bodies:
            body.set_data(b"x" * (SMALL_BYTES + 1))
        leaving = asyncio.gather(*(body.run_in_thread(work) for body in bodies), return_exceptions=True)
        while not begun:
            await asyncio.sleep(0.001)
        leaver.has_left.set()
        assert all(isinstance(error, ClientLeft) for error in await leaving)
        goes_on.set()
        assert await admission.new_body("a").run_in_thread(lambda: len(begun)) == 1
        admission.close()

    run(test)


def test_short_bodies_do_not_wait_behind_long_ones():
    async def test() -> None:
        admission, goes_on = Admission(ServerOptions()), threading.Event()
        sizes, begun = [1, *(size + 1 for size in POOL_BYTES)], []

        def work() -> None:
            begun.append(0)
            goes_on.wait()

        async def ask(size: int, work: Callable[[], Any]) -> Any:
            client_body = admission.new_body()
            client_body.set_data(b"x" * size)
            return await client_body.run_in_thread(work)

        long = [asyncio.create_task(ask(size, work)) for size in sizes[1:] for _ in range(9)]
        while len(begun) < 2:
            await asyncio.sleep(0.001)
        assert await ask(sizes[0], lambda: "short") == "short"
        goes_on.set()
        await asyncio.gather(*long)
        admission.close()

    run(test)


def test_bodies_wait_for_room_until_the_timeout():
    async def test() -> None:
        admission = Admission(ServerOptions(max_body=100, queue_timeout=0.05, api_key_file="keys"))
        first, *others = [admission.new_body("a") for _ in range(3)]
        for client_body in (first, others[0]):
            await client_body.acquire_memory(100)
        with pytest.raises(HttpError, match="nothing was generated within 0.05 s"):
            await others[1].acquire_memory(100)
        other = admission.new_body("b")
        await other.acquire_memory(100)
        await first.release()
        third = admission.new_body("a")
        await third.acquire_memory(100)
        for client_body in (others[0], other, third):
            await client_body.release()
        admission.close()

    run(test)


def test_an_error_keeps_nothing_of_its_request():
    """A cycle would keep what the work had made until a full collection, or for ever beyond a freeze."""

    class Made:
        pass

    made: list[weakref.ref[Made]] = []

    def work() -> None:
        big = Made()
        made.append(weakref.ref(big))
        raise ValueError("too many")

    async def test() -> None:
        admission = Admission(ServerOptions())
        for size in (1, SMALL_BYTES + 1):
            body = admission.new_body("a", Leaver().receive)
            body.set_data(b"x" * size)
            with pytest.raises(ValueError, match="too many"):
                await body.run_in_thread(work)
        async with asyncio.timeout(30):  # the thread leaves its frames a moment later
            while any(ref() for ref in made):
                await asyncio.sleep(0.001)
        assert len(made) == 2
        admission.close()

    gc.disable()
    try:
        run(test)
    finally:
        gc.enable()
