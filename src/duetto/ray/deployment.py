"""A replica on Ray Serve: an engine, and the application of `duetto serve` in front of it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from importlib import import_module
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Scope

from ..serve.host.process import freeze_what_lasts
from ..serve.llm.llm import LLM
from ..serve.llm.metrics import gauges
from ..serve.options.server import ServerOptions
from ..serve.server.http.guards import keys_in
from ..serve.server.http.main import app
from ..serve.server.http.tracing import tracing_to
from ..serve.server.service.service import Service
from ..serve.server.service.streams import cancelled
from .autoscaling import LOAD
from .group import RankActors, leave
from .metrics import copied

TOKENS = "duetto:tokens_in_flight"


class EngineReplica:
    """Serves a model in an actor, or with `nnodes` in several.

    source: of the model. keywords: of `LLM`. target: tokens in flight at which autoscaling counts the replica
    as fully used; None reports nothing. actor: options of the other ranks' actors.
    """

    async def __init__(
        self,
        source: str | None,
        keywords: dict[str, Any],
        server: ServerOptions,
        target: int | None,
        actor: dict[str, Any],
    ):
        keys = keys_in(server.api_key_file) if server.api_key_file else []
        self._tracing = tracing_to(server.otlp_traces_endpoint) if server.otlp_traces_endpoint else None
        own: dict[str, Any] = {"use_tqdm_on_load": False} | keywords
        self._ranks = RankActors(source, own, actor) if own.get("nnodes", 1) > 1 else None
        start = partial(LLM, source, **own) if self._ranks is None else self._ranks.start
        llm = await asyncio.to_thread(start)
        freeze_what_lasts()
        self._service = Service(llm, server, llm.options.recommended(llm.defaults.sampling))
        self._copying = asyncio.create_task(copied(llm.engine, self._service.names[0]))
        self._app, self._target = app(self._service, keys, self._tracing), target
        self._name = import_module("ray.serve").get_replica_context().replica_id.unique_id

    async def answer(
        self, method: str, path: str, headers: list[tuple[bytes, bytes]], body: bytes, attempt: None
    ) -> AsyncGenerator[Any]:
        """Yield this replica's name at once, then status and headers of the answer, then its body in pieces.
        `attempt` is for the request router."""
        yield self._name
        async with aclosing(answered(self._app, scope_of(method, path, headers), body)) as parts:
            async for part in parts:
                yield part

    # ------------------------------------------------------------ called by Serve

    def check_health(self) -> None:
        if self._service.error is not None:
            raise RuntimeError(f"the engine has failed: {self._service.error}")

    def record_replica_metadata(self) -> dict[str, str]:
        return {"realm": self._service.realms.name}

    def record_autoscaling_stats(self) -> dict[str, float]:
        if self._target is None:
            return {}
        found = {gauge.name: gauge.value for gauge in gauges(self._service.llm.engine)}
        return {LOAD: found[TOKENS] / self._target}

    async def __del__(self):
        if service := vars(self).get("_service"):
            self._copying.cancel()
            await service.close()
            service.llm.close()
            leave()
            if self._tracing is not None:
                await self._tracing.close()


async def answered(app: ASGIApp, scope: Scope, body: bytes) -> AsyncGenerator[Any]:
    """Run an application for a request. Yield status and headers of its answer, then the body in pieces.
    Closing the generator ends the request. Raises the application's error."""
    exchange = Exchange(body)
    running = asyncio.ensure_future(app(scope, exchange.receive, exchange.send))
    running.add_done_callback(lambda _: exchange.wake())
    try:
        while not running.done() or exchange.messages:
            for part in await exchange.parts():
                yield part
        running.result()
    finally:
        await cancelled(running)


class Exchange:
    """A request and what an application has answered to it so far."""

    def __init__(self, body: bytes):
        self._body: bytes | None = body
        self._news = asyncio.Event()
        self.messages: list[Message] = []

    def wake(self) -> None:
        self._news.set()

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()  # until the application is cancelled
        body, self._body = self._body, None
        return {"type": "http.request", "body": body}

    async def send(self, message: Message) -> None:
        self.messages.append(message)
        self.wake()

    async def parts(self) -> list[Any]:
        """Wait for messages, or for the end. Return status and headers if they are new, and the new bytes."""
        await self._news.wait()
        self._news.clear()
        found, self.messages = self.messages, []
        heads = [
            (one["status"], list(one["headers"])) for one in found if one["type"] == "http.response.start"
        ]
        piece = b"".join(one.get("body", b"") for one in found)
        return [*heads, *([piece] if piece else [])]


def scope_of(method: str, path: str, headers: list[tuple[bytes, bytes]]) -> Scope:
    """Return the scope of a request to a path with its query."""
    raw, _, query = path.encode("latin-1").partition(b"?")
    own = {"path": unquote(raw.decode("latin-1")), "raw_path": raw, "query_string": query, "headers": headers}
    about = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
    return about | own | {"method": method, "root_path": "", "client": None, "server": None}
