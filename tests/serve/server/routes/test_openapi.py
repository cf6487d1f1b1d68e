"""/openapi.json says what the server reads and answers, and /docs is a page that needs nothing else."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import Histogram
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from duetto import SamplingParams
from duetto.neutral_values import HARMLESS_FIELDS, NEUTRAL
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.http.main import make_server_app
from duetto.serve.text.openai.completion_request import CompletionRequest, parse_completion, parse_response
from duetto.serve.text.openai.tasks import BODY_PARAM_NAMES

FORMS: list[tuple[Any, str]] = [
    ("completion", "/v1/completions"), ("chat", "/v1/chat/completions"), ("response", "/v1/responses"),
]  # fmt: skip
OWN = {"temperature": 0.5}  # the server's defaults


def served(*keys: str) -> Starlette:
    """Paths without an engine behind them."""
    llm = SimpleNamespace(tokenizer=None)
    own = {"llm": llm, "names": ["demo"], "defaults": OWN, "options": ServerOptions()}
    own["lag"] = SimpleNamespace(histogram=Histogram("duetto:late", "late", registry=None))
    own["answer_realm"] = SimpleNamespace(name="0" * 64)
    return make_server_app(SimpleNamespace(**own, error=None, is_draining=False), list(keys), None)


def client(*keys: str) -> TestClient:
    return TestClient(served(*keys))


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return client().get("/openapi.json").json()


def fields(document: dict[str, Any], path: str) -> dict[str, Any]:
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    return document["components"]["schemas"][body["schema"]["$ref"].split("/")[-1]]["properties"]


def test_every_route_is_in_the_document(document):
    routes = {
        (re.sub(r":\w+}", "}", route.path), *(route.methods - {"HEAD"}))
        for route in served().routes
        if isinstance(route, Route) and route.methods
    }
    assert len(routes) == len(served().routes)
    entries = [
        (path, method, entry) for path, of in document["paths"].items() for method, entry in of.items()
    ]
    assert routes == {(path, method.upper()) for path, method, _ in entries}
    for path, method, entry in entries:
        assert entry["summary"] and entry["responses"]["200"], path
        assert method == "get" or entry["requestBody"]["content"]["application/json"]["example"], path
    assert len({entry["operationId"] for *_, entry in entries}) == len(entries)


def test_references_lead_somewhere(document):
    named = set(re.findall(r"'#/components/schemas/(\w+)'", str(document)))
    assert named == set(document["components"]["schemas"])


@pytest.mark.parametrize("form, path", FORMS)
def test_fields_are_those_that_are_read(document, form, path):
    found = fields(document, path)
    assert found.keys() >= BODY_PARAM_NAMES | NEUTRAL["body"].keys() | HARMLESS_FIELDS | {
        "model",
        "stream",
        "stream_options",
    }
    post = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    read = parse_response if form == "response" else partial(parse_completion, form)
    for name, schema in found.items():
        value = next(iter(schema.get("enum", [schema.get("default")])))
        assert read(post["example"] | ({} if value is None else {name: value}), {})


@pytest.mark.parametrize("form, path", FORMS)
def test_documented_defaults_are_those_of_absent_fields(document, form, path):
    def read(body: dict[str, Any]) -> CompletionRequest:
        parsed = parse_response(body, OWN) if form == "response" else parse_completion(form, body, OWN)
        return replace(parsed, created=0, repeated_fields={})  # an answer repeats what was given

    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    for name, schema in fields(document, path).items():
        absent = {key: value for key, value in content["example"].items() if key != name}
        assert "default" not in schema or read(absent | {name: schema["default"]}) == read(absent), name


def test_fields_have_help_limits_and_the_servers_default(document):
    found = fields(document, "/v1/completions")
    help = SamplingParams.__dataclass_fields__["temperature"].metadata["help"]
    assert found["temperature"]["description"].startswith(help) and found["temperature"]["default"] == 0.5
    assert "-2 to 2" in found["presence_penalty"]["description"]
    assert found["max_tokens"]["default"] == 16
    chat = fields(document, "/v1/chat/completions")
    assert chat["max_tokens"]["default"] is None and chat["logprobs"]["anyOf"][0] == {"type": "boolean"}


def test_keys_are_in_the_document_where_they_are_asked_for(document):
    assert "security" not in document and "securitySchemes" not in document["components"]
    with client("key") as http:
        found = http.get("/openapi.json").json()
        scheme = {"type": "http", "scheme": "bearer"}
        assert found["security"] == [{"key": []}] and found["components"]["securitySchemes"]["key"] == scheme
        for path, of in found["paths"].items():
            ((method, entry),) = of.items()
            is_open = http.request(method, path).status_code != 401
            assert is_open == (entry.get("security") == []) == ("401" not in entry["responses"]), path


def test_the_page_needs_nothing_but_itself():
    reply = client("key").get("/docs")
    policy = reply.headers["content-security-policy"]
    assert reply.headers["content-type"].startswith("text/html")
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    elsewhere = r"https?://|@import|url\(|\bsrc=|\bhref=\"(?!data:)"
    assert not re.search(elsewhere + r"|\bstyle=|\bon\w+=\"", reply.text)
