"""HTTP/1.1 client of a router. Each request has a connection of its own; its answer is read as it arrives. No
connection is reused: if its server closed it at that moment, it would be unknown whether the request had
begun."""

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

PIECE_BYTES = 1 << 16  # bytes that are read at a time
CONNECT_SECONDS = 5.0  # seconds to connect
MAX_ANSWER_HEAD_BYTES = 1 << 18  # bytes that are read without a byte of the body: of the head, or of trailers
MAX_ANSWER_BYTES = 1 << 30  # bytes of an answer that is no stream, or of held events of a stream
SWITCHING_PROTOCOLS = 101  # status of an answer in another protocol
BODILESS_STATUSES = (204, 304)  # statuses of answers without a body, even if they name a length
Headers = list[tuple[bytes, bytes]]
# errors of this process, not of a server
LOCAL_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class ConnectionLost(Exception):
    """A server cannot be reached, or disconnected before its answer was complete."""


class OutOfResources(ConnectionLost):
    """This process has no file descriptor or memory for a connection. This says nothing of the server."""


class AnswerTooLong(HttpError):
    """An answer has more than `MAX_ANSWER_BYTES` bytes. Other replicas would give the same answer."""

    def __init__(self):
        super().__init__(502, f"the answer has more than {MAX_ANSWER_BYTES} bytes", "answer_too_long")


def check_answer_size(size: int) -> None:
    """Raise AnswerTooLong for more than `MAX_ANSWER_BYTES` bytes."""
    if size > MAX_ANSWER_BYTES:
        raise AnswerTooLong


async def join_pieces(pieces: AsyncIterable[bytes]) -> bytes:
    """Join all pieces of an answer. Raises AnswerTooLong."""
    joined = bytearray()
    async for piece in pieces:
        joined += piece
        check_answer_size(len(joined))
    return bytes(joined)


@dataclass(frozen=True)
class ServerAddress:
    """Address of a server. `is_https`: whether it speaks https."""

    host: str
    port: int
    is_https: bool = False

    @classmethod
    def from_url(cls, url: str) -> "ServerAddress":
        parts = urlsplit(url)
        is_https = parts.scheme == "https"
        return cls(parts.hostname or "", parts.port or (443 if is_https else 80), is_https)

    @property
    def authority(self) -> str:
        """Host and port, as in a `HostTimes` header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.is_https else 'http'}://{self.authority}"


class HttpConnection:
    """Sends one request to a server and reads its answer. Methods raise ConnectionLost if the server is
    gone."""

    def __init__(self, address: ServerAddress, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._address, self._reader, self._writer = address, reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._has_head = self.is_whole = self._is_head_request = False
        self._head_bytes = 0
        self.headers: Headers = []

    @classmethod
    async def connect(cls, address: ServerAddress, seconds: float = CONNECT_SECONDS) -> "HttpConnection":
        ssl_context = ssl.create_default_context() if address.is_https else None
        try:
            async with asyncio.timeout(seconds):
                reader, writer = await asyncio.open_connection(
                    address.host, address.port, ssl=ssl_context, limit=PIECE_BYTES
                )
        except (OSError, TimeoutError) as error:
            kind = (
                OutOfResources
                if isinstance(error, OSError) and error.errno in LOCAL_ERRNOS
                else ConnectionLost
            )
            raise kind(f"{address}: {error}") from None
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return cls(address, reader, writer)

    def send(self, method: str, path: str, headers: Iterable[tuple[bytes, bytes]], body: bytes = b"") -> None:
        self._is_head_request = method == "HEAD"
        lines = [b"%s %s HTTP/1.1" % (method.encode(), path.encode("latin-1"))]
        lines += [b"host: " + self._address.authority.encode(), b"connection: close"]
        lines += [b"%s: %s" % header for header in headers]
        lines += [b"content-length: %d" % len(body)] if body or method == "POST" else []
        self._writer.write(b"\r\n".join([*lines, b"", body]))

    async def read_status(self) -> int:
        """Wait for the head of the answer, and return its status."""
        while not self._has_head:
            await self._read_more()
        if not 200 <= (status := self._parser.get_status_code()) < 600:
            raise ConnectionLost(f"the answer has status {status}")
        return status

    async def read_pieces(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives."""
        while True:
            if self._body:
                piece, self._body = b"".join(self._body), []
                yield piece
            elif self.is_whole:
                return
            else:
                await self._read_more()

    async def read_body(self) -> bytes:
        """Wait for the whole body, and return it. Raises AnswerTooLong."""
        async with aclosing(self.read_pieces()) as pieces:
            return await join_pieces(pieces)

    async def _read_more(self) -> None:
        """Read the bytes that have arrived. The request may still be being sent: a server may answer before
        it has read all of it."""
        try:
            data = await self._reader.read(PIECE_BYTES)
            if not data:
                raise ConnectionLost("the answer has no end")
            self._parser.feed_data(data)
            self._head_bytes = 0 if self._body else self._head_bytes + len(data)
            # counted here: the parser calls only once a header is complete
            if self._head_bytes > MAX_ANSWER_HEAD_BYTES:
                raise ConnectionLost(f"the answer has more than {MAX_ANSWER_HEAD_BYTES} bytes of headers")
        except (OSError, httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise ConnectionLost(str(error)) from None

    def abort(self) -> None:
        self._writer.transport.abort()

    async def close(self) -> None:
        """Close the connection after an answer. Abort it if the answer is incomplete, or if the server has
        not read the whole request."""
        if not self.is_whole or self._writer.transport.get_write_buffer_size():
            return self.abort()
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()

    # ------------------------------------------------------------ callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != SWITCHING_PROTOCOLS:  # another head follows
            self.headers = []
            return
        self._has_head = True
        self.is_whole = self._is_head_request or status in BODILESS_STATUSES

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self.is_whole = self._has_head
