"""HTTP/1.1 client of a router: one connection a request, whose answer is read as it arrives. No connection is
used twice: if its server closed it at that moment, it would be unknown whether the request had begun."""

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

from ..service.errors import HttpError

PIECE = 1 << 16  # bytes that are read at a time
CONNECT = 5.0  # seconds
MOST_HEAD = 1 << 18  # bytes that are read without one of the body: a head, or what stands behind the body
MOST_ANSWER = 1 << 30  # bytes of an answer that is no stream, or of what a stream holds back
Headers = list[tuple[bytes, bytes]]

OWN = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # errors of this process, not of a server


class ConnectionLost(Exception):
    """A server cannot be reached, or disconnected before its answer was complete."""


class OutOfResources(ConnectionLost):
    """This process has no descriptor or memory for a connection, whatever the server's state."""


class AnswerTooLong(HttpError):
    """An answer is larger than a router holds. Other replicas would answer the same."""

    def __init__(self):
        super().__init__(502, f"the answer has more than {MOST_ANSWER} bytes", "answer_too_long")


def check_size(size: int) -> None:
    """Raise AnswerTooLong for more bytes of an answer than a router holds."""
    if size > MOST_ANSWER:
        raise AnswerTooLong


async def joined(pieces: AsyncIterable[bytes]) -> bytes:
    """Return all pieces as one. Raises AnswerTooLong."""
    found = bytearray()
    async for piece in pieces:
        found += piece
        check_size(len(found))
    return bytes(found)


@dataclass(frozen=True)
class ServerAddress:
    host: str
    port: int
    is_secret: bool = False

    @classmethod
    def of(cls, url: str) -> "ServerAddress":
        place = urlsplit(url)
        secret = place.scheme == "https"
        return cls(place.hostname or "", place.port or (443 if secret else 80), secret)

    @property
    def authority(self) -> str:
        """Host and port, as in a `Host` header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.is_secret else 'http'}://{self.authority}"


class HttpConnection:
    """Sends one request to a server and reads its answer. Methods raise ConnectionLost if the server is
    gone."""

    def __init__(self, target: ServerAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._target, self._reader, self._writer = target, reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._has_head = self.is_whole = False
        self._head_bytes = 0
        self.headers: Headers = []

    @classmethod
    async def to(cls, target: ServerAddress, seconds: float = CONNECT) -> "HttpConnection":
        secret = ssl.create_default_context() if target.is_secret else None
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_connection(
                    target.host, target.port, ssl=secret, limit=PIECE
                )
        except (OSError, TimeoutError) as error:
            kind = OutOfResources if isinstance(error, OSError) and error.errno in OWN else ConnectionLost
            raise kind(f"{target}: {error}") from None
        own = writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return cls(target, reader, writer)

    def send(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes = b"") -> None:
        lines = [b"%s %s HTTP/1.1" % (method.encode(), path.encode())]
        lines += [b"host: " + self._target.authority.encode(), b"connection: close"]
        lines += [b"%s: %s" % header for header in headers]
        lines += [b"content-length: %d" % len(body)] if body or method == "POST" else []
        self._writer.write(b"\r\n".join([*lines, b"", body]))

    async def status(self) -> int:
        """Wait for the head of the answer, and return its status."""
        while not self._has_head:
            await self._read()
        if not 200 <= (status := self._parser.get_status_code()) < 600:
            raise ConnectionLost(f"the answer has status {status}")
        return status

    async def pieces(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives."""
        while True:
            if self._body:
                found, self._body = b"".join(self._body), []
                yield found
            elif self.is_whole:
                return
            else:
                await self._read()

    async def body(self) -> bytes:
        """Return the whole body. Raises AnswerTooLong."""
        async with aclosing(self.pieces()) as pieces:
            return await joined(pieces)

    async def _read(self) -> None:
        try:
            await self._writer.drain()
            data = await self._reader.read(PIECE)
            if not data:
                raise ConnectionLost("the answer has no end")
            self._parser.feed_data(data)
            self._head_bytes = 0 if self._body else self._head_bytes + len(data)
            if self._head_bytes > MOST_HEAD:  # counted here: the parser calls only once a header is complete
                raise ConnectionLost(f"the answer has more than {MOST_HEAD} bytes of headers")
        except (OSError, httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ConnectionLost(str(error)) from None

    def abort(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    # ------------------------------------------------------------ callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.is_whole = True
