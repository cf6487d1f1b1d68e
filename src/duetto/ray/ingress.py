"""Ingress of a Serve application: the router's proxy over Serve's handles in place of HTTP connections."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import cache
from importlib import import_module
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from ..serve.kv.routing.placement import RoutedRequest
from ..serve.options.router import RouterOptions
from ..serve.options.server import ServerOptions
from ..serve.server.http.guards import keys_in
from ..serve.server.router.http import ConnectionLost, Headers, joined
from ..serve.server.router.main import app, naming
from ..serve.server.router.proxy import Proxy
from ..serve.server.router.queue import PrefillPool, unavailable
from .attempt import Attempt

Errors = tuple[type[Exception], ...]


class ServeQueue:
    """Serve's queue, as a proxy sees it: a request gets an Attempt at once, and its replica when it is sent.
    Serve keeps requests while no replica is there, so it counts as one that is ready."""

    waiting, is_ready = 0, True  # Serve's own metrics count those that wait

    @property
    def replicas(self) -> list["ServeQueue"]:
        return [self]

    def place(self, client: str, tokens: int) -> int:
        """Return the same position for all requests: replicas share their steps fairly among clients."""
        return 0

    async def replica(self, job: RoutedRequest, line: int) -> Attempt:
        """Return the next attempt. Raises HttpError if the last one came to a replica that had refused."""
        left: Any = job.left  # Attempts
        refused = [attempt.replica for attempt in left]
        if len(set(refused)) < len(refused):
            raise unavailable()
        return Attempt(job)

    def leave(self, attempt: Attempt, job: RoutedRequest) -> None:
        attempt.leave()


class ServeConnection:
    """A request to a replica through Serve, and its answer, as a router's `HttpConnection` has them. Methods
    raise ConnectionLost for the errors `lost`, and if no replica takes the request within `seconds`."""

    def __init__(self, handle: Any, attempt: Attempt, seconds: float, lost: Errors):
        self._handle, self._attempt, self._seconds, self._lost = handle, attempt, seconds, lost
        self._status = 0
        self.headers: Headers = []
        self.is_whole = False

    def send(self, method: str, path: str, headers: Headers, body: bytes = b"") -> None:
        self._parts = self._handle.answer.remote(method, path, list(headers), body, self._attempt)

    async def status(self) -> int:
        """Wait for the head of the answer, and return its status."""
        if not self._status:
            try:
                self._attempt.address = await asyncio.wait_for(self._next(), self._seconds)
            except TimeoutError:
                raise ConnectionLost(f"no replica was free within {self._seconds:g} s") from None
            self._status, self.headers = await self._next()
        return self._status

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives."""
        while (piece := await self._next()) is not None:
            yield piece

    async def body(self) -> bytes:
        return await joined(self.pieces())

    async def _next(self) -> Any:
        """Return the next part; None after the last."""
        try:
            return await anext(self._parts)
        except StopAsyncIteration:
            self.is_whole = True
            return None
        except self._lost as error:
            raise ConnectionLost(str(error).strip().partition("\n")[0]) from None

    def abort(self) -> None:
        self._parts.cancel()

    async def close(self) -> None:
        """Nothing is left open behind a whole answer."""


def ingress_app(
    handle: Callable[[], Any], options: RouterOptions, server: ServerOptions, lost: Errors
) -> ASGIApp:
    """Return the application of an ingress. `handle` returns the one of the replicas; `lost` are Ray's errors
    for a replica that is gone."""

    async def connect(attempt: Any) -> Any:
        return ServeConnection(handle(), attempt, server.queue_timeout, lost)

    queue: Any = ServeQueue()
    proxy = Proxy(queue, PrefillPool({}, 1), naming(options), options, server, connect)
    keys = keys_in(server.api_key_file) if server.api_key_file else []
    return rooted(app([], proxy, server, keys))


def rooted(inner: ASGIApp) -> ASGIApp:
    """Return an app under a route prefix that sees paths without it."""

    async def outer(scope: Scope, receive: Receive, send: Send) -> None:
        if prefix := scope.get("root_path", ""):
            path, raw = scope["path"], scope.get("raw_path") or scope["path"].encode()
            raw = raw.removeprefix(prefix.encode())
            scope = {**scope, "root_path": "", "path": path.removeprefix(prefix), "raw_path": raw}
        await inner(scope, receive, send)

    return outer


class BoundReplicas:
    """An ingress deployment's handle of the replicas."""

    def __init__(self, replicas: Any):
        self.replicas = replicas


def ingress_class(options: RouterOptions, server: ServerOptions) -> Any:
    """Return the class of an ingress deployment, which is bound to that of the replicas."""
    serve = import_module("ray.serve")

    def build() -> ASGIApp:
        @cache
        def handle() -> Any:  # at the first request: the deployment is made after its application
            return serve.get_replica_context().servable_object.replicas.options(stream=True)

        errors, serving = import_module("ray.exceptions"), import_module("ray.serve.exceptions")
        return ingress_app(handle, options, server, (errors.RayError, serving.RayServeException))

    return serve.ingress(build)(BoundReplicas)
