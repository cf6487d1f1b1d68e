"""HTTP for hostile clients: uvicorn's protocol, with limits on time and memory that uvicorn does not have."""

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..service.errors import HttpError

MAX_HEAD_BYTES = 1 << 16  # bytes of a request's head
PART_BYTES = 1 << 14  # bytes that are read at a time
MAX_PIPELINED_REQUESTS = 4  # requests that may be sent before the answer to an earlier one


class LimitedHttpProtocol(HttpToolsProtocol):
    """HTTP protocol with limits on each connection.

    The head of a request must arrive within `seconds` and `MAX_HEAD_BYTES` bytes. The client may stop reading
    for at most `seconds`. A disconnect is noticed also if pipelined requests are waiting. Malformed HTTP gets
    an error body like all errors, and offers of other protocols are ignored.
    """

    def __init__(self, *args: Any, seconds: float, **others: Any):
        super().__init__(*args, **others)
        self._seconds = seconds
        self._head_bytes = 0  # bytes of a head or of a body's end, since the last piece of a body
        self._pieces = 0  # number of heads begun, heads ended, and pieces of bodies
        self._is_between_messages = True  # no message is being received: the next byte begins one
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._earlier: list[RequestResponseCycle] = []  # requests before `cycle` whose answers are incomplete

    def _set_timer(self, name: str, on_timeout: Callable[[], object]) -> None:
        self._cancel_timer(name)
        self._timers[name] = self.loop.call_later(self._seconds, on_timeout)

    def _cancel_timer(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _close_if_idle(self) -> None:
        """Close the connection, unless an answer is being sent."""
        if self.cycle is None or self.cycle.response_complete:
            self._close()
        else:
            self._set_timer("head", self._close_if_idle)

    def _close(self) -> None:
        """Close the connection. Abort it if the client does not read the written bytes in time."""
        self.transport.close()
        self._set_timer("reading", self.transport.abort)

    @property
    def _open_cycles(self) -> list[RequestResponseCycle]:
        """Requests whose answers have not been sent completely."""
        cycles = self._earlier if self.cycle is None else [*self._earlier, self.cycle]
        return [cycle for cycle in cycles if not cycle.response_complete]

    def _refuse_request(self, error: HttpError) -> None:
        """Answer the arriving request with an error, and close the connection. If other answers go first,
        close it without this answer."""
        if all(cycle.more_body and not cycle.response_started for cycle in self._open_cycles):
            answer = error.to_response()
            head = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
            head += [b"%s: %s" % header for header in answer.raw_headers]
            self.transport.write(b"\r\n".join([*head, b"connection: close", b"", bytes(answer.body)]))
        self._report_disconnect()
        self._close()

    def _report_disconnect(self) -> None:
        """Report a disconnect to all requests whose answers are incomplete."""
        for cycle in self._open_cycles:
            cycle.disconnected = True
            cycle.message_event.set()

    def _feed_parser(self, data: bytes) -> None:
        """Parse data, and count the bytes of an unfinished head. A head that follows a body in the same data
        is counted only when it ends. Raises HttpParserError for malformed HTTP; its context is an HttpError
        if the head is too long."""
        size, before = len(data), self._pieces + self._is_between_messages
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as offer:
                data = self._restart_parser_without_upgrade() + data[offer.args[0] :]
        self._head_bytes = self._head_bytes + size if self._pieces <= before else 0

    def _restart_parser_without_upgrade(self) -> bytes:
        """Return the parsed head without its `upgrade` header, and make the parser that the caller feeds it
        to."""
        if self.scope["method"] == "CONNECT":
            raise httptools.HttpParserError("this is no proxy")
        method, version = (self.scope[name].encode() for name in ("method", "http_version"))
        line = b"%s %s HTTP/%s" % (method, self.url, version)
        lines = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the base class has it
        return b"\r\n".join([line, *lines, b"", b""])

    def _should_upgrade(self) -> bool:
        return True  # the base class must not act on a head that will be parsed again

    # ------------------------------------------------------------ callbacks of the transport and the parser

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._set_timer("head", self._close_if_idle)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                if not (room := min(PART_BYTES, MAX_HEAD_BYTES - self._head_bytes)):
                    raise head_too_long_error()
                self._feed_parser(data[:room])
                data = data[room:]
        except httptools.HttpParserError as error:
            malformed = HttpError(400, "the request cannot be read as HTTP", "invalid_http")
            self._refuse_request(cause if isinstance(cause := error.__context__, HttpError) else malformed)
        except HttpError as error:
            self._refuse_request(error)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._pieces, self._is_between_messages = self._pieces + 1, False
        self._set_timer("head", self._close_if_idle)

    def on_headers_complete(self) -> None:
        if head_size(self.parser.get_method(), self.url, self.headers) > MAX_HEAD_BYTES:
            raise head_too_long_error()
        self._pieces += 1
        before = self.cycle
        self._cancel_timer("head")
        super().on_headers_complete()
        if self.pipeline and self.cycle is not before:
            self._earlier = [cycle for cycle in (*self._earlier, before) if not cycle.response_complete]
            if len(self.pipeline) <= MAX_PIPELINED_REQUESTS:
                self.flow.resume_reading()  # a disconnect is only noticed while the transport reads

    def on_body(self, body: bytes) -> None:
        self._pieces += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_between_messages = True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._set_timer("head", self._close_if_idle)  # also for bytes that are no request

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_timer("reading", self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel_timer("reading")

    def connection_lost(self, exc: Exception | None) -> None:
        for name in tuple(self._timers):
            self._cancel_timer(name)
        self._report_disconnect()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self._refuse_request(HttpError(503, "the server is ending", "unavailable"))
        else:
            super().shutdown()


def head_size(method: bytes, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the number of bytes of a request's head, without spaces around values."""
    lines = sum(len(name) + len(value) + len(b":\r\n") for name, value in headers)
    return len(method) + len(url) + len(b"  HTTP/1.1\r\n") + lines + len(b"\r\n")


def head_too_long_error() -> HttpError:
    return HttpError(431, f"the head has more than {MAX_HEAD_BYTES} bytes", "head_too_long")
