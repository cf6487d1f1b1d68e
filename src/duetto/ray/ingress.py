"""Ingress of a Serve application: the router's proxy over Serve's handles, in place of HTTP connections."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import cache
from importlib import import_module
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from ..serve.kv.routing.placement import RoutedRequest
from ..serve.options.router import RouterOptions
from ..serve.options.server import ServerOptions
from ..serve.server.http.guards import read_api_keys
from ..serve.server.router.http_client import ConnectionLost, Headers, join_pieces
from ..serve.server.router.main import make_page_hasher, make_router_app
from ..serve.server.router.proxy import Proxy
from ..serve.server.router.request_queue import PrefillPool, unavailable_error
from .attempt import Attempt

ErrorTypes = tuple[type[Exception], ...]


class ServeQueue:
    """Queue of a proxy whose requests wait in Serve.

    A request gets an Attempt at once, and a replica when it is sent. The queue counts as one ready replica:
    Serve keeps requests while none is there.
    """

    num_waiting, is_ready = 0, True  # Serve's metrics count waiting requests

    @property
    def replicas(self) -> list["ServeQueue"]:
        return [self]

    def assign_position(self, client: str, tokens: int) -> int:
        """Return one position for all requests, because replicas share their steps fairly among clients."""
        return 0

    async def assign_replica(self, routed_request: RoutedRequest, position: int) -> Attempt:
        """Return the next attempt. Raises HttpError if the last attempt came to a replica that had refused
        before."""
        attempts: Any = routed_request.failed_replicas  # Attempts
        refused = [attempt.replica for attempt in attempts]
        if len(set(refused)) < len(refused):
            raise unavailable_error()
        return Attempt(routed_request)

    def release(self, attempt: Attempt, routed_request: RoutedRequest) -> None:
        attempt.release_replica()


class ServeConnection:
    """Request to a replica through Serve, with the interface of a router's `HttpConnection`.

    handle: Serve's handle of the replicas.
    seconds: timeout for a replica to take the request.
    lost: types of errors of a lost replica.

    Methods raise ConnectionLost for these errors, and after the timeout.
    """

    def __init__(self, handle: Any, attempt: Attempt, seconds: float, lost: ErrorTypes):
        self._handle, self._attempt, self._seconds, self._lost = handle, attempt, seconds, lost
        self._status = 0
        self.headers: Headers = []
        self.is_whole = False

    def send(self, method: str, path: str, headers: Headers, body: bytes = b"") -> None:
        self._parts = self._handle.answer.remote(method, path, list(headers), body, self._attempt)

    async def read_status(self) -> int:
        """Wait for the status and headers of the answer, and return the status."""
        if not self._status:
            try:
                self._attempt.address = await asyncio.wait_for(self._next(), self._seconds)
            except TimeoutError:
                raise ConnectionLost(f"no replica was free within {self._seconds:g} s") from None
            self._status, self.headers = await self._next()
        return self._status

    async def read_pieces(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives."""
        while (piece := await self._next()) is not None:
            yield piece

    async def read_body(self) -> bytes:
        return await join_pieces(self.read_pieces())

    async def _next(self) -> Any:
        """Return the next part of the answer, or None after the last."""
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
        """Cancel an answer that is not complete."""
        if not self.is_whole:
            self.abort()


def make_ingress_app(
    get_handle: Callable[[], Any], options: RouterOptions, server: ServerOptions, lost: ErrorTypes
) -> ASGIApp:
    """Return the application of an ingress.

    get_handle: returns Serve's handle of the replicas.
    lost: Ray's types of errors for a lost replica.
    """

    async def connect(attempt: Any) -> Any:
        return ServeConnection(get_handle(), attempt, server.queue_timeout, lost)

    queue: Any = ServeQueue()
    proxy = Proxy(queue, PrefillPool({}, 1), make_page_hasher(options), options, server, connect)
    keys = read_api_keys(server.api_key_file) if server.api_key_file else []
    return make_stripped_app(make_router_app([], proxy, server, keys))


def make_stripped_app(inner: ASGIApp) -> ASGIApp:
    """Return an application that sees paths without the route prefix that it is mounted at."""

    async def stripped_app(scope: Scope, receive: Receive, send: Send) -> None:
        if prefix := scope.get("root_path", ""):
            path, raw = scope["path"], scope.get("raw_path") or scope["path"].encode()
            raw = raw.removeprefix(prefix.encode())
            scope = {**scope, "root_path": "", "path": path.removeprefix(prefix), "raw_path": raw}
        await inner(scope, receive, send)

    return stripped_app


class BoundReplicas:
    """Ingress deployment that holds the handle of the replicas."""

    def __init__(self, replicas: Any):
        self.replicas = replicas


def make_ingress_class(options: RouterOptions, server: ServerOptions) -> Any:
    """Return the class of an ingress deployment, which takes the bound deployment of the replicas."""
    serve = import_module("ray.serve")

    def build_app() -> ASGIApp:
        @cache
        def get_handle() -> Any:  # lazily: the deployment is created after its application
            return serve.get_replica_context().servable_object.replicas.options(stream=True)

        errors, serving = import_module("ray.exceptions"), import_module("ray.serve.exceptions")
        return make_ingress_app(get_handle, options, server, (errors.RayError, serving.RayServeException))

    return serve.ingress(build_app)(BoundReplicas)
