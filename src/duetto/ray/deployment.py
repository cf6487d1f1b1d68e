"""Replica on Ray Serve: an engine, and the application of `duetto serve` in front of it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

from ..serve.host.process import freeze_lasting_objects
from ..serve.llm.llm import LLM
from ..serve.llm.metrics import engine_gauges
from ..serve.options.server import ServerOptions
from ..serve.server.http.guards import read_api_keys
from ..serve.server.http.main import make_server_app
from ..serve.server.http.tracing import make_tracing
from ..serve.server.service.client_connection import cancel_and_wait
from ..serve.server.service.service import Service
from .autoscaling import LOAD
from .group import RankActors, leave_group
from .metrics import copy_metrics_periodically

TOKENS_METRIC = "duetto:tokens_in_flight"


class EngineReplica:
    """Engine in a Serve actor, or with `nnodes` in several.

    source: folder or id of the model.
    keywords: of `LLM`.
    server: options of the application.
    target: tokens in flight at which autoscaling counts the replica as fully used; None reports nothing.
    actor: Ray options of the other ranks' actors.
    """

    async def __init__(
        self,
        source: str | None,
        keywords: dict[str, Any],
        server: ServerOptions,
        target: int | None,
        actor: dict[str, Any],
    ):
        keys = read_api_keys(server.api_key_file) if server.api_key_file else []
        self._tracing = make_tracing(server.otlp_traces_endpoint) if server.otlp_traces_endpoint else None
        llm_keywords: dict[str, Any] = {"use_tqdm_on_load": False} | keywords
        self._ranks = RankActors(source, llm_keywords, actor) if llm_keywords.get("nnodes", 1) > 1 else None
        start = partial(LLM, source, **llm_keywords) if self._ranks is None else self._ranks.start
        llm = await asyncio.to_thread(start)
        freeze_lasting_objects()
        self._service = Service(llm, server, llm.options.default_sampling(llm.defaults.sampling))
        self._copying = asyncio.create_task(copy_metrics_periodically(llm.engine, self._service.names[0]))
        self._app, self._target = make_server_app(self._service, keys, self._tracing), target
        self._name = import_module("ray.serve").get_replica_context().replica_id.unique_id

    async def answer(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes, attempt: None
    ) -> AsyncGenerator[Any]:
        """Yield this replica's name at once, then status and headers of the answer, then its body in pieces.

        `attempt` is for the request router.
        """
        yield self._name
        async with aclosing(run_app(self._app, asgi_scope(method, path, headers), body)) as parts:
            async for part in parts:
                yield part

    # ------------------------------------------------------------ called by Serve

    def check_health(self) -> None:
        if self._service.error is not None:
            raise RuntimeError(f"the engine has failed: {self._service.error}")

    def record_replica_metadata(self) -> dict[str, str]:
        return {"realm": self._service.answer_realm.name}

    def record_autoscaling_stats(self) -> dict[str, float]:
        if self._target is None:
            return {}
        values = {gauge.name: gauge.value for gauge in engine_gauges(self._service.llm.engine)}
        return {LOAD: values[TOKENS_METRIC] / self._target}

    async def __del__(self):
        if service := vars(self).get("_service"):
            self._copying.cancel()
            await service.close()
            service.llm.close()
            leave_group()
            if self._tracing is not None:
                await self._tracing.close()


async def run_app(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[Any]:
    """Run an application for one request. Yield status and headers of its answer, then the body in pieces.

    Closing the generator ends the request. Raises the application's error.
    """
    exchange = Exchange(body)
    running = asyncio.ensure_future(app(scope, exchange.receive, exchange.send))
    running.add_done_callback(lambda _: exchange.wake())
    try:
        while not running.done() or exchange.messages:
            for part in await exchange.next_parts():
                yield part
        running.result()
    finally:
        await cancel_and_wait(running)


class Exchange:
    """HTTP request to an application, and the messages that it has sent so far."""

    def __init__(self, body: bytes):
        self._body: bytes | None = body
        self._message_event = asyncio.Event()
        self.messages: list[Message] = []

    def wake(self) -> None:
        self._message_event.set()

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()  # until the application is cancelled
        body, self._body = self._body, None
        return {"type": "http.request", "body": body}

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        self.wake()

    async def next_parts(self) -> list[Any]:
        """Wait for messages or the end. Return status and headers if they are new, and the new bytes."""
        await self._message_event.wait()
        self._message_event.clear()
        messages, self.messages = self.messages, []
        heads = [
            (message["status"], list(message["headers"]))
            for message in messages
            if message["type"] == "http.response.start"
        ]
        piece = b"".join(message.get("body", b"") for message in messages)
        return [*heads, *([piece] if piece else [])]


def asgi_scope(method: str, path: str, headers: list[tuple[bytes, bytes]]) -> Scope:
    """Return the ASGI scope of a request; `path` includes its query."""
    raw, _, query = path.encode("latin-1").partition(b"?")
    target = {
        "path": unquote(raw.decode("latin-1")),
        "raw_path": raw,
        "query_string": query,
        "headers": headers,
    }
    defaults = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
    return defaults | target | {"method": method, "root_path": "", "client": None, "server": None}
