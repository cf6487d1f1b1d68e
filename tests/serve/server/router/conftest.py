"""A router in the test's own event loop, in front of servers that compute nothing."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, fields
from typing import Any

import httpx
import pytest
from fakes.replica import FakeReplica

from duetto.serve.options.router import RouterOptions
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.router.health import HealthChecker
from duetto.serve.server.router.main import (
    make_page_hasher,
    make_queue_and_prefills,
    make_replicas,
    make_router_app,
)
from duetto.serve.server.router.proxy import Proxy
from duetto.serve.server.router.request_queue import PrefillPool, RequestQueue


@dataclass
class Router:
    """The parts of a router, its client, and what is behind it."""

    fakes: list[FakeReplica]
    replicas: list[Any]
    line: RequestQueue
    prefills: PrefillPool
    proxy: Proxy
    client: httpx.AsyncClient

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                await asyncio.sleep(0.005)

    async def words(self, **body: Any) -> str:
        """What a client reads of a stream."""
        asked = {"prompt": "x", "stream": True} | body
        reply = await self.client.post("/v1/completions", json=asked)
        assert reply.status_code == 200, reply.text
        return reply.text


@pytest.fixture
def routing() -> Callable[..., None]:
    """Runs a test with a router in front of so many replicas, and of so many `prefills`."""

    def run(
        test: Callable[[Router], Awaitable[None]], count: int = 2, keys: Any = (), **options: Any
    ) -> None:
        asyncio.run(asyncio.wait_for(routed(test, count, list(keys), options), 60))

    return run


async def routed(test: Callable[[Router], Awaitable[None]], count: int, keys: list[str], given: dict) -> None:
    names = {f.name for f in fields(ServerOptions)}
    limits = {name: given.pop(name) for name in [*given] if name in names}
    server = ServerOptions(**limits)
    helpers = given.pop("prefills", 0)  # the last of the fakes, at addresses p:0, p:1 and so on
    fakes = [await FakeReplica().start() for _ in range(count + helpers)]
    quick = {"health_period": 0.02, "health_timeout": 10, "replica": [fake.url for fake in fakes[:count]]}
    quick["prefill"] = [f"{fake.url}=p:{i}" for i, fake in enumerate(fakes[count:])]
    options = RouterOptions(**(quick | given))
    replicas = make_replicas(options)
    line, prefills = make_queue_and_prefills(replicas, options, server)
    proxy = Proxy(line, prefills, make_page_hasher(options), options, server)
    health = HealthChecker(replicas, line, options)
    transport = httpx.ASGITransport(make_router_app(replicas, proxy, server, keys))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as client:
            router = Router(fakes, replicas, line, prefills, proxy, client)
            await router.until(lambda: all(one.is_ready for one in replicas))
            await test(router)
    finally:
        health.close()
        for fake in fakes:
            await fake.close()
