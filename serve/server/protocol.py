"""HTTP for clients that mean no good: uvicorn's, with bounds on time and memory that it does not have."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MOST_HEAD = 1 << 16  # bytes of a request's head
AHEAD = 4  # requests that may be sent before the answer to an earlier one


class Bounded(HttpToolsProtocol):
    """A client has to send the head of a request in so many seconds and bytes, and may not stop reading for
    longer than that; that it has left is noticed behind requests that it has sent ahead, too."""

    def __init__(self, *given: Any, seconds: float, **others: Any):
        super().__init__(*given, **others)
        self._seconds = seconds
        self._head_bytes: int | None = 0  # None between the end of a head and the next message
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._earlier: list[RequestResponseCycle] = []  # whose answers are awaited behind the latest

    def _within(self, what: str, do: Callable[[], object]) -> None:
        self._cancel(what)
        self._timers[what] = self.loop.call_later(self._seconds, do)

    def _cancel(self, what: str) -> None:
        if (timer := self._timers.pop(what, None)) is not None:
            timer.cancel()

    def _close_idle(self) -> None:
        """Unless an answer is under way."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self._within("head", self._close_idle)

    # ------------------------------------------------------------ what the transport and the parser say

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._within("head", self._close_idle)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes is not None:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD and not self.transport.is_closing():
                self.send_400_response(f"the head has more than {MOST_HEAD} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = 0
        self._within("head", self._close_idle)

    def on_headers_complete(self) -> None:
        before = self.cycle
        self._head_bytes = None
        self._cancel("head")
        super().on_headers_complete()
        if self.pipeline:
            self._earlier = [cycle for cycle in (*self._earlier, before) if not cycle.response_complete]
            if len(self.pipeline) <= AHEAD:
                self.flow.resume_reading()  # who does not read does not hear that the client has left

    def pause_writing(self) -> None:
        super().pause_writing()
        self._within("reading", self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._cancel("reading")

    def connection_lost(self, exc: Exception | None) -> None:
        for what in tuple(self._timers):
            self._cancel(what)
        for cycle in self._earlier:
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)


def protocol(seconds: float) -> Any:
    """What uvicorn makes a connection's protocol with."""
    return partial(Bounded, seconds=seconds)
