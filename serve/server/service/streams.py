"""Pieces of completions on their way from the engine's thread to a reader in the event loop."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.types import Receive

from ...text.outputs import CompletionOutput
from .errors import ClientLeft, HttpError

T = TypeVar("T")
Outputs = list[CompletionOutput]


class OutputStream:
    """Buffers the pieces of a request's completions. `leave` ends the request in the engine; it is called
    also when more than `most` pieces are unread."""

    def __init__(self, leave: Callable[[], None], most: int):
        self._leave, self._most = leave, most
        self._pieces: Outputs = []
        self._waiter: asyncio.Future[None] | None = None  # of a reader that waits for more
        self.count = self.choices = 0  # flows that have not ended; completions in all
        self.is_silent = False  # no piece has arrived since this was set
        self._error: Exception | None = None

    def put(self, outputs: Outputs, at_end: bool) -> None:
        self._pieces += outputs
        self.count -= at_end
        self.is_silent = False
        if len(self._pieces) > self._most:
            self.fail(HttpError(503, f"{self._most} pieces wait to be read", "slow_reader"))
            self._leave()
        self.wake()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def pieces(self) -> AsyncGenerator[Outputs]:
        """Yield the pieces since the last time; an empty list after `wake` without new ones. Raises HttpError
        if the request failed. A reader that stops before the end ends the request."""
        try:
            while self.count or self._pieces:
                if not self._pieces and self._error is None:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
                if self._error is not None:
                    raise self._error
                found, self._pieces = self._pieces, []
                yield found
        finally:
            if self.count:
                self._leave()

    async def ended(self) -> None:
        """Wait for the end. Raises HttpError if the request failed."""
        async for _ in self.pieces():
            pass


async def while_read(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of work, which is cancelled if the client disconnects. Raises ClientLeft then."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        leaving.cancel()
        await cancelled(working)


async def disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancelled(work: "asyncio.Future[Any]") -> None:
    """Cancel work, and wait until it has cleaned up."""
    if not work.done():
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def within(seconds: float, work: Awaitable[T], status: int, message: str) -> T:
    """Return the result of work. Raises HttpError after `seconds`."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise HttpError(status, message, "timeout") from None
