"""Proxy of a router: sends a request to a replica, and to another replica if the first is lost."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ...host.streams import print_stderr
from ...kv.routing.placement import Replica, RoutedPrompt, RoutedRequest
from ...options.router import RouterOptions
from ...options.server import ServerOptions
from ...text.cache_salt import client_salt
from ...text.openai.errors import RequestError, parse_request_object
from ..routes.body import SOURCE_HEADER
from ..routes.client_bodies import admit_body
from ..service.body_admission import Admission
from ..service.client_connection import ClientLeft, run_while_connected
from ..service.errors import HttpError
from .http_client import (
    BODILESS_STATUSES,
    AnswerTooLong,
    ConnectionLost,
    Headers,
    HttpConnection,
    ServerAddress,
    join_pieces,
)
from .prompts import PageHasher, charged_tokens
from .request_queue import PrefillPool, RequestQueue
from .resumable import PassThroughStream, ResumableStream, first_event_data

GENERATE_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
LONG_BODY_BYTES = 1 << 12  # bytes; longer bodies are read, and their prompts hashed, in another thread
RESUME_SHARE = 1 / 8  # share of a body's size that `max_body` must still have for the tokens of its answer
REALM_MISMATCH_STATUS = 409  # status of a replica whose weights differ from those that began the answer
BUSY_STATUSES = (429, 502, 503)  # statuses after which another replica may still answer
CONNECTION_HEADERS = {
    b"connection",
    b"transfer-encoding",
    b"keep-alive",
    b"content-length",
    b"host",
    b"server",
    b"date",
}
# Request headers that are not passed on.
DROPPED_HEADERS = {
    b"accept-encoding",
    b"expect",
    b"origin",
    b"sec-fetch-site",
    SOURCE_HEADER.encode(),
    *CONNECTION_HEADERS,
}

OTHER_REALM_ERROR = HttpError(
    502,
    "the replica went away before its answer was whole, and no other has the weights that it began with",
    "replica_lost",
)


class RealmMismatch(Exception):
    """A replica cannot continue an answer, since its weights differ from those that began it."""


@dataclass
class ProxyRequest:
    """A client's request, and the progress of its answer.

    generates: whether it generates tokens, so that a prefill engine may help
    stream: state from which another replica can continue the answer; None if none can
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
        """Realm that a replica needs to continue the answer, without the adapter's digest; empty before the
        first token."""
        return self.stream.realm.partition(" ")[0] if self.stream and self.stream.has_begun else ""

    @property
    def is_unresumable(self) -> bool:
        """True if the answer has tokens and cannot be continued, since no replica named their realm."""
        return self.stream is not None and self.stream.has_begun and not self.stream.realm

    def restart_answer(self) -> bool:
        """Discard all tokens, so that the answer begins again. Returns False, and does nothing, if the client
        has received a part or the answer cannot be resumed."""
        if self.has_head or self.stream is None:
            return False
        self.stream.discard_answer()
        return True

    @property
    def next_body(self) -> bytes:
        return self.body if self.stream is None else self.stream.next_body


async def connect_replica(replica: Replica) -> HttpConnection:
    return await HttpConnection.connect(ServerAddress.from_url(replica.address))


