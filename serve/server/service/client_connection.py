"""Work for a client that ends if the client disconnects or the time is over."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.types import Receive

from .errors import ClientLeft, HttpError

T = TypeVar("T")


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
