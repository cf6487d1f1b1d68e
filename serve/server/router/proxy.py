"""A request through the router: to a replica, and to another one if that is lost."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ...host.streams import tell
from ...kv.routing.placement import Prompt, Replica, RoutedRequest
from ...options.router import RouterOptions
from ...options.server import ServerOptions
from ...text.openai.errors import RequestError, object_of
from ..routes.body import SOURCE, read_body
from ..service.errors import HttpError
from ..service.streams import ClientLeft, while_read
from .http import AnswerTooLong, ConnectionLost, Headers, HttpConnection, ServerAddress, joined
from .prompts import Naming, charge
from .queue import PrefillPool, RequestQueue
from .resumable import PassThroughStream, ResumableStream, first_data

LONG = 1 << 12  # bytes; longer bodies are read, and their prompts named, in another thread
GENERATE = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
OTHER = 409  # status of a replica that would continue an answer with other tokens
BUSY = (429, 502, 503)  # another replica may answer otherwise
OWN = {b"connection", b"transfer-encoding", b"keep-alive", b"content-length", b"host", b"server", b"date"}
ANEW = {
    b"accept-encoding",
    b"expect",
    b"origin",
    b"sec-fetch-site",
    SOURCE.encode(),
    *OWN,
}  # request headers that are not passed on


OTHER_REALM = HttpError(
    502,
    "the replica went away before its answer was whole, and no other has the weights that it began with",
    "replica_lost",
)


class RealmMismatch(Exception):
    """A replica cannot continue an answer: its tokens would follow from other weights."""


@dataclass
class ProxyRequest:
    """A client's request, and the progress of its answer.

    generates: whether it is for tokens, so that a prefill engine may help
    stream: the state from which another replica can continue; None if it cannot
    has_head: whether the head of the answer has been sent
    """

    method: str
    path: str
    headers: Headers
    body: bytes
    generates: bool = False
    stream: ResumableStream | None = None
    has_head: bool = False

    @property
    def has_begun(self) -> bool:
        return self.has_head or (self.stream is not None and self.stream.has_begun)

    @property
    def realm(self) -> str:
        """The realm of the weights that a replica needs to continue, without adapters; empty before the first
        token."""
        return self.stream.realm.partition(" ")[0] if self.stream and self.stream.has_begun else ""

    @property
    def is_lost(self) -> bool:
        """True if the tokens cannot be continued, since their realm was never named."""
        return self.stream is not None and self.stream.has_begun and not self.stream.realm

    def restart(self) -> bool:
        """Forget all tokens, if the client has received nothing. Returns whether it could."""
        if self.has_head or self.stream is None:
            return False
        self.stream.forget()
        return True

    @property
    def sent(self) -> bytes:
        return self.body if self.stream is None else self.stream.body


async def http_connection(replica: Replica) -> HttpConnection:
    return await HttpConnection.to(ServerAddress.of(replica.address))


class Proxy:
    """Forwards requests to replicas. If a replica is lost, a stream is resumed on another one from its
    tokens; an answer that has not begun is requested again. `connect` opens a connection to a replica."""

    def __init__(
        self,
        line: RequestQueue,
        prefills: PrefillPool,
        naming: Naming,
        options: RouterOptions,
        server: ServerOptions,
        connect: Callable[[Replica], Awaitable[HttpConnection]] = http_connection,
    ):
        self.line, self.prefills, self.naming, self._connect = line, prefills, naming, connect
        self.options, self.server = options, server
        self.under_way = self.resumed = self.retried = 0
        self.idle = asyncio.Event()
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.is_draining:
            raise HttpError(503, "the router is ending", "unavailable")
        with self._under_way():
            try:
                is_post = scope["method"] == "POST"
                body = await read_body(Request(scope, receive), self.server) if is_post else b""
                reading = partial(self._read_request, scope, body)
                request, prompt, tokens = await asyncio.to_thread(reading) if len(body) > LONG else reading()
                place = self.line.place(scope.get("client_name", ""), tokens)
                await while_read(receive, self._answer(request, RoutedRequest(prompt), place, send))
            except ClientLeft:
                pass

    @contextmanager
    def _under_way(self):
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
            if self.is_draining and not self.under_way:
                self.idle.set()

    def drain(self) -> None:
        """Take no more requests; `idle` is set once those under way are done."""
        self.is_draining = True
        if not self.under_way:
            self.idle.set()

    def _read_request(self, scope: Scope, body: bytes) -> tuple[ProxyRequest, Prompt, int]:
        """Return a request, its prompt, and the tokens that it counts for."""
        path = b"?".join(filter(None, (scope["raw_path"], scope["query_string"]))).decode("latin-1")
        headers = [(name, value) for name, value in scope["headers"] if name not in ANEW]
        request = ProxyRequest(scope["method"], path, headers, body, scope["path"] in GENERATE)
        fields = read(body)
        if self.options.resume and request.generates and fields and fields.get("resume") is None:
            request.stream = ResumableStream(fields)
        prompt = self.naming(path, fields) if fields else Prompt()
        return request, prompt, charge(scope["path"], fields, prompt)

    # ------------------------------------------------------------ replicas, one after the other

    async def _answer(self, request: ProxyRequest, job: RoutedRequest, place: int, send: Send) -> None:
        attempt = 1
        while attempt <= self.options.max_attempts:
            last = attempt == self.options.max_attempts
            replica = await self._replica(request, job, place, send)
            if replica is None:
                return
            try:
                if await self._forward(replica, request, job, send, last):
                    return
                job.left.add(replica)
            except RealmMismatch as unfit:  # costs no attempt: each replica is tried once
                tell(f"duetto: {replica} does not go on with another's answer: {unfit}")
                job.refused_by(replica)
                continue
            except AnswerTooLong as long:
                tell(f"duetto: {replica}: {long}")
                if not request.has_head:
                    raise
                return await fail(long, send)
            except ConnectionLost as lost:
                tell(f"duetto: {replica}: {lost}" + ("" if last else "; the request goes on elsewhere"))
                replica.is_ready = False  # until its next health check
                if await self._give_up(request, send, last):
                    return
            finally:
                self.line.leave(replica, job)
            attempt += 1
            self.resumed += request.has_begun
            self.retried += not request.has_begun

    async def _replica(
        self, request: ProxyRequest, job: RoutedRequest, place: int, send: Send
    ) -> Replica | None:
        """Return the next replica for the request; None if the client was sent an error. A whole answer that
        no replica can continue begins anew."""
        job.realm = request.realm
        try:
            return await self.line.replica(job, place)
        except HttpError as error:
            found = error
            if job.others and error.code == "unavailable":
                if request.restart():
                    tell("duetto: no replica has the weights that an answer began with: it begins anew")
                    job.begin_anew()
                    return await self._replica(request, job, place, send)
                found = OTHER_REALM
                tell(f"duetto: a stream ends with an error: {found}")
            if not request.has_head:
                raise
            await fail(found, send)
            return None

    async def _give_up(self, request: ProxyRequest, send: Send, last: bool) -> bool:
        """After a lost replica: return whether the request ends, in which case the client has got an error.
        Raises HttpError if nothing has been sent."""
        error = HttpError(502, "the replica went away before its answer was whole", "replica_lost")
        if request.is_lost:
            request.restart()
        if request.has_head and (last or request.stream is None or request.is_lost):
            await fail(error, send)
            return True
        if last:
            raise error
        return False

    async def _forward(
        self, replica: Replica, request: ProxyRequest, job: RoutedRequest, send: Send, last: bool
    ) -> bool:
        """Send the request to a replica and pass its answer on. Returns whether it answered. Raises
        ConnectionLost, RealmMismatch and AnswerTooLong."""
        connection = await self._connect(replica)
        replica.connections[connection] = None
        try:
            with self.prefills.beside(job) if request.generates else nullcontext([]) as more:
                connection.send(request.method, request.path, request.headers + more, request.sent)
                status = await connection.status()
            if status == OTHER and request.realm:
                raise RealmMismatch(error_message(await connection.body()))
            if status in BUSY and not last and self._others(job, replica):
                return False
            replica.begun(job)
            kind = dict(connection.headers).get(b"content-type", b"")
            if status == 200 and kind.startswith(b"text/event-stream"):
                await self._pass_stream(connection, request, send, last)
            else:
                await self._pass_whole(connection, request, send)
            return True
        finally:
            replica.connections.pop(connection, None)
            connection.abort() if not connection.is_whole else await connection.close()

    def _others(self, job: RoutedRequest, replica: Replica) -> bool:
        return any(one.is_ready and one not in job.left and one is not replica for one in self.line.replicas)

    async def _pass_whole(self, connection: HttpConnection, request: ProxyRequest, send: Send) -> None:
        status, body = await connection.status(), await connection.body()
        if request.has_head:  # the stream cannot be resumed there
            return await fail(HttpError(502, error_message(body), "replica_lost"), send)
        await answer(request, status, headers_of(connection), body, send)

    async def _send_whole(
        self, connection: HttpConnection, request: ProxyRequest, send: Send, last: bool
    ) -> None:
        """Send a whole answer that arrives as the last event of a stream of its tokens."""
        stream = request.stream
        assert stream is not None
        async with aclosing(passed(connection, stream)) as pieces:
            events = await joined(pieces)
        body = first_data(events + stream.held)
        if not stream.is_whole and not (last and body):
            raise ConnectionLost("the answer has ended before it was whole")
        headers = [header for header in headers_of(connection) if header[0] != b"content-type"]
        headers.append((b"content-type", b"application/json"))
        await answer(request, 200 if stream.is_whole else 502, headers, body, send)

    async def _pass_stream(
        self, connection: HttpConnection, request: ProxyRequest, send: Send, last: bool
    ) -> None:
        stream = request.stream
        if stream is not None:
            stream.begin()
            if not stream.is_stream:
                return await self._send_whole(connection, request, send, last)
        if not request.has_head:
            await begin(request, 200, headers_of(connection), send)
        own = stream or PassThroughStream()
        async with aclosing(passed(connection, own)) as pieces:
            async for events in pieces:
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
        if stream is not None and not stream.is_whole and not last:
            raise ConnectionLost("the stream has ended before its last event")
        await send({"type": "http.response.body", "body": own.held})


async def passed(
    connection: HttpConnection, stream: ResumableStream | PassThroughStream
) -> AsyncGenerator[bytes]:
    """Yield what can be passed on of each piece of a stream, until it is whole or its replica ends it."""
    async with aclosing(connection.pieces()) as pieces:
        async for piece in pieces:
            yield stream.take(piece)
            if stream.is_whole:
                return


async def begin(request: ProxyRequest, status: int, headers: Headers, send: Send) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    request.has_head = True


async def answer(request: ProxyRequest, status: int, headers: Headers, body: bytes, send: Send) -> None:
    await begin(request, status, [*headers, (b"content-length", b"%d" % len(body))], send)
    await send({"type": "http.response.body", "body": body})


def headers_of(connection: HttpConnection) -> Headers:
    """Return the headers of an answer that are passed on."""
    return [header for header in connection.headers if header[0] not in OWN]


async def fail(error: HttpError, send: Send) -> None:
    """End a stream with an error."""
    body = b"data: " + msgspec.json.encode(error.body) + b"\n\n"
    await send({"type": "http.response.body", "body": body})


def read(body: bytes) -> Mapping[str, Any]:
    """Return the fields of a body; none if it is no JSON object, which replicas reject."""
    try:
        return object_of(body, "body")
    except RequestError:
        return {}


def error_message(body: bytes) -> str:
    error = read(body).get("error")
    return str(error.get("message")) if isinstance(error, dict) else "the replica cannot go on"