class Proxy:
    """Forwards requests to replicas. After the loss of a replica, another one resumes the stream from its
    tokens. An answer that has not begun is requested again.

    page_hasher: hashes the pages of a prompt
    connect: opens a connection to a replica
    num_in_flight, num_resumed, num_retried: number of running requests, resumed answers, repeated requests
    """

    def __init__(
        self,
        queue: RequestQueue,
        prefills: PrefillPool,
        page_hasher: PageHasher,
        options: RouterOptions,
        server: ServerOptions,
        connect: Callable[[Replica], Awaitable[HttpConnection]] = connect_replica,
    ):
        self.queue, self.prefills, self.page_hasher, self._connect = queue, prefills, page_hasher, connect
        self.options, self.server, self.admission = options, server, Admission(server)
        self.num_in_flight = self.num_resumed = self.num_retried = 0
        self.ended = asyncio.Event()
        self.is_draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.is_draining:
            raise HttpError(503, "the router is ending", "unavailable")
        with self._count_request():
            try:
                request, prompt, tokens = await self._receive_request(scope, receive)
                position = self.queue.assign_position(scope.get("client_name", ""), tokens)
                await run_while_connected(
                    receive, self._answer_request(request, RoutedRequest(prompt), position, send)
                )
            except ClientLeft:
                pass

    @contextmanager
    def _count_request(self):
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
            if self.is_draining and not self.num_in_flight:
                self.ended.set()

    def start_draining(self) -> None:
        """Take no more requests. `ended` is set once the running requests are done."""
        self.is_draining = True
        if not self.num_in_flight:
            self.ended.set()

    async def _receive_request(
        self, scope: Scope, receive: Receive
    ) -> tuple[ProxyRequest, RoutedPrompt, int]:
        """Wait for room for a request's body, read it, and return the result of `_parse_request`."""
        if scope["method"] != "POST":
            return self._parse_request(scope, b"")
        async with admit_body(Request(scope, receive), self.admission) as client_body:
            reading = partial(self._parse_request, scope, client_body.data)
            return (
                reading() if client_body.cost <= LONG_BODY_BYTES else await client_body.run_in_thread(reading)
            )

    def _parse_request(self, scope: Scope, body: bytes) -> tuple[ProxyRequest, RoutedPrompt, int]:
        """Return a request, its first prompt, and the number of tokens that it is charged."""
        path = b"?".join(filter(None, (scope["raw_path"], scope["query_string"]))).decode("latin-1")
        headers = [(name, value) for name, value in scope["headers"] if name not in DROPPED_HEADERS]
        request = ProxyRequest(scope["method"], path, headers, body, scope["path"] in GENERATE_PATHS)
        fields = parse_body_fields(body, self.admission.max_marks)
        has_room = len(body) * (1 + RESUME_SHARE) <= self.server.max_body
        can_resume = self.options.resume and request.generates and has_room
        if can_resume and fields and fields.get("resume") is None:
            request.stream = ResumableStream(fields, body)
        prompt = self.page_hasher(path, self._isolate_cache_salt(fields, scope)) if fields else RoutedPrompt()
        return request, prompt, charged_tokens(scope["path"], fields, prompt)

    def _isolate_cache_salt(self, fields: Mapping[str, Any], scope: Scope) -> Mapping[str, Any]:
        """Return a body's fields with the cache salt that its replica will use."""
        client, salt = scope.get("client_name", ""), fields.get("cache_salt")
        return {**fields, "cache_salt": client_salt(self.server.prefix_cache_isolation, client, salt)}

    # ------------------------------------------------------------ replicas, one after the other

    async def _answer_request(
        self, request: ProxyRequest, routed_request: RoutedRequest, position: int, send: Send
    ) -> None:
        attempt = 1
        while attempt <= self.options.max_attempts:
            is_last = attempt == self.options.max_attempts
            replica = await self._assign_next_replica(request, routed_request, position, send)
            if replica is None:
                return
            try:
                if await self._forward(replica, request, routed_request, send, is_last):
                    return
                routed_request.failed_replicas.add(replica)
            except RealmMismatch as unfit:  # costs no attempt: each replica is tried once
                print_stderr(f"duetto: {replica} does not go on with another's answer: {unfit}")
                routed_request.exclude_mismatched(replica)
                continue
            except AnswerTooLong as long:
                print_stderr(f"duetto: {replica}: {long}")
                if not request.has_head:
                    raise
                return await send_error_event(long, send)
            except ConnectionLost as lost:
                print_stderr(
                    f"duetto: {replica}: {lost}" + ("" if is_last else "; the request goes on elsewhere")
                )
                routed_request.disconnected_replicas.add(replica)
                replica.suspect()
                if await self._give_up(request, send, is_last):
                    return
            finally:
                self.queue.release(replica, routed_request)
            attempt += 1
            self.num_resumed += request.has_begun
            self.num_retried += not request.has_begun

    async def _assign_next_replica(
        self, request: ProxyRequest, routed_request: RoutedRequest, position: int, send: Send
    ) -> Replica | None:
        """Wait for the next replica of a request. Returns None if an error was sent to the client. If no
        replica can continue the answer and the client has received nothing, the answer begins again."""
        routed_request.realm = request.realm
        try:
            return await self.queue.assign_replica(routed_request, position)
        except HttpError as error:
            failure = error
            if routed_request.mismatched_replicas and error.code == "unavailable":
                if request.restart_answer():
                    print_stderr(
                        "duetto: no replica has the weights that an answer began with: it begins anew"
                    )
                    routed_request.reset_realm()
                    return await self._assign_next_replica(request, routed_request, position, send)
                failure = OTHER_REALM_ERROR
                print_stderr(f"duetto: a stream ends with an error: {failure}")
            if not request.has_head:
                raise
            await send_error_event(failure, send)
            return None

    async def _give_up(self, request: ProxyRequest, send: Send, is_last: bool) -> bool:
        """End a request after the loss of its replica, if it cannot go on elsewhere. Returns whether it has
        ended with an error to the client. Raises HttpError if nothing has been sent."""
        error = HttpError(502, "the replica went away before its answer was whole", "replica_lost")
        if request.is_unresumable:
            request.restart_answer()
        if request.has_head and (is_last or request.stream is None or request.is_unresumable):
            await send_error_event(error, send)
            return True
        if is_last:
            raise error
        return False

    async def _forward(
        self,
        replica: Replica,
        request: ProxyRequest,
        routed_request: RoutedRequest,
        send: Send,
        is_last: bool,
    ) -> bool:
        """Send the request to a replica and pass its answer on. Returns False if the replica is busy and
        another may answer. Raises ConnectionLost, RealmMismatch and AnswerTooLong."""
        connection = await self._connect(replica)
        replica.connections[connection] = None
        try:
            with (
                self.prefills.reserve_prefill_engine(routed_request)
                if request.generates
                else nullcontext([]) as prefill_headers
            ):
                connection.send(
                    request.method, request.path, request.headers + prefill_headers, request.next_body
                )
                status = await connection.read_status()
            if status == REALM_MISMATCH_STATUS and request.realm:
                raise RealmMismatch(error_message(await connection.read_body()))
            if status in BUSY_STATUSES and not is_last and self._has_other_replica(routed_request, replica):
                return False
            replica.on_prefill_done(routed_request)
            kind = dict(connection.headers).get(b"content-type", b"")
            if status == 200 and kind.startswith(b"text/event-stream"):
                await self._pass_stream(connection, request, send, is_last)
            else:
                await self._pass_response(connection, request, send)
            return True
        finally:
            replica.connections.pop(connection, None)
            await connection.close()

    def _has_other_replica(self, routed_request: RoutedRequest, replica: Replica) -> bool:
        return any(
            candidate.is_ready
            and candidate not in routed_request.failed_replicas
            and candidate is not replica
            for candidate in self.queue.replicas
        )

    async def _pass_response(self, connection: HttpConnection, request: ProxyRequest, send: Send) -> None:
        status, body = await connection.read_status(), await connection.read_body()
        if request.has_head:  # the stream cannot be resumed there
            return await send_error_event(HttpError(502, error_message(body), "replica_lost"), send)
        if status in BODILESS_STATUSES or request.method == "HEAD":
            return await send_bodiless(connection, request, send)
        await send_answer(request, status, passed_headers(connection), body, send)

    async def _send_answer_from_stream(
        self, connection: HttpConnection, request: ProxyRequest, send: Send, is_last: bool
    ) -> None:
        """Send a whole answer. It arrives as the last event of a stream, which also reports its tokens."""
        stream = request.stream
        assert stream is not None
        async with aclosing(read_passable_events(connection, stream)) as pieces:
            events = await join_pieces(pieces)
        body = first_event_data(events + stream.held_events)
        if not stream.is_whole and not (is_last and body):
            raise ConnectionLost("the answer has ended before it was whole")
        headers = [header for header in passed_headers(connection) if header[0] != b"content-type"]
        headers.append((b"content-type", b"application/json"))
        has_failed = body.startswith(b'{"error":')
        status = 502 if not stream.is_whole else 500 if has_failed else 200
        await send_answer(request, status, headers, body, send)

    async def _pass_stream(
        self, connection: HttpConnection, request: ProxyRequest, send: Send, is_last: bool
    ) -> None:
        stream = request.stream
        if stream is not None:
            stream.begin_answer()
            if not stream.is_stream:
                return await self._send_answer_from_stream(connection, request, send, is_last)
        if not request.has_head:
            await send_head(request, 200, passed_headers(connection), send)
        passed_stream = stream or PassThroughStream()
        async with aclosing(read_passable_events(connection, passed_stream)) as pieces:
            async for events in pieces:
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
        if stream is not None and not stream.is_whole and not is_last:
            raise ConnectionLost("the stream has ended before its last event")
        await send({"type": "http.response.body", "body": passed_stream.held_events})


