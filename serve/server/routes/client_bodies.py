"""Bodies of requests, which are read once there is room for them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request

from ...options.server import ServerOptions
from ..service.body_admission import Admission, ClientBody
from .body import body_too_long_error, discard_body, read_body


@asynccontextmanager
async def admit_body(request: Request, admission: Admission) -> AsyncIterator[ClientBody]:
    """Wait for room for a body, read it, and yield it. It occupies the room until `ClientBody.release` or the
    end of the block. Raises as `read_body` does, and HttpError if too many wait or room comes too late."""
    options = admission.options
    if (size := announced_bytes(request, options)) > options.max_body:
        await discard_body(request, options.max_body)
        raise body_too_long_error(options.max_body)
    client_body = admission.new_body(request.scope.get("client_name", ""), request.receive)
    try:
        client_body.set_data(await read_body(request, options, partial(client_body.acquire_memory, size)))
        yield client_body
    finally:
        await client_body.release()


def announced_bytes(request: Request, options: ServerOptions) -> int:
    """Return the number of bytes that the head of a request announces for its body, else the limit."""
    size = request.headers.get("content-length", "")
    return int(size) if size.isascii() and size.isdecimal() else options.max_body


async def read_object(request: Request, admission: Admission) -> dict[str, Any]:
    """Read a body and parse its JSON object. Raises as `admit_body` does, and RequestError."""
    async with admit_body(request, admission) as client_body:
        return await client_body.run_in_thread(client_body.parse_object)
