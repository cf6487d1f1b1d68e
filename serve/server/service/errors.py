"""Errors in the format of OpenAI's API."""

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ...text.openai.errors import RequestError, escape_surrogates

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
MAX_MESSAGE_CHARS = 1000  # characters of a message
CLOSING_STATUSES = (401, 403, 408, 413)  # answered before the body was read: the connection is closed
CLIENT_LEFT_STATUS = 499  # never sent: the client has disconnected
UNKEPT_HINT = "; no response is kept: send the whole conversation as input"
RETRY_SECONDS = "1"  # seconds after which a client may try again
# Levels of an answer's JSON that are encoded in parts; the next are a token's log-probabilities.
SPLIT_LEVELS = 5
ENCODER = msgspec.json.Encoder()


class ClientLeft(Exception):
    """The client has disconnected."""


class HttpError(Exception):
    """An error that ends a request.

    status: HTTP status
    code: name of the error, for programs
    param: field of the body that is wrong
    """

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else ERROR_TYPES.get(self.status, "invalid_request_error")
        error_body = {
            "message": escape_surrogates(str(self))[:MAX_MESSAGE_CHARS],
            "type": kind,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error_body}

    def to_response(self) -> Response:
        headers = {"retry-after": RETRY_SECONDS} if self.status in (429, 503) else {}
        if self.status in CLOSING_STATUSES:
            headers["connection"] = "close"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return json_response(self.body, self.status, headers)


async def answer_error(request: Request, error: Exception) -> Response:
    """Return the answer to an error."""
    match error:
        case ClientLeft():
            return Response(status_code=CLIENT_LEFT_STATUS)
        case HTTPException():  # Starlette's own: no such path, another method
            path = request.url.path
            why = UNKEPT_HINT if path.startswith("/v1/responses/") else ""
            error_body = f"{request.method} {path}: {error.detail}{why}"
            response = HttpError(error.status_code, error_body).to_response()
            response.headers.update(error.headers or {})
            return response
    return convert_error(error).to_response()


def convert_error(error: Exception) -> HttpError:
    """Convert an exception to an error for the client. Only errors in its request get their reason."""
    match error:
        case HttpError():
            return error
        case RequestError():
            return HttpError(400, str(error), error.code, error.param)
    return HttpError(500, "the server has failed; its log says how", "internal_error")


ERROR_HANDLERS = dict.fromkeys((HttpError, RequestError, ClientLeft, HTTPException, Exception), answer_error)


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode_json(body), status, headers, "application/json")


def encode_json(value: Any, levels: int = SPLIT_LEVELS) -> bytes:
    """Encode JSON in parts, so that other threads can run in between. The encoder holds the interpreter for
    0.1 us per number, and an answer may have millions."""
    if levels and isinstance(value, dict):
        fields = (
            ENCODER.encode(str(key)) + b":" + encode_json(item, levels - 1) for key, item in value.items()
        )
        return b"{" + b",".join(fields) + b"}"
    if levels and isinstance(value, list) and value and isinstance(value[-1], (dict, list)):
        return b"[" + b",".join(encode_json(item, levels - 1) for item in value) + b"]"
    return ENCODER.encode(value)
