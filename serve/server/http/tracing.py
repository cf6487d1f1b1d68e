"""OpenTelemetry spans of requests. Attributes have the names of its conventions for generative models, else
vLLM's names. Its packages are an extra of duetto: they are imported when a `Tracing` is made."""

import asyncio
import os
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ....sampling.params import SamplingParams
from ..service.api_call import ApiCall

EXPORT_SECONDS = 3  # seconds that an export may take, also at the end
OPERATION_NAMES = {"chat": "chat", "completion": "text_completion", "embedding": "embeddings"}


def make_tracing(endpoint: str) -> "Tracing":
    """Return an exporter to a collector (OTLP over HTTP). Raises ValueError without OpenTelemetry's
    packages."""
    try:
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        return Tracing(otlp.OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS))
    except ImportError as error:
        raise ValueError(
            f"otlp_traces_endpoint is not allowed: there is no {error.name}; pip install 'duetto[otel]'"
        ) from None


class Tracing:
    """Exports one span a request."""

    def __init__(self, exporter: Any):
        api, sdk = import_module("opentelemetry.trace"), import_module("opentelemetry.sdk.trace")
        service_attributes = {"service.name": os.environ.get("OTEL_SERVICE_NAME", "duetto")}
        resource = import_module("opentelemetry.sdk.resources").Resource.create(service_attributes)
        self._processor = import_module("opentelemetry.sdk.trace.export").BatchSpanProcessor(exporter)
        provider = sdk.TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        self._tracer, self._span_kind = provider.get_tracer("duetto"), api.SpanKind.SERVER
        self._error_status = api.Status(api.StatusCode.ERROR)
        context = import_module("opentelemetry.trace.propagation.tracecontext")
        self._extract_parent = context.TraceContextTextMapPropagator().extract

    def begin_span(self, scope: Scope) -> Any:
        """Start the span of an arriving request. Its headers name the parent span, if any."""
        name = f"{scope['method']} {scope['path']}"
        return self._tracer.start_span(name, self._extract_parent(Headers(scope=scope)), self._span_kind)

    def end_span(self, span: Any, scope: Scope, status: int | None) -> None:
        """End a span. `status` is the answer's status; None if the client disconnected."""
        span.set_attributes({"http.request.method": scope["method"], "url.path": scope["path"]})
        if status is not None:
            span.set_attribute("http.response.status_code", status)
        if (call := scope.get("call")) is not None:
            call_attributes = dict(span_attributes(call)) | {
                "gen_ai.response.id": scope.get("response_id", "")
            }
            span.set_attributes(call_attributes)
            span.update_name(
                f"{call_attributes['gen_ai.operation.name']} {call_attributes['gen_ai.request.model']}"
            )
        if status is None or status >= 400:
            span.set_attribute("error.type", "client_left" if status is None else str(status))
        if (status or 0) >= 500:
            span.set_status(self._error_status)
        span.end()

    async def close(self) -> None:
        """Export pending spans. Waits at most `EXPORT_SECONDS` seconds for the collector."""
        ending = threading.Thread(target=self._processor.shutdown, name="duetto-trace-export", daemon=True)
        ending.start()
        await asyncio.to_thread(ending.join, EXPORT_SECONDS)


class TracingMiddleware:
    """Middleware that makes spans of POST requests below /v1/."""

    def __init__(self, app: ASGIApp, tracing: Tracing):
        self.app, self.tracing = app, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not scope["path"].startswith("/v1/"):
            return await self.app(scope, receive, send)
        status: int | None = None

        async def send_and_record(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        span = self.tracing.begin_span(scope)
        try:
            await self.app(scope, receive, send_and_record)
        except Exception:  # the error handler answers 500
            status = 500
            raise
        finally:
            self.tracing.end_span(span, scope, status)


def span_attributes(call: ApiCall) -> Iterator[tuple[str, Any]]:
    task, requests = call.tasks[0], call.requests
    yield "gen_ai.operation.name", OPERATION_NAMES.get(task.form, task.form)
    yield "gen_ai.provider.name", "duetto"
    yield "gen_ai.request.model", call.model
    yield "gen_ai.response.model", call.model
    if task.pooling is None:
        yield from sampling_attributes(task.params)
        yield "gen_ai.usage.output_tokens", sum(request.num_output_tokens for request in requests)
        yield "gen_ai.response.finish_reasons", [request.finish_reason or "abort" for request in requests]
    yield "gen_ai.usage.input_tokens", call.usage["prompt_tokens"]
    yield "gen_ai.usage.cache_read.input_tokens", call.usage["cached_tokens"]
    # Over several completions: the first token of any, the longest wait, the last end.
    clocks = [request.times for request in requests]
    arrival = clocks[0].arrival
    latencies = {
        "time_in_queue": max(clock.admitted for clock in clocks),
        "time_to_first_token": min((clock.first_token for clock in clocks if clock.first_token), default=0.0),
        "e2e": max(clock.finish for clock in clocks),
    }
    for name, end in latencies.items():
        if end:
            yield f"gen_ai.latency.{name}", end - arrival


def sampling_attributes(params: SamplingParams) -> Iterator[tuple[str, Any]]:
    yield "gen_ai.request.temperature", params.temperature
    yield "gen_ai.request.top_p", params.top_p
    yield "gen_ai.request.n", params.n
    if params.max_tokens is not None:
        yield "gen_ai.request.max_tokens", params.max_tokens
