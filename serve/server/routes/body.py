"""Reading of request bodies within limits of size and time, and the headers between routers and servers."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from starlette.requests import ClientDisconnect, Request

from ...options.server import ServerOptions
from ..service.body_admission import SHORT_BYTES
from ..service.client_connection import ClientLeft, wait_with_timeout
from ..service.errors import HttpError

REALM_HEADER = "x-duetto-realm"  # header: the realm of a ready server's answers
SOURCE_HEADER = "x-duetto-prefill"  # header: the address of the prefill engine for a prompt

LINGER_SECONDS = 1.0  # time that a client has to send the rest of a refused body


async def read_body(
    request: Request, options: ServerOptions, acquire_memory: Callable[[], Awaitable[None]]
) -> bytes:
    """Read a whole body. After SHORT_BYTES it calls `acquire_memory`, which waits for room, and reads on.
    Raises HttpError if the body is too long or too slow, ClientLeft if it ends early."""
    body, stream, seconds = bytearray(), request.stream(), options.receive_timeout
    message = f"the body has not come within {seconds:g} s"
    await wait_with_timeout(seconds, collect_body(stream, body, SHORT_BYTES, options.max_body), 408, message)
    if len(body) > SHORT_BYTES:
        await acquire_memory()
        await wait_with_timeout(
            seconds, collect_body(stream, body, options.max_body, options.max_body), 408, message
        )
    return bytes(body)


async def collect_body(stream: AsyncIterator[bytes], body: bytearray, size: int, max_body: int) -> None:
    """Append pieces of a stream to `body`, until it has more than `size` bytes or the stream ends. Raises
    HttpError for more than `max_body` bytes, ClientLeft if the client disconnects."""
    try:
        async for piece in stream:
            body += piece
            if len(body) > max_body:
                raise body_too_long_error(max_body)
            if len(body) > size:
                return
    except ClientDisconnect:
        raise ClientLeft from None


async def discard_body(request: Request, size: int) -> None:
    """Read up to `size` bytes within `LINGER_SECONDS`, and discard them.

    TCP resets a connection that is closed with unread bytes, and the client then loses the answer.
    """
    with suppress(ClientDisconnect, TimeoutError):
        async with asyncio.timeout(LINGER_SECONDS):
            async for piece in request.stream():
                size -= len(piece)
                if size <= 0:
                    return


def body_too_long_error(max_bytes: int) -> HttpError:
    return HttpError(413, f"the body has more than {max_bytes} bytes", "body_too_long")
