"""What clients send that breaks their own requests: no replica counts as lost by it. Router and replicas
listen on sockets here, with the HTTP limits of servers."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from duetto.serve.options.router import RouterOptions
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.http.http_limits import MAX_HEAD_BYTES, LimitedHttpProtocol
from duetto.serve.server.http.lifecycle import make_guarded_app
from duetto.serve.server.router.health import HealthChecker
from duetto.serve.server.router.http_client import HttpConnection, ServerAddress
from duetto.serve.server.router.main import (
    make_page_hasher,
    make_queue_and_prefills,
    make_replicas,
    make_router_app,
)
from duetto.serve.server.router.proxy import Proxy
from duetto.serve.server.routes.body import read_body

MOST = 1 << 20  # bytes of a body in the router; in the replicas half of it
PAGE = b"<html>"
HEAD = b"%s HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer k\r\n"
CLOSE = b"connection: close\r\n"


def asked(line: bytes, *more: bytes, body: bytes = b"") -> bytes:
    length = [b"content-length: %d\r\n" % len(body)] if body else []
    return b"".join([HEAD % line, CLOSE, *more, *length, b"\r\n", body])


def posted(body: bytes, *more: bytes) -> bytes:
    return asked(b"POST /v1/completions", *more, body=body)


@asynccontextmanager
async def listening(own: ASGIApp) -> AsyncIterator[int]:
    """Serve an app; yields the port."""
    config, state, loop = uvicorn.Config(own, lifespan="off"), ServerState(), asyncio.get_running_loop()
    config.load()

    def connection() -> LimitedHttpProtocol:
        return LimitedHttpProtocol(config=config, server_state=state, app_state={}, seconds=5.0)

    server = await loop.create_server(connection, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for one in list(state.connections):
            one.transport.abort()
        await asyncio.gather(*state.tasks, return_exceptions=True)


def replica(bodies: list[bytes], options: ServerOptions) -> ASGIApp:
    """An app as a server's, which keeps the bodies that it reads."""

    async def well(request: Request) -> Response:
        return Response()

    async def page(request: Request) -> Response:
        return Response(PAGE, media_type="text/html")

    async def status(request: Request) -> Response:
        return Response(status_code=int(request.query_params.get("s", "501")))

    async def hold() -> None: ...

    async def completion(request: Request) -> Response:
        bodies.append(await read_body(request, options, hold))
        return Response("{}")

    routes = [Route(path, well) for path in ("/ready", "/health")]
    routes += [Route("/docs", page), Route("/v1/models", status)]
    routes += [Route("/v1/completions", completion, methods=["POST"])]
    return make_guarded_app(routes, options, ["k"], ("/ready", "/health", "/docs"))


