"""Messages between two processes: msgpack in frames over TCP."""

import errno
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from math import ceil
from select import POLLIN, poll
from typing import Any, Generic, TypeVar

import msgspec

M = TypeVar("M")
MOST = 1 << 30  # bytes of a message
LENGTH = struct.Struct("!I")  # bytes of the frame that follows
KEEPALIVE = {"TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, tries
IDLE, MOST_IDLE = 10, 32_767  # seconds before the first try, and the most that Linux takes


class Link(Generic[M]):
    """End of a connection. Any thread may send, one thread receives.

    Raises EOFError where the other end is closed, TimeoutError where a message was not sent or received whole
    within `seconds`, OSError, and ValueError for bytes that the decoder cannot read.
    """

    def __init__(self, connection: socket.socket, seconds: float, decoder: msgspec.msgpack.Decoder[M]):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection, self._sending, self._decoder = connection, threading.Lock(), decoder
        self.wait_for(seconds)

    def wait_for(self, seconds: float) -> None:
        """Set the seconds that each message may take from here on; an idle end is not lost before."""
        self._seconds = seconds
        idle = min(max(IDLE, int(seconds)), MOST_IDLE)
        for name, value in {"TCP_KEEPIDLE": idle, **KEEPALIVE}.items():
            if (option := getattr(socket, name, None)) is not None:
                self._connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection.settimeout(seconds)

    def send(self, message: Any) -> None:
        content = msgspec.msgpack.encode(message)
        with self._sending:
            self._connection.sendall(LENGTH.pack(len(content)) + content)

    def receive(self, most: int = MOST, idle: bool = False) -> M:
        """Return the next message, of at most `most` bytes. With `idle` its first byte may come at any time;
        from then on the message has as long as any other."""
        while idle and not self._comes(self._seconds):
            pass
        until = time.monotonic() + self._seconds
        (size,) = LENGTH.unpack(self._read(LENGTH.size, until))
        if size > most:
            raise ValueError(f"a message of {size} bytes, expected at most {most}")
        return self._decoder.decode(self._read(size, until))

    @property
    def is_closed(self) -> bool:
        """True where the other end is closed and all that it sent has been read."""
        try:
            return self._comes(0) and not self._connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _comes(self, seconds: float) -> bool:
        """Wait at most `seconds` for bytes or the end of the connection; return whether there is either. The
        socket's own timeout stays as it is, since another thread may be sending."""
        place = self._connection.fileno()
        if place < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        waiting = poll()
        waiting.register(place, POLLIN)
        return bool(waiting.poll(ceil(1e3 * max(seconds, 0))))

    def _read(self, size: int, until: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            if not self._comes(until - time.monotonic()):
                raise TimeoutError(f"{len(parts)} of {size} bytes came within {self._seconds:g} s")
            part = self._connection.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """Close the connection. The other end and a thread that receives here get EOFError or OSError."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
