"""Which pages of browsers may ask a server, and under which names."""

import asyncio
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from duetto.serve.options.server import ServerOptions
from duetto.serve.server.http.guards import guard_middleware, is_loopback_scope, origin_middleware
from duetto.serve.server.router.http_client import ServerAddress

THEIRS, OWN = "https://chat.example.org", "http://testserver"


def client(*allowed: str) -> TestClient:
    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse("yes", headers={"x-request-id": "1"})

    routes = [Route("/", answer, methods=["GET", "POST"])]
    return TestClient(Starlette(routes=routes, middleware=origin_middleware(allowed)))


ASKED: list[tuple[dict[str, str], int]] = [
    ({}, 200),  # no browser
    ({"origin": OWN}, 200),
    ({"origin": THEIRS}, 403),
    ({"origin": OWN + ":3000"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://[::1"}, 403),
    ({"origin": THEIRS, "sec-fetch-site": "cross-site"}, 403),
    ({"origin": OWN + ":3000", "sec-fetch-site": "same-site"}, 403),
    ({"sec-fetch-site": "cross-site"}, 403),
    ({"origin": "https://behind.a.proxy", "sec-fetch-site": "same-origin"}, 200),
    ({"sec-fetch-site": "none"}, 200),
]


@pytest.mark.parametrize("headers, status", ASKED, ids=str)
def test_only_pages_of_the_server_may_send_requests(headers, status):
    http = client()
    reply = http.post("/", headers=headers)
    assert reply.status_code == status and "access-control-allow-origin" not in reply.headers
    if status == 403:
        assert "--allowed-origins" in reply.json()["error"]["message"]
    assert http.get("/", headers=headers).status_code == 200  # a browser shows it to no other page


@pytest.mark.parametrize("allowed", [THEIRS, "*"])
def test_pages_that_are_allowed_read_the_answer(allowed):
    http = client(allowed)
    asks: Any = {"origin": THEIRS, "access-control-request-method": "POST"}
    before = http.options(
        "/", headers=asks | {"access-control-request-headers": "authorization,x-stainless-os"}
    )
    assert before.status_code == 200 and before.headers["access-control-allow-origin"] == allowed
    assert "x-stainless-os" in before.headers["access-control-allow-headers"]
    reply = http.post("/", headers={"origin": THEIRS, "sec-fetch-site": "cross-site"})
    assert reply.status_code == 200 and reply.headers["access-control-allow-origin"] == allowed
    assert "x-request-id" in reply.headers["access-control-expose-headers"]
    other = http.post("/", headers={"origin": "https://other.example.org", "sec-fetch-site": "cross-site"})
    assert other.status_code == (200 if allowed == "*" else 403)


# a browser that an attacker's name leads here
EVIL = "evil.example:8102"


def status(asked_as: str, server: str = "127.0.0.1", method: str = "POST", **options: Any) -> int:
    """What is answered to a request by a socket's address, its page of the same origin."""

    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse("yes")

    async def asked() -> httpx.Response:
        made = Starlette(
            routes=[Route("/", answer, methods=["GET", "POST"])], middleware=guard_middleware(given)
        )

        async def served(scope: Any, receive: Any, send: Any) -> None:
            await made(scope | {"server": (server, 8102)}, receive, send)

        async with httpx.AsyncClient(transport=httpx.ASGITransport(served), base_url="http://x") as http:
            return await http.request(method, "/", headers={"host": asked_as, "origin": f"http://{asked_as}"})

    given = ServerOptions(**options)
    reply = asyncio.run(asked())
    if reply.status_code == 403:
        assert (
            "--allowed-hosts" in reply.json()["error"]["message"] and reply.json()["error"]["code"] == "host"
        )
    return reply.status_code


OWN = [
    "127.0.0.1:8102",
    "127.0.0.1",
    "[::1]:8102",
    "[::1]",
    "localhost",
    "LOCALHOST.:8102",
    "a.localhost:1",
    "10.0.0.5:80",
]
OTHERS = [
    EVIL, "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example.:80",
    "[::1].evil", "0x7f.1", "localhost:80@evil.example", "]:80", "evil.example:localhost", "notlocalhost",
    "127.0.0.1:80:evil", "x:127.0.0.1", "[evil.example]:80",
]  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_by_loopback_only_its_own_names_are_served(method):
    for server in ("127.0.0.1", "127.8.0.1", "::1", "::ffff:127.0.0.1"):
        assert {host: status(host, server, method) for host in OWN} == dict.fromkeys(OWN, 200)
        assert {host: status(host, server, method) for host in OTHERS} == dict.fromkeys(OTHERS, 403)


def test_other_addresses_serve_any_host_unless_hosts_are_listed():
    assert status(EVIL, "10.0.0.5") == status(EVIL, "fe80::1%eth0") == 200
    assert status(EVIL, "10.0.0.5", allowed_hosts=["chat.example"]) == 403
    assert status("10.0.0.5:8000", "10.0.0.5", allowed_hosts=["chat.example"]) == 200


def test_names_are_allowed():
    assert status("Chat.Example:8000", allowed_hosts=["chat.example"]) == 200
    assert status("a.chat.example", allowed_hosts=["chat.example"]) == 403
    wide = {"allowed_hosts": ["*.chat.example"]}
    assert status("a.b.chat.example:80", **wide) == 200
    assert status("chat.example", **wide) == status("evilchat.example", **wide) == 403
    assert status(EVIL, allowed_hosts=["*"]) == 200
    assert status("box:8000", host="box") == 200


@pytest.mark.parametrize(
    "name", ["http://chat.example", "chat.example:80", "", "*chat", "a b", "chat.*", "[::1]"]
)
def test_a_name_that_no_host_has_is_refused(name):
    with pytest.raises(ValueError, match="allowed_hosts .* is not allowed"):
        ServerOptions(allowed_hosts=[name])


def test_unknown_addresses_are_not_loopback():
    assert not is_loopback_scope({"type": "http"}) and not is_loopback_scope({"server": ("testserver", 80)})


@pytest.mark.parametrize(
    "url, host", [("http://127.0.0.1:8001", "127.0.0.1:8001"), ("https://[::1]", "[::1]:443")]
)
def test_a_router_uses_the_host_names_of_replicas(url, host):
    assert ServerAddress.from_url(url).authority == host and status(host) == 200
