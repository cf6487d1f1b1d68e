"""Answers that a router's client does not read to their end."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from duetto.serve.server.router.http_client import (
    MAX_ANSWER_HEAD_BYTES,
    AnswerTooLong,
    ConnectionLost,
    HttpConnection,
    ServerAddress,
)

BEGUN = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n"
PIECE = b"a" * (1 << 16)


def answered(begin: bytes, then: bytes, test: Callable[[HttpConnection], Awaitable[None]]) -> None:
    """Test a connection to a server that begins an answer, and then repeats a piece without end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(begin)
            while not writer.is_closing():
                writer.write(then)
                await asyncio.wait([asyncio.ensure_future(writer.drain())])
        finally:
            writer.transport.abort()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            connection = await HttpConnection.connect(ServerAddress("127.0.0.1", port))
            try:
                async with asyncio.timeout(60):
                    await test(connection)
            finally:
                connection.abort()

    asyncio.run(run())


HEADERS = {
    "one header": (b"HTTP/1.1 200 OK\r\nx-a: ", PIECE),
    "many headers": (b"HTTP/1.1 200 OK\r\n", b"x-a: b\r\n" * 1000),
    "one trailer": (BEGUN + b"0\r\nx-a: ", PIECE),
    "many trailers": (BEGUN + b"0\r\n", b"x-a: b\r\n" * 1000),
}


@pytest.mark.parametrize("begin, then", HEADERS.values(), ids=HEADERS)
def test_headers_without_end(begin, then):
    async def test(connection):
        with pytest.raises(ConnectionLost, match=f"more than {MAX_ANSWER_HEAD_BYTES} bytes of headers"):
            await connection.read_status()
            await connection.read_body()

    answered(begin, then, test)


def test_a_body_without_end(monkeypatch):
    monkeypatch.setattr("duetto.serve.server.router.http_client.MAX_ANSWER_BYTES", 1 << 20)

    async def test(connection):
        assert await connection.read_status() == 200
        with pytest.raises(AnswerTooLong, match="more than 1048576 bytes"):
            await connection.read_body()

    answered(BEGUN, b"10000\r\n" + PIECE + b"\r\n", test)
