"""Routes of a server, their OpenAPI document, and the page on which they can be tried."""

import base64
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import version
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...text.openai.reply_types import ErrorReply
from ...text.openai.schemas import Body, Schemas

PAGE = pathlib.Path(__file__).with_name("docs.html")
JSON, EVENTS = "application/json", "text/event-stream"
READ_ERRORS = (400, 403, 408, 413, 500)  # errors of routes that read a body
ERRORS = {
    400: "the request is not allowed; the message says why",
    401: "the API key is missing or unknown",
    403: "a page of another origin may not ask",
    404: "there is no such model, or adapter",
    408: "the body comes too slowly",
    409: "what is asked for does not go with what is under way",
    413: "the body is too long",
    429: "too many requests wait",
    500: "the server has failed",
    501: "the model has no tokenizer",
    503: "the server is ending, or the request has waited too long",
}


@dataclass(frozen=True)
class Path:
    """A route.

    path: as Starlette writes it
    answer: an ASGI application, or a function from a request to a response
    about: summary for the document
    reply: type of the JSON, if `media` is JSON
    event: type of a stream's events
    body: body of a POST
    errors: status codes
    media: type of the reply; None: it is empty
    is_open: whether it needs no key
    changes: whether it is a POST without a body
    query: allowed query parameters, and their values
    """

    path: str
    answer: Any
    about: str
    reply: Any = None
    event: Any = None
    body: Body | None = None
    errors: Sequence[int] = ()
    media: str | None = JSON
    is_open: bool = False
    changes: bool = False
    query: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return "GET" if self.body is None and not self.changes else "POST"

    @property
    def route(self) -> Route:
        return Route(self.path, self.answer, methods=[self.method])

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it."""
        return re.sub(r"{(\w+):\w+}", r"{\1}", self.path)


def document(paths: Sequence[Path], release: str, has_keys: bool) -> dict[str, Any]:
    schemas, operations = Schemas(), {}
    for path in paths:
        operations.setdefault(path.template, {})[path.method.lower()] = operation(path, schemas, has_keys)
    keys = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if has_keys else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "duetto", "version": release},
        "paths": operations,
        "components": {"schemas": schemas.found} | keys,
    } | ({"security": [{"key": []}]} if has_keys else {})


def operation(path: Path, schemas: Schemas, has_keys: bool) -> dict[str, Any]:
    asks_key = has_keys and not path.is_open
    errors = sorted({*path.errors, 401} if asks_key else path.errors)
    error = content(None if path.media is None and path.is_open else JSON, schemas.of(ErrorReply))
    found: dict[str, Any] = {
        "summary": path.about,
        "operationId": re.sub(r"\W+", "_", f"{path.method.lower()}{path.template}").strip("_"),
        "responses": {"200": replies(path, schemas)}
        | {str(status): {"description": ERRORS[status]} | error for status in errors},
    }
    if variables := re.findall(r"{(\w+)}", path.template):
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in variables
        ]
    if path.query:
        found["parameters"] = [
            {"name": name, "in": "query", "schema": {"enum": list(values)}}
            for name, values in path.query.items()
        ]
    if path.body is not None:
        shown = {"schema": schemas.body(path.body), "example": path.body.example}
        found["requestBody"] = {"required": True, "content": {JSON: shown}}
    if has_keys and path.is_open:
        found["security"] = []
    return found


def replies(path: Path, schemas: Schemas) -> dict[str, Any]:
    kind = {"type": "string"} if path.reply is None else schemas.of(path.reply)
    found = {"description": "the answer"} | content(path.media, kind)
    if path.event is not None:
        found["content"] |= content(EVENTS, event(schemas.of(path.event), schemas.of(ErrorReply)))["content"]
    return found


def event(kind: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a stream's events; a stream that fails ends with an error."""
    held = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": [kind, error]}}
    data = {"anyOf": [{"const": "[DONE]"}, held]}
    about = "with stream true: server-sent events, each of these fields"
    return {"type": "object", "description": about, "properties": {"data": data}, "required": ["data"]}


def content(media: str | None, schema: dict[str, Any]) -> dict[str, Any]:
    return {} if media is None else {"content": {media: {"schema": schema}}}


class ApiPage:
    """Serves the OpenAPI document of all routes, its own included, and a page for people."""

    def __init__(self, others: Sequence[Path], has_keys: bool):
        self.paths = [
            Path("/openapi.json", self.openapi, "this document", reply=dict[str, Any], is_open=True),
            Path("/docs", self.docs, "a page to try all of this", media="text/html", is_open=True),
        ]
        self._document = msgspec.json.encode(document([*others, *self.paths], version("duetto"), has_keys))
        self._page = PAGE.read_bytes()
        self._headers = {
            "content-security-policy": policy(self._page),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    async def openapi(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def docs(self, request: Request) -> Response:
        return Response(self._page, headers=self._headers, media_type="text/html")


def policy(page: bytes) -> str:
    """Return a policy by which a browser runs the page's own script and style and connects to its own server,
    nothing else."""
    script, style = (f"'sha256-{digest(page, name)}'" for name in (b"script", b"style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def digest(page: bytes, name: bytes) -> str:
    """Return the digest of the content of the page's only element of this name."""
    (held,) = re.findall(b"<%b>(.*?)</%b>" % (name, name), page, re.DOTALL)
    return base64.b64encode(sha256(held).digest()).decode()
