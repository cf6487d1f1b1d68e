"""Simulated connections between processes: bytes that come late and in pieces, connections that are cut, and
hosts that are cut off for a while. As on TCP, no byte is lost or doubled within a connection."""

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from benchmarks.chaos.simulated.world import PROCESS, Process, SimulatedLoop

SPLIT = 0.4  # probability that a piece comes in two
LATENCY = 0.004  # seconds of a piece, at most


class Socket:
    """What clients set options of."""

    def setsockopt(self, *_: Any) -> None: ...


class SimulatedTransport(asyncio.Transport):
    """One end of a connection. Bytes and the end arrive at the other end in order."""

    def __init__(self, network: "Network", host: str, process: Process | None, random: Random):
        super().__init__({"socket": Socket()})
        self._network, self._host, self._random = network, host, random
        self.context = contextvars.copy_context() if process is None else process.context.copy()
        self._process, self._last, self._is_closing, self.is_lost = process, 0.0, False, False
        self._sent: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.peer: SimulatedTransport
        self.protocol: Any
        if process is not None:
            process.on_end.append(self._process_ended)

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing or not data:
            return
        data = bytes(data)
        if self._network.cuts and self._process is not None and b"\n\n" in data:
            self._network.cuts -= 1
            self._send(self.peer.arrived, data[: self._border(data)])
            return self.abort()
        at = self._border(data) if self._random.random() < SPLIT else 0
        for piece in filter(None, (bytes(data[:at]), bytes(data[at:]))):
            self._send(self.peer.arrived, piece)

    def _border(self, data: bytes) -> int:
        """Return where to cut data into two pieces: anywhere, or behind an event."""
        found = data.find(b"\n\n") + 2
        return found if self._random.random() < 0.5 else self._random.randrange(len(data) + 1)

    def lose(self) -> None:
        """Lose some of what is on its way, the last pieces: as many as a reset may overtake."""
        for _ in range(self._random.randrange(len(self._sent) + 1)):
            self._sent.pop()

    def _send(self, take: Callable[..., None], *args: Any) -> None:
        loop = self._network.loop
        self._last = max(self._last, loop.time() + self._random.random() * LATENCY)
        self._sent.append((take, args))
        loop.call_at(self._last, self._carry, context=self._network.context)

    def _carry(self) -> None:
        """Deliver what was sent first, once the host can be reached."""
        until = self._network.cut_off.get(self._host, 0.0)
        loop = self._network.loop
        if until > loop.time():
            self._last = max(self._last, until)
            loop.call_at(until, self._carry, context=self._network.context)
        elif self._process is None or self._process.is_alive or not self._process.is_silent:
            if not self._sent:  # lost
                return
            take, args = self._sent.popleft()
            loop.call_soon(take, *args, context=self.peer.context)

    def arrived(self, data: bytes) -> None:
        if not self.is_lost:
            self.protocol.data_received(data)

    def ended(self, error: BaseException | None) -> None:
        """The other end has closed the connection, or it is cut."""
        if not self.is_lost:
            self.is_lost = self._is_closing = True
            self._network.open.pop(self, None)
            self.protocol.connection_lost(error)

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            self._send(self.peer.ended, None)
            self._network.loop.call_soon(self.ended, None, context=self.context)

    def abort(self) -> None:
        if not self.is_lost:
            self._is_closing = True
            self._send(self.peer.ended, ConnectionResetError("reset"))
            self._network.loop.call_soon(self.ended, None, context=self.context)

    def _process_ended(self) -> None:
        if not self.is_lost:
            self.is_lost = self._is_closing = True
            self._network.open.pop(self, None)
            self.lose()
            self._send(self.peer.ended, ConnectionResetError("reset"))


class Network:
    """Connections of a simulation. `cut_off` has the time until which a host cannot be reached."""

    def __init__(self, loop: SimulatedLoop, random: Random):
        self.loop, self._random = loop, random
        self.listeners: dict[str, tuple[Process, Callable[[], Any]]] = {}
        self.cut_off: dict[str, float] = {}
        self.open: dict[SimulatedTransport, None] = {}  # ends of clients
        self.cuts = 0  # connections that are to be cut within what a server writes next
        self.context = contextvars.copy_context()
        loop.connect = self.connect

    async def connect(self, make: Callable[[], Any], host: str, port: int) -> tuple[Any, Any]:
        """Open a connection. Raises ConnectionRefusedError where no process listens."""
        await asyncio.sleep(self._random.random() * LATENCY)
        while (until := self.cut_off.get(host, 0.0)) > self.loop.time():
            await asyncio.sleep(until - self.loop.time())
        process, accept = self.listeners.get(host, (None, None))
        if process is None or accept is None or not process.is_alive:
            raise ConnectionRefusedError(111, f"no process listens at {host}")
        own, seed = PROCESS.get(), self._random.random()
        near = SimulatedTransport(self, host, own, Random(seed))
        far = SimulatedTransport(self, host, process, Random(seed + 1))
        near.peer, far.peer, near.protocol, far.protocol = far, near, make(), accept()
        near.protocol.connection_made(near)
        far.protocol.connection_made(far)
        self.open[near] = None
        return near, near.protocol

    def cut(self, random: Random) -> None:
        """Cut one of the open connections."""
        if self.open:
            near = random.choice(list(self.open))
            error = ConnectionResetError("cut")
            near.lose()
            near.peer.lose()
            near.peer._send(near.ended, error)
            near._send(near.peer.ended, error)
