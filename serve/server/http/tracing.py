"""OpenTelemetry spans of requests, named as its conventions for generative models and, where these name
nothing, as vLLM does. Its packages are an extra of duetto: they are imported when a `Tracing` is made."""

import asyncio
import os
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....sampling.params import SamplingParams
from ..service.service import ApiCall

CLOSING = 3  # seconds that an export may take, also the last one
OPERATIONS = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings"}


def tracing_to(endpoint: str) -> "Tracing":
    """Return an exporter to a collector (OTLP over HTTP). Raises ValueError without OpenTelemetry's
    packages."""
    try:
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        return Tracing(otlp.OTLPSpanExporter(endpoint, timeout=CLOSING))
    except ImportError as error:
        raise ValueError(
            f"otlp_traces_endpoint is not allowed: there is no {error.name}; pip install 'duetto[otel]'"
        ) from None


class Tracing:
    """Exports one span a request."""

    def __init__(self, exporter: Any):
        api, sdk = import_module("opentelemetry.trace"), import_module("opentelemetry.sdk.trace")
        own = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "duetto")}
        resource = import_module("opentelemetry.sdk.resources").Resource.create(own)
        self._processor = import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor(exporter)
        provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer, self._kind = provider.get_tracer("duetto"), api.SpanKind.SERVER
        self._failed = api.Status(api.StatusCode.ERROR)
        context = import_module("opentelemetry.trace.propagation.tracecontext")
        self._parent = context.TraceContextTextMapPropagator().extract

    def begin(self, scope: Scope) -> Any:
        """Start the span of an arriving request, below the parent that its headers name."""
        name = f"{scope['method']} {scope['path']}"
        return self._tracer.start_span(name, self._parent(Headers(scope=scope)), self._kind)

    def end(self, span: Any, scope: Scope, status: int | None) -> None:
        """End a span. `status` is that of the answer; None if the client disconnected."""
        span.set_attributes({"http.request.method": scope["method"], "url.path": scope["path"]})
        if status is not None:
            span.set_attribute("http.response.status_code", status)
        if (call := scope.get("call")) is not None:
            found = dict(attributes(call)) | {"gen_ai.response.id": scope.get("response_id", "")}
            span.set_attributes(found)
            span.update_name(f"{found['gen_ai.operation.name']} {found['gen_ai.request.model']}")
        if status is None or status >= 400:
            span.set_attribute("error.type", "client_left" if status is None else str(status))
        if (status or 0) >= 500:
            span.set_status(self._failed)
        span.end()

    async def close(self) -> None:
        """Export pending spans; waits at most CLOSING seconds for the collector."""
        ending = threading.Thread(target=self._processor.shutdown, daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, CLOSING)


class Traced:
    """Middleware that makes spans of POST requests below /v1/."""

    def __init__(self, app: ASGIApp, tracing: Tracing):
        self.app, self.tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            return await self.app(scope, receive, send)
        status: int | None = None

        async def noted(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        span = self.tracing.begin(scope)
        try:
            await self.app(scope, receive, noted)
        except Exception:  # the error handler answers 500
            status = 500
            raise
        finally:
            self.tracing.end(span, scope, status)


def attributes(call: ApiCall) -> Iterator[tuple[str, Any]]:
    task, requests = call.tasks[0], [one for flow in call.flows for one in flow.group.requests]
    yield "gen_ai.operation.name", OPERATIONS.get(task.form, task.form)
    yield "gen_ai.provider.name", "duetto"
    yield "gen_ai.request.model", call.model
    yield "gen_ai.response.model", call.model
    if task.pooling is None:
        yield from sampling(task.params)
        yield "gen_ai.usage.output_tokens", sum(one.generated for one in requests)
        yield "gen_ai.response.finish_reasons", [one.finish_reason or "abort" for one in requests]
    yield "gen_ai.usage.input_tokens", call.usage["prompt_tokens"]
    yield "gen_ai.usage.cache_read.input_tokens", call.usage["cached_tokens"]
    # Over several completions: the first token of any, the longest wait, the last end.
    clocks = [one.clock for one in requests]
    arrival = clocks[0].arrival
    spans = {
        "time_in_queue": max(clock.admitted for clock in clocks),
        "time_to_first_token": min((clock.first_token for clock in clocks if clock.first_token), default=0.0),
        "e2e": max(clock.finish for clock in clocks),
    }
    for name, end in spans.items():
        if end:
            yield f"gen_ai.latency.{name}", end - arrival


def sampling(params: SamplingParams) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    yield "gen_ai.request.n", params.n
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
