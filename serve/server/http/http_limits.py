"""HTTP for hostile clients: uvicorn's protocol, with limits on time and memory that uvicorn does not have."""

import asyncio
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from ..service.errors import HttpError

MOST_HEAD = 1 << 16  # bytes of a request's head
PART = 1 << 14  # bytes that are read at a time
AHEAD = 4  # requests that may be sent before the answer to an earlier one


class LimitedHttpProtocol(HttpToolsProtocol):
    """Limits each connection. The head of a request must arrive within `seconds` and MOST_HEAD bytes, and the
    client may stop reading for at most `seconds`. A disconnect is noticed behind requests that were sent
    ahead, too. Malformed HTTP gets an error body as all errors have, and offers of other protocols are
    ignored."""

    def __init__(self, *given: Any, seconds: float, **others: Any):
        super().__init__(*given, **others)
        self._seconds = seconds
        self._head_bytes = 0  # bytes of a head or of a body's end, since the last piece of a body
        self._pieces = 0  # counts heads begun, heads ended, and pieces of bodies
        self._between = True  # no message is under way: the next byte begins one
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._earlier: list[RequestResponseCycle] = []  # requests before `cycle` that have no whole answer

    def _within(self, what: str, do: Callable[[], object]) -> None:
        self._cancel(what)
        self._timers[what] = self.loop.call_later(self._seconds, do)

    def _cancel(self, what: str) -> None:
        if (timer := self._timers.pop(what, None)) is not None:
            timer.cancel()

    def _close_idle(self) -> None:
        """Close the connection, unless an answer is being sent."""
        if self.cycle is None or self.cycle.response_complete:
            self._close()
        else:
            self._within("head", self._close_idle)

    def _close(self) -> None:
        """Close the connection, and abort it if the client does not read the rest of what was written."""
        self.transport.close()
        self._within("reading", self.transport.abort)

    @property
    def _awaited(self) -> list[RequestResponseCycle]:
        """Requests whose answers have not been sent completely."""
        cycles = self._earlier if self.cycle is None else [*self._earlier, self.cycle]
        return [cycle for cycle in cycles if not cycle.response_complete]

    def _refuse(self, error: HttpError) -> None:
        """Close the connection, after an error answer to the arriving request unless other answers go
        first."""
        if all(cycle.more_body and not cycle.response_started for cycle in self._awaited):
            answer = error.response()
            head = [b"HTTP/1.1 %d %s" % (error.status, HTTPStatus(error.status).phrase.encode())]
            head += [b"%s: %s" % header for header in answer.raw_headers]
            self.transport.write(b"\r\n".join([*head, b"connection: close", b"", bytes(answer.body)]))
        self._forget()
        self._close()

    def _forget(self) -> None:
        """Report a disconnect to all requests that are being answered."""
        for cycle in self._awaited:
            cycle.disconnected = True
            cycle.message_event.set()

    def _feed(self, data: bytes) -> None:
        """Parse data. Raises HttpParserError for malformed HTTP, also around HttpError for a head that is too
        long. The bytes of a head behind a body in the same data are known only when that head ends."""
        size, before = len(data), self._pieces + self._between
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as offer:
                data = self._head_without_offer() + data[offer.args[0] :]
        self._head_bytes = self._head_bytes + size if self._pieces <= before else 0

    def _head_without_offer(self) -> bytes:
        """Return the parsed head without its offer of another protocol, to be parsed again."""
        if self.scope["method"] == "CONNECT":
            raise httptools.HttpParserError("this is no proxy")
        method, version = (self.scope[name].encode() for name in ("method", "http_version"))
        line = b"%s %s HTTP/%s" % (method, self.url, version)
        kept = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the base class has it
        return b"\r\n".join([line, *kept, b"", b""])

    def _should_upgrade(self) -> bool:
        return True  # the base class must not act on a head that will be parsed again

    # ------------------------------------------------------------ callbacks of the transport and the parser

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._within("head", self._close_idle)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                if not (room := min(PART, MOST_HEAD - self._head_bytes)):
                    raise too_long()
                self._feed(data[:room])
                data = data[room:]
        except httptools.HttpParserError as error:
            unread = HttpError(400, "the request cannot be read as HTTP", "invalid_http")
            self._refuse(cause if isinstance(cause := error.__context__, HttpError) else unread)
        except HttpError as error:
            self._refuse(error)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._pieces, self._between = self._pieces + 1, False
        self._within("head", self._close_idle)

    def on_headers_complete(self) -> None:
        if head_size(self.parser.get_method(), self.url, self.headers) > MOST_HEAD:
            raise too_long()
        self._pieces += 1
        before = self.cycle
        self._cancel("head")
        super().on_headers_complete()
        if self.pipeline and self.cycle is not before:
            self._earlier = [cycle for cycle in (*self._earlier, before) if not cycle.response_complete]
            if len(self.pipeline) <= AHEAD:
                self.flow.resume_reading()  # a disconnect is only noticed while the transport reads

    def on_body(self, body: bytes) -> None:
        self._pieces += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._between = True

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._within("head", self._close_idle)  # also for bytes that are no request

    def pause_writing(self) -> None:
        super().pause_writing()
        self._within("reading", self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel("reading")

    def connection_lost(self, exc: Exception | None) -> None:
        for what in tuple(self._timers):
            self._cancel(what)
        self._forget()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_started:
            self._refuse(HttpError(503, "the server is ending", "unavailable"))
        else:
            super().shutdown()


def head_size(method: bytes, url: bytes, headers: Iterable[tuple[bytes, bytes]]) -> int:
    """Return the bytes of a request's head, without spaces around values."""
    lines = sum(len(name) + len(value) + len(b":\r\n") for name, value in headers)
    return len(method) + len(url) + len(b"  HTTP/1.1\r\n") + lines + len(b"\r\n")


def too_long() -> HttpError:
    return HttpError(431, f"the head has more than {MOST_HEAD} bytes", "head_too_long")
