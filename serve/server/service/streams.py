"""Outputs of completions on their way from the engine's thread to a reader in the event loop."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.types import Receive

from ...text.outputs import CompletionOutput
from .errors import ClientLeft, HttpError

T = TypeVar("T")
CompletionOutputs = list[CompletionOutput]


class OutputStream:
    """Buffer of a request's outputs.

    end_request: ends the request in the engine; also called if more than `max_pieces` outputs are unread
    num_unfinished: requests of the driver that have not ended
    num_choices: completions of all requests of the driver
    is_silent: no output has arrived since this was set
    """

    def __init__(self, end_request: Callable[[], None], max_pieces: int):
        self._end_request, self._max_pieces = end_request, max_pieces
        self._pieces: CompletionOutputs = []
        self._waiter: asyncio.Future[None] | None = None  # set while the reader waits for outputs
        self.num_unfinished = self.num_choices = 0
        self.is_silent = False
        self._error: Exception | None = None

    def put(self, outputs: CompletionOutputs, at_end: bool) -> None:
        self._pieces += outputs
        self.num_unfinished -= at_end
        self.is_silent = False
        if len(self._pieces) > self._max_pieces:
            self._pieces = []
            self.fail(HttpError(503, f"{self._max_pieces} pieces wait to be read", "slow_reader"))
            self._end_request()
        self.wake()

    def fail(self, error: Exception) -> None:
        self._error = self._error or error
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read_pieces(self) -> AsyncGenerator[CompletionOutputs]:
        """Yield the outputs since the last time; [] after `wake` without new ones. Raises HttpError after the
        last output if the request failed. A reader that stops before the end ends the request."""
        try:
            while self.num_unfinished or self._pieces or self._error is not None:
                if not self._pieces and self._error is None:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
                if self._error is not None and not self._pieces:
                    raise self._error
                pieces, self._pieces = self._pieces, []
                yield pieces
        finally:
            if self.num_unfinished:
                self._end_request()

    async def wait_end(self) -> None:
        """Wait for the end of the request, and discard its outputs. Raises HttpError if it failed."""
        async for _ in self.read_pieces():
            pass


async def run_while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of work. If the client disconnects, cancel the work and raise ClientLeft."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(wait_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return working.result()
    finally:
        leaving.cancel()
        await cancel_and_wait(working)
        del working  # or the frames of its error would keep it in a cycle


async def wait_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_and_wait(work: "asyncio.Future[Any]") -> None:
    """Cancel work, and wait until it has cleaned up."""
    if not work.done():
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def wait_with_timeout(seconds: float, work: Awaitable[T], status: int, message: str) -> T:
    """Return the result of work. Cancel it after `seconds`, and raise HttpError with `status` and
    `message`."""
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise HttpError(status, message, "timeout") from None
