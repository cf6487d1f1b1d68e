"""Steps in worker threads for event loops, and orders to a thread that owns an engine."""

import asyncio
import queue
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any, TypeVar

T = TypeVar("T")
Orders = queue.SimpleQueue[Callable[[], None] | None]


def obey(orders: Orders, wait: bool) -> bool:
    """Do what was asked for since the last step, or wait for it where there is nothing to do; False at the
    end."""
    while wait or not orders.empty():
        order = orders.get()
        if order is None:
            return False
        order()
        wait = False
    return True


async def finished(work: Callable[[], T], undo: Callable[[T], None]) -> T:
    """What work in a thread gives; `undo` takes it back where this is cancelled meanwhile."""
    future = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        future.add_done_callback(lambda done: done.exception() or undo(done.result()))
        raise


class Gate:
    """Lets steps begin while it is open."""

    def __init__(self):
        self._open = asyncio.Event()
        self._open.set()
        self._running: set[asyncio.Future[Any]] = set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def open(self) -> None:
        self._open.set()

    async def close(self) -> None:
        """Returns when all steps that had begun have ended."""
        self._open.clear()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def begin(self, work: Callable[[], T]) -> "asyncio.Future[T]":
        """Work in a thread, as soon as the gate is open."""
        await self._open.wait()
        future = asyncio.ensure_future(asyncio.to_thread(work))
        self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future


async def in_threads(start: Callable[[], Generator[T]], gate: Gate | None = None) -> AsyncGenerator[T]:
    """What the generator that `start` makes yields; closing or cancelling this closes that one, after a step
    under way."""
    gate = gate or Gate()
    pieces = await asyncio.to_thread(start)
    coming: asyncio.Future[T | None] | None = None
    try:
        while True:
            coming = await gate.begin(lambda: next(pieces, None))
            if (piece := await asyncio.shield(coming)) is None:
                return
            yield piece
    finally:
        if coming is not None:  # a cancelled task's step still runs in its thread
            await asyncio.gather(coming, return_exceptions=True)
        await asyncio.to_thread(pieces.close)
