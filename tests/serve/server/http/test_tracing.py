"""Spans of requests, as a collector receives them."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import import_module
from typing import Any

import pytest

from duetto.serve.server.http import tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector:
    """Keeps the spans that it is sent."""

    def __init__(self):
        self.spans: list[Any] = []
        messages = import_module("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                for resource in messages.ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.spans += [span for scope in resource.scope_spans for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="the server has duetto[otel]")
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def read(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [read(one) for one in found.values] if kind == "array_value" else found


def test_a_span_describes_request_and_response(starting, collector):
    """All of them have been sent when the server has ended."""
    host, port = collector.server.server_address
    server = starting("--otlp-traces-endpoint", f"http://{host}:{port}/v1/traces")
    asked = {"max_tokens": 5, "temperature": 0.5, "top_p": 0.75, "ignore_eos": True}
    messages = [{"role": "user", "content": "x"}]
    with server.http() as http:
        several = asked | {"prompt": ["def", "import os"], "n": 2}
        whole = http.post("/v1/completions", json=several, headers={"traceparent": PARENT}).json()
        chat = http.post("/v1/chat/completions", json=asked | {"messages": messages, "stream": True})
        assert http.post("/v1/completions", json={}).status_code == 400
        assert http.get("/health").status_code == 200
    assert server.stop() == 0
    text, talk, wrong = collector.spans
    assert text.trace_id.hex() == PARENT[3:35] and text.parent_span_id.hex() == PARENT[36:52]
    assert (text.name, talk.name, wrong.name) == ("text_completion demo", "chat demo", "POST /v1/completions")
    found = {one.key: read(one.value) for one in text.attributes}
    times = [found.pop(f"gen_ai.latency.{name}") for name in ("time_in_queue", "time_to_first_token", "e2e")]
    assert 0 < times[0] < times[1] < times[2] < (text.end_time_unix_nano - text.start_time_unix_nano) / 1e9
    assert found == {
        "http.request.method": "POST", "url.path": "/v1/completions", "http.response.status_code": 200,
        "gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "duetto",
        "gen_ai.request.model": "demo", "gen_ai.response.model": "demo", "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5, "gen_ai.request.top_p": 0.75, "gen_ai.request.max_tokens": 5,
        "gen_ai.usage.input_tokens": whole["usage"]["prompt_tokens"], "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 0, "gen_ai.response.finish_reasons": ["length"] * 4,
        "gen_ai.response.id": whole["id"],
    }  # fmt: skip
    assert {one.key: read(one.value) for one in talk.attributes}["gen_ai.response.id"] in chat.text
    assert {one.key: read(one.value) for one in wrong.attributes}["error.type"] == "400"


def test_without_its_packages_a_server_says_what_to_install(monkeypatch):
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(name=name.partition(".")[0])

    monkeypatch.setattr(tracing, "import_module", missing)
    with pytest.raises(ValueError, match=r"there is no opentelemetry; pip install 'duetto\[otel\]'"):
        tracing.make_tracing("http://127.0.0.1:1/v1/traces")
