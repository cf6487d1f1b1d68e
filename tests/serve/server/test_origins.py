"""Which pages of browsers may ask a server."""

from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from duetto.serve.server.origins import origins

THEIRS, OWN = "https://chat.example.org", "http://testserver"


def client(*allowed: str) -> TestClient:
    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse("yes", headers={"x-request-id": "1"})

    routes = [Route("/", answer, methods=["GET", "POST"])]
    return TestClient(Starlette(routes=routes, middleware=origins(allowed)))


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
def test_only_its_own_page_may_ask(headers, status):
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