async def read_passable_events(
    connection: HttpConnection, stream: ResumableStream | PassThroughStream
) -> AsyncGenerator[bytes]:
    """Yield the events that can be passed on after each piece of a stream, until its end."""
    async with aclosing(connection.read_pieces()) as pieces:
        async for piece in pieces:
            yield stream.feed(piece)
            if stream.is_whole:
                return


async def send_head(request: ProxyRequest, status: int, headers: Headers, send: Send) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    request.has_head = True


async def send_answer(request: ProxyRequest, status: int, headers: Headers, body: bytes, send: Send) -> None:
    await send_head(request, status, [*headers, (b"content-length", b"%d" % len(body))], send)
    await send({"type": "http.response.body", "body": body})


async def send_bodiless(connection: HttpConnection, request: ProxyRequest, send: Send) -> None:
    """Send an answer without a body. An answer to HEAD names the length of the body that GET would get."""
    lengths = [header for header in connection.headers if header[0] == b"content-length"]
    more = lengths if request.method == "HEAD" else []
    await send_head(request, await connection.read_status(), passed_headers(connection) + more, send)
    await send({"type": "http.response.body", "body": b""})


def passed_headers(connection: HttpConnection) -> Headers:
    """Return the headers of an answer, except headers about the connection (see `CONNECTION_HEADERS`)."""
    return [header for header in connection.headers if header[0] not in CONNECTION_HEADERS]


async def send_error_event(error: HttpError, send: Send) -> None:
    """End a stream with an event that has the error."""
    body = b"data: " + msgspec.json.encode(error.body) + b"\n\n"
    await send({"type": "http.response.body", "body": body})


def parse_body_fields(body: bytes, max_marks: int | None = None) -> Mapping[str, Any]:
    """Parse the fields of a body. Returns {} for a body that replicas reject: no JSON object, or more than
    `max_marks` commas, colons and brackets."""
    try:
        return parse_request_object(body, "body", max_marks)
    except RequestError:
        return {}


def error_message(body: bytes) -> str:
    error = parse_body_fields(body).get("error")
    return str(error.get("message")) if isinstance(error, dict) else "the replica cannot go on"
