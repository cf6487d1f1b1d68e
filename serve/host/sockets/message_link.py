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
MAX_MESSAGE_BYTES = 1 << 30  # bytes of a message
FRAME_LENGTH = struct.Struct("!I")  # bytes of the frame that follows
KEEPALIVE = {"TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, tries
IDLE_SECONDS, MAX_IDLE_SECONDS = 10, 32_767  # seconds before the first try, and the maximum that Linux takes


class Link(Generic[M]):
    """End of a connection. Any thread may send, one thread receives.

    Raises EOFError if the other end is closed. Raises TimeoutError if a message was not sent or received
    completely within `seconds`. Raises OSError, and ValueError for bytes that the decoder cannot read.
    """

    def __init__(self, connection: socket.socket, seconds: float, decoder: msgspec.msgpack.Decoder[M]):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection, self._sending_lock, self._decoder = connection, threading.Lock(), decoder
        self.set_timeout(seconds)

    def set_timeout(self, seconds: float) -> None:
        """Set the time limit of each message from now on, in seconds. An idle end is not given up before."""
        self._seconds = seconds
        idle = min(max(IDLE_SECONDS, int(seconds)), MAX_IDLE_SECONDS)
        for name, value in {"TCP_KEEPIDLE": idle, **KEEPALIVE}.items():
            if (option := getattr(socket, name, None)) is not None:
                self._connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection.settimeout(seconds)

    def send(self, message: Any) -> None:
        content = msgspec.msgpack.encode(message)
        with self._sending_lock:
            self._connection.sendall(FRAME_LENGTH.pack(len(content)) + content)

    def receive(self, max_bytes: int = MAX_MESSAGE_BYTES, may_idle: bool = False) -> M:
        """Return the next message, of at most `max_bytes` bytes.

        may_idle: the first byte may come at any time; the time limit begins with it.
        """
        while may_idle and not self._has_data_within(self._seconds):
            pass
        deadline = time.monotonic() + self._seconds
        (size,) = FRAME_LENGTH.unpack(self._read(FRAME_LENGTH.size, deadline))
        if size > max_bytes:
            raise ValueError(f"a message of {size} bytes, expected at most {max_bytes}")
        return self._decoder.decode(self._read(size, deadline))

    @property
    def is_closed(self) -> bool:
        """True if the other end is closed and all of its bytes have been read."""
        try:
            return self._has_data_within(0) and not self._connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _has_data_within(self, seconds: float) -> bool:
        """Wait at most `seconds` for bytes or the end of the connection; returns True if one has come.

        The socket's timeout stays as it is, since another thread may be sending.
        """
        descriptor = self._connection.fileno()
        if descriptor < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        waiting = poll()
        waiting.register(descriptor, POLLIN)
        return bool(waiting.poll(ceil(1e3 * max(seconds, 0))))

    def _read(self, size: int, deadline: float) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            if not self._has_data_within(deadline - time.monotonic()):
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
