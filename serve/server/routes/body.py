"""Bodies of requests, within their limits, and the headers between routers and servers."""

from starlette.requests import ClientDisconnect, Request

from ...options.server import ServerOptions
from ..service.errors import HttpError
from ..service.streams import ClientLeft, within

REALM = "x-duetto-realm"  # header: the realm of a ready server's answers
SOURCE = "x-duetto-prefill"  # header: the address of the prefill engine for a prompt


async def read_body(request: Request, options: ServerOptions) -> bytes:
    """Return a whole body. Raises HttpError if it is too long or too slow, ClientLeft if it ends early."""
    late = f"the body has not come within {options.receive_timeout:g} s"
    return await within(options.receive_timeout, pieces(request, options.max_body), 408, late)


async def pieces(request: Request, most: int) -> bytes:
    found, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                raise HttpError(413, f"the body has more than {most} bytes", "body_too_long")
            found.append(piece)
    except ClientDisconnect:
        raise ClientLeft from None
    return b"".join(found)
