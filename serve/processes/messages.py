"""What the processes of a group tell each other, as msgpack in frames over TCP."""

import socket
import struct
import threading
from contextlib import suppress
from select import select
from typing import Any

import jax
import msgspec
import numpy as np

MOST = 1 << 30  # bytes of a message
LENGTH = struct.Struct("!I")  # bytes of the frame that follows


class Hello(msgspec.Struct, tag=True, frozen=True):
    """A rank's first word: what has to be alike in all of them, by name."""

    rank: int
    facts: dict[str, str]


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """Rank 0's answer to a rank that runs the same."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Why a rank cannot begin, or go on."""

    why: str


class Beat(msgspec.Struct, tag=True, frozen=True):
    """A sign of life, with the number of orders that are done."""

    done: int = 0


class Numbers(msgspec.Struct, array_like=True, frozen=True):
    """A host array."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, x: Any) -> "Numbers":
        x = np.asarray(x)
        return cls(x.dtype.str, x.shape, x.tobytes())

    @property
    def array(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Order(msgspec.Struct, tag=True, frozen=True):
    """A program that all run next, with what the host gives it; of a step, its shape."""

    program: str
    shape: str = ""
    given: tuple[Numbers, ...] = ()

    @classmethod
    def of(cls, program: str, shape: str, given: Any) -> "Order":
        return cls(program, shape, tuple(map(Numbers.of, jax.tree.leaves(given))))

    def tree(self, like: Any) -> Any:
        """What was given, in the structure of a tree of shapes."""
        return jax.tree.unflatten(jax.tree.structure(like), [numbers.array for numbers in self.given])


class End(msgspec.Struct, tag=True, frozen=True):
    """Rank 0 is done."""


Message = Hello | Welcome | Refused | Beat | Order | End
DECODER = msgspec.msgpack.Decoder(Message)


class Link:
    """One end of a connection. Any thread may send, one receives. Raises EOFError where the other end is
    closed, TimeoutError where nothing comes for so many seconds, OSError, and ValueError for what is no
    message."""

    def __init__(self, connection: socket.socket, seconds: float):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._sending = connection, threading.Lock()
        self.wait_for(seconds)

    def wait_for(self, seconds: float) -> None:
        """From here on so long for each word."""
        self._connection.settimeout(seconds)

    def send(self, message: Message) -> None:
        content = msgspec.msgpack.encode(message)
        with self._sending:
            self._connection.sendall(LENGTH.pack(len(content)) + content)

    def receive(self, most: int = MOST) -> Message:
        """The next message, of so many bytes at most."""
        (size,) = LENGTH.unpack(self._read(LENGTH.size))
        if size > most:
            raise ValueError(f"a message of {size} bytes, expected at most {most}")
        return DECODER.decode(self._read(size))

    @property
    def is_closed(self) -> bool:
        """Whether the other end is, and has left nothing to be read."""
        says, _, _ = select([self._connection], [], [], 0)
        try:
            return bool(says) and not self._connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _read(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._connection.recv(min(size - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def close(self) -> None:
        """The other end hears of it, and whoever receives here."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
