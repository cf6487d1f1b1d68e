"""Errors in the format of OpenAI's API."""

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ...text.openai.errors import RequestError, encodable

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
LONGEST = 1000  # characters of a message
UNREAD = (401, 403, 408, 413)  # answered before the body was read: the connection is closed
LEFT = 499  # never sent: the client has disconnected
UNKEPT = "; no response is kept: send the whole conversation as input"
RETRY = "1"  # seconds after which a client may try again


class ClientLeft(Exception):
    """The client has disconnected."""


class HttpError(Exception):
    """An error that ends a request: status, message, the code for programs, and the field."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else TYPES.get(self.status, "invalid_request_error")
        error_body = {
            "message": encodable(str(self))[:LONGEST],
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error_body}

    def response(self) -> Response:
        headers = {"retry-after": RETRY} if self.status in (429, 503) else {}
        if self.status in UNREAD:
            headers["connection"] = "close"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return json_response(self.body, self.status, headers)


async def answer_error(request: Request, error: Exception) -> Response:
    """Return the answer to an error. The client learns the reason only of errors in its request."""
    match error:
        case HttpError():
            return error.response()
        case RequestError():
            return HttpError(400, str(error), error.code, error.param).response()
        case ClientLeft():
            return Response(status_code=LEFT)
        case HTTPException():  # Starlette's own: no such path, another method
            path = request.url.path
            why = UNKEPT if path.startswith("/v1/responses/") else ""
            error_body = f"{request.method} {path}: {error.detail}{why}"
            response = HttpError(error.status_code, error_body).response()
            response.headers.update(error.headers or {})
            return response
    return HttpError(500, "the server has failed; its log says how", "internal_error").response()


HANDLERS = dict.fromkeys((HttpError, RequestError, ClientLeft, HTTPException, Exception), answer_error)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, "application/json")
