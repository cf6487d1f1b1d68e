"""One end of a connection between two processes: msgpack in frames over TCP."""

import socket
import struct
import threading
from contextlib import suppress
from select import select
from typing import Any, Generic, TypeVar

import msgspec

M = TypeVar("M")
MOST = 1 << 30  # bytes of a message
LENGTH = struct.Struct("!I")  # bytes of the frame that follows


class Link(Generic[M]):
    """Messages that a decoder knows. Any thread may send, one receives. Raises EOFError where the other end
    is closed, TimeoutError where nothing comes or goes for so many seconds, OSError, and ValueError for what
    is no message."""

    def __init__(self, connection: socket.socket, seconds: float, decoder: msgspec.msgpack.Decoder[M]):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._sending, self._decoder = connection, threading.Lock(), decoder
        self.wait_for(seconds)

    def wait_for(self, seconds: float) -> None:
        """From here on so long for each word."""
        self._connection.settimeout(seconds)

    def send(self, message: Any) -> None:
        content = msgspec.msgpack.encode(message)
        with self._sending:
            self._connection.sendall(LENGTH.pack(len(content)) + content)

    def receive(self, most: int = MOST, idle: bool = False) -> M:
        """The next message, of so many bytes at most; where the other end may be `idle`, however long it
        takes to begin."""
        (size,) = LENGTH.unpack(self._read(LENGTH.size, idle))
        if size > most:
            raise ValueError(f"a message of {size} bytes, expected at most {most}")
        return self._decoder.decode(self._read(size))

    @property
    def is_closed(self) -> bool:
        """Whether the other end is, and has left nothing to be read."""
        says, _, _ = select([self._connection], [], [], 0)
        try:
            return bool(says) and not self._connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _read(self, size: int, idle: bool = False) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self._connection.recv(min(size - len(parts), 1 << 20))
            except TimeoutError:
                if idle and not parts:
                    continue
                raise
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """The other end hears of it, and whoever receives here."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
