"""Paths of a server: who answers each, and what the OpenAPI document says of it."""

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
READ_ERRORS = (400, 403, 408, 413, 500)  # errors of whoever reads a body
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
    """A path, and who answers it: an ASGI application, or a function from a request to a response.

    `reply` is the type of its JSON where `media` is JSON, `event` that of a stream's events. With a `body` it
    is a POST, and where it `changes` something. `query` are words that may stand behind it, and their values.
    No key is asked for where it `is_open`.
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
    """The OpenAPI document of paths."""
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
    """What is answered where nothing is wrong."""
    kind = {"type": "string"} if path.reply is None else schemas.of(path.reply)
    found = {"description": "the answer"} | content(path.media, kind)
    if path.event is not None:
        found["content"] |= content(EVENTS, event(schemas.of(path.event), schemas.of(ErrorReply)))["content"]
    return found


def event(kind: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    """The schema of each event of a stream; a stream that fails on its way ends with an error."""
    held = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": [kind, error]}}
    data = {"anyOf": [{"const": "[DONE]"}, held]}
    about = "with stream true: server-sent events, each of these fields"
    return {"type": "object", "description": about, "properties": {"data": data}, "required": ["data"]}


def content(media: str | None, schema: dict[str, Any]) -> dict[str, Any]:
    return {} if media is None else {"content": {media: {"schema": schema}}}


class ApiPage:
    """Says what the paths of a server are, its own included, for programs and for people."""

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
    """A browser runs the page's own script and style, and asks its own server, and nothing else."""
    script, style = (f"'sha256-{digest(page, name)}'" for name in (b"script", b"style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def digest(page: bytes, name: bytes) -> str:
    """Of what an element holds, which the page has one of."""
    (held,) = re.findall(b"<%b>(.*?)</%b>" % (name, name), page, re.DOTALL)
    return base64.b64encode(sha256(held).digest()).decode()