class Stack:
    """A router and its replicas, and what these have read."""

    def __init__(self, port: int, replicas: list[Any], bodies: list[bytes]):
        self.port, self.replicas, self.bodies = port, replicas, bodies

    async def ask(self, data: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        try:
            return await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.transport.abort()

    async def status(self, data: bytes) -> int:
        found = re.findall(rb"HTTP/1.1 (\d+) ", await self.ask(data))
        return int(found[-1]) if found else 0


def stacked(test: Callable[[Stack], Awaitable[None]], *replicas: ASGIApp) -> None:
    """Test a router in front of apps, two of `replica` by default. Afterwards all replicas are ready, and
    none has been lost."""

    async def run() -> None:
        bodies: list[bytes] = []
        small, server = ServerOptions(max_body=MOST // 2), ServerOptions(max_body=MOST)
        apps = replicas or (replica(bodies, small), replica(bodies, small))
        async with AsyncExitStack() as stack:
            ports = [await stack.enter_async_context(listening(one)) for one in apps]
            urls = [f"http://127.0.0.1:{port}" for port in ports]
            options = RouterOptions(replica=urls, health_period=60.0, health_timeout=5.0)
            routed = make_replicas(options)
            line, prefills = make_queue_and_prefills(routed, options, server)
            proxy = Proxy(line, prefills, make_page_hasher(options), options, server)
            health = HealthChecker(routed, line, options)
            stack.callback(health.close)
            port = await stack.enter_async_context(listening(make_router_app(routed, proxy, server, ["k"])))
            while not all(one.is_ready for one in routed):
                await asyncio.sleep(0.005)
            await test(Stack(port, routed, bodies))
            while any(one.is_suspect for one in routed):
                await asyncio.sleep(0.005)
            assert all(one.is_ready and not one.lost and not one.requests for one in routed)

    asyncio.run(asyncio.wait_for(run(), 60))


LONG = b"a" * MOST
NUMBERS = b'{"prompt": "x", "logit_bias": [' + b"1e15," * (MOST // 12) + b"1e15]}"
CHUNKED = b"transfer-encoding: chunked\r\n"
REQUESTS = {
    "HEAD": (asked(b"HEAD /docs"), 200),
    "HEAD of an error": (asked(b"HEAD /v1/models"), 501),
    "GET with a body": (asked(b"GET /docs", body=b"x" * 99), 200),
    "OPTIONS": (asked(b"OPTIONS /v1/completions"), 405),
    "PUT": (asked(b"PUT /v1/completions", body=b"{}"), 405),
    "no content": (asked(b"GET /v1/models?s=204"), 204),
    "not modified": (asked(b"GET /v1/models?s=304"), 304),
    "not implemented": (asked(b"GET /v1/models"), 501),
    "too long for a replica": (posted(b'{"prompt": "%s"}' % LONG[: MOST * 3 // 4]), 413),
    "too long": (posted(LONG + b"a"), 413),
    "numbers that are written shortly": (posted(NUMBERS), 200),
    "chunks": (asked(b"POST /v1/completions", CHUNKED) + b"2\r\n{}\r\n0\r\n\r\n", 200),
    "malformed chunks": (asked(b"POST /v1/completions", CHUNKED) + b"2\r\n{}\r\nx\r\n\r\n", 400),
    "a long head": (asked(b"GET /docs", b"x-a: %s\r\n" % LONG[:70_000]), 431),
    "a head that is too long for a replica": (
        asked(b"GET /docs", b"x-a: %s\r\n" % LONG[: MAX_HEAD_BYTES - 92]),
        431,
    ),
    "bytes beyond ASCII": (asked(b"GET /docs?%s" % (b"\xe9" * 40_000)), 400),
    "an expectation": (posted(b'{"prompt": "x"}', b"expect: 100-continue\r\n"), 200),
    "HTTP/1.0": (b"GET /docs HTTP/1.0\r\n\r\n", 200),
    "no JSON": (posted(b"{"), 200),
    "no UTF-8": (posted(b'{"prompt": "\xff"}'), 200),
    "a lone surrogate": (posted(b'{"prompt": "\\ud800"}'), 200),
    "a large number": (posted(b'{"prompt": [1%s]}' % (b"0" * 400)), 200),
    "deep JSON": (posted(b'{"prompt": %s}' % (b"[" * 5000 + b"]" * 5000)), 200),
}


@pytest.mark.parametrize("data, status", REQUESTS.values(), ids=REQUESTS)
def test_a_request_that_fails_by_itself_loses_no_replica(data, status):
    async def test(stack: Stack) -> None:
        assert await stack.status(data) == status
        assert await stack.status(posted(b'{"prompt": "x"}')) == 200

    stacked(test)


def test_an_answer_to_head_has_a_length_but_no_body():
    async def test(stack: Stack) -> None:
        head, _, body = (await stack.ask(b"HEAD /docs HTTP/1.0\r\n\r\n")).partition(b"\r\n\r\n")
        assert b"content-length: %d" % len(PAGE) in head.lower() and body == b""
        assert await stack.status(b"HEAD /v1/models HTTP/1.0\r\n\r\n") == 401

    stacked(test)


def test_a_replica_gets_a_bodys_values_as_written():
    async def test(stack: Stack) -> None:
        for body in (b'{"prompt": "\\u0041", "seed": 1.0e+1}', b'{"prompt": "x", "resume": null}'):
            assert await stack.status(posted(body)) == 200
        first, second = stack.bodies
        assert first.startswith(b'{"prompt":"\\u0041","seed":1.0e+1,"resume":{"id":"')
        assert second.count(b"resume") == 1 and json.loads(second)["resume"]["outputs"] == []

    stacked(test)


def test_clients_that_leave_in_the_middle_lose_no_replica():
    async def test(stack: Stack) -> None:
        whole = posted(b'{"prompt": "x"}')
        for end in range(1, len(whole), 7):
            _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
            writer.write(whole[:end])
            await writer.drain()
            writer.transport.abort()
        assert await stack.status(whole) == 200

    stacked(test)


ANSWERS = {
    "nothing": (b"", 502),
    "hints before it": (
        b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}",
        200,
    ),
    "no end": (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", 502),
    "an error": (b"HTTP/1.1 501 No\r\ncontent-length: 2\r\n\r\n{}", 501),
}


@pytest.mark.parametrize("answer, status", ANSWERS.values(), ids=ANSWERS)
def test_replicas_that_are_well_stay_ready_whatever_they_answer(routing, answer, status):
    async def test(router):
        for fake in router.fakes:
            fake.garbage = [answer] * 3
        reply = await router.client.post("/v1/completions", json={"prompt": "x"})
        assert reply.status_code == status and "link" not in reply.headers
        await router.until(lambda: not any(one.is_suspect for one in router.replicas))
        assert all(one.is_ready and not one.lost and not one.requests for one in router.replicas)

    routing(test, health_period=60.0)


def test_a_replica_is_checked_at_once_where_a_connection_breaks(routing):
    async def test(router):
        await router.fakes[0].close()
        for _ in range(2):
            assert "[DONE]" in await router.words()
        await router.until(lambda: bool(router.replicas[0].lost))
        assert not router.replicas[0].is_up and router.replicas[1].is_ready

    routing(test, health_period=60.0)


def test_an_answer_sent_before_the_bodys_end_is_forwarded():
    """Of a server that reads no more of it, and leaves the connection open."""
    told = b"HTTP/1.1 413 No\r\ncontent-length: 2\r\n\r\n{}"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(told)
            await left.wait()
        finally:
            writer.transport.abort()

    async def test() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 10) as server:
            port = server.sockets[0].getsockname()[1]
            connection = await HttpConnection.connect(ServerAddress("127.0.0.1", port))
            connection.send("POST", "/", [], b"a" * (64 << 20))
            assert await connection.read_status() == 413 and await connection.read_body() == b"{}"
            await connection.close()
            left.set()
            await asyncio.sleep(0)

    left = asyncio.Event()
    asyncio.run(asyncio.wait_for(test(), 20))
