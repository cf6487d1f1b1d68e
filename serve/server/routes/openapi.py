"""Routes of a server, their OpenAPI document, and a page to try them."""

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
from ...text.openai.schemas import Body, SchemaCollector

PAGE_FILE = pathlib.Path(__file__).with_name("docs.html")
JSON, EVENTS = "application/json", "text/event-stream"
READ_ERRORS = (400, 403, 408, 413, 429, 500, 503)  # errors of routes that read a body
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
class ApiRoute:
    """A route.

    path: path, as Starlette writes it
    endpoint: an ASGI application, or a function from a request to a response
    summary: summary for the document
    reply: type of the JSON, if `media_type` is JSON
    event: type of a stream's events
    body: body of a POST; None without one
    errors: status codes of possible errors
    media_type: media type of the reply; None if it is empty
    is_open: whether it needs no key
    is_post: whether it is a POST even without a body
    query: allowed query parameters, and their values
    """

    path: str
    endpoint: Any
    summary: str
    reply: Any = None
    event: Any = None
    body: Body | None = None
    errors: Sequence[int] = ()
    media_type: str | None = JSON
    is_open: bool = False
    is_post: bool = False
    query: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def method(self) -> str:
        return "GET" if self.body is None and not self.is_post else "POST"

    @property
    def starlette_route(self) -> Route:
        return Route(self.path, self.endpoint, methods=[self.method])

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it."""
        return re.sub(r"{(\w+):\w+}", r"{\1}", self.path)


def openapi_document(routes: Sequence[ApiRoute], release: str, has_keys: bool) -> dict[str, Any]:
    schemas, operations = SchemaCollector(), {}
    for route in routes:
        operations.setdefault(route.template, {})[route.method.lower()] = openapi_operation(
            route, schemas, has_keys
        )
    keys = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if has_keys else {}
    return {
        "openapi": "3.1.0",
        "info": {"title": "duetto", "version": release},
        "paths": operations,
        "components": {"schemas": schemas.components} | keys,
    } | ({"security": [{"key": []}]} if has_keys else {})


def openapi_operation(route: ApiRoute, schemas: SchemaCollector, has_keys: bool) -> dict[str, Any]:
    needs_key = has_keys and not route.is_open
    errors = sorted({*route.errors, 401} if needs_key else route.errors)
    error = media_content(
        None if route.media_type is None and route.is_open else JSON, schemas.add_type(ErrorReply)
    )
    fields: dict[str, Any] = {
        "summary": route.summary,
        "operationId": re.sub(r"\W+", "_", f"{route.method.lower()}{route.template}").strip("_"),
        "responses": {"200": openapi_reply(route, schemas)}
        | {str(status): {"description": ERRORS[status]} | error for status in errors},
    }
    if variables := re.findall(r"{(\w+)}", route.template):
        fields["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in variables
        ]
    if route.query:
        fields["parameters"] = [
            {"name": name, "in": "query", "schema": {"enum": list(values)}}
            for name, values in route.query.items()
        ]
    if route.body is not None:
        shown = {"schema": schemas.add_body(route.body), "example": route.body.example}
        fields["requestBody"] = {"required": True, "content": {JSON: shown}}
    if has_keys and route.is_open:
        fields["security"] = []
    return fields


def openapi_reply(route: ApiRoute, schemas: SchemaCollector) -> dict[str, Any]:
    schema = {"type": "string"} if route.reply is None else schemas.add_type(route.reply)
    reply = {"description": "the answer"} | media_content(route.media_type, schema)
    if route.event is not None:
        reply["content"] |= media_content(
            EVENTS, event_schema(schemas.add_type(route.event), schemas.add_type(ErrorReply))
        )["content"]
    return reply


def event_schema(schema: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a stream's events. `error` is the schema of the event that ends a failed
    stream."""
    item_schema = {"type": "string", "contentMediaType": JSON, "contentSchema": {"anyOf": [schema, error]}}
    data = {"anyOf": [{"const": "[DONE]"}, item_schema]}
    about = "with stream true: server-sent events, each of these fields"
    return {"type": "object", "description": about, "properties": {"data": data}, "required": ["data"]}


def media_content(media: str | None, schema: dict[str, Any]) -> dict[str, Any]:
    return {} if media is None else {"content": {media: {"schema": schema}}}


class ApiPage:
    """Serves the OpenAPI document of all routes, including its own, and a page to try them in a browser."""

    def __init__(self, others: Sequence[ApiRoute], has_keys: bool):
        self.routes = [
            ApiRoute(
                "/openapi.json", self.answer_document, "this document", reply=dict[str, Any], is_open=True
            ),
            ApiRoute(
                "/docs", self.answer_page, "a page to try all of this", media_type="text/html", is_open=True
            ),
        ]
        self._document = msgspec.json.encode(
            openapi_document([*others, *self.routes], version("duetto"), has_keys)
        )
        self._page = PAGE_FILE.read_bytes()
        self._headers = {
            "content-security-policy": content_policy(self._page),
            "cache-control": "no-cache",
            "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff",
        }

    async def answer_document(self, request: Request) -> Response:
        return Response(self._document, media_type="application/json")

    async def answer_page(self, request: Request) -> Response:
        return Response(self._page, headers=self._headers, media_type="text/html")


def content_policy(page: bytes) -> str:
    """Return the content security policy of the page. A browser then runs only the page's own script and
    style, and connects only to its server."""
    script, style = (f"'sha256-{hash_element(page, name)}'" for name in (b"script", b"style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def hash_element(page: bytes, name: bytes) -> str:
    """Return the SHA-256 of the content of the page's only element `name`, in base64."""
    (content,) = re.findall(b"<%b>(.*?)</%b>" % (name, name), page, re.DOTALL)
    return base64.b64encode(sha256(content).digest()).decode()
