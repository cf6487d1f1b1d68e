"""Bodies of a flood: which are read, and what is done for them."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from duetto.serve.options.server import ServerOptions
from duetto.serve.server.routes.tokens import TokenRoutes
from duetto.serve.server.service import body_admission
from duetto.serve.server.service.body_admission import Admission
from duetto.serve.server.service.client_connection import ClientLeft
from duetto.serve.server.service.errors import HttpError
from duetto.serve.text.openai.errors import RequestError

PIECE_BYTES = 1 << 16
LONG = "a, b: [c] " * 20_000  # more marks than JSON may have, in a string


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """A lane has more on larger machines."""
    monkeypatch.setattr(body_admission, "POOL_THREADS", 1)


class Client:
    """A connection with a request to tokenize a text, which arrives in pieces; after `sent` of them no more
    come. Its client leaves when a test says so. Without a length in its head the body is chunked."""

    def __init__(
        self, name: str, text: str = LONG, length: int | None = None, body: bytes = b"", sent: int = 99
    ):
        body = body or json.dumps({"prompt": text}).encode()
        head = [] if length == 0 else [(b"content-length", str(length or len(body)).encode())]
        scope = {"type": "http", "method": "POST", "path": "/", "headers": head, "client_name": name}
        self.request, self.has_left = Request(scope, self.receive), asyncio.Event()
        self.count = -(-len(body) // PIECE_BYTES)
        self.pieces = [body[i * PIECE_BYTES :][:PIECE_BYTES] for i in range(min(sent, self.count))]

    @property
    def is_read(self) -> bool:
        return not self.pieces

    async def receive(self) -> Any:
        if self.pieces:
            self.count -= 1
            return {"type": "http.request", "body": self.pieces.pop(0), "more_body": self.count > 0}
        await self.has_left.wait()
        return {"type": "http.disconnect"}


class SlowTokenizer:
    """Notes its texts, and makes ids of them when a test says so."""

    def __init__(self):
        self.goes_on, self.texts = threading.Event(), []

    def encode(self, text: str, **options: Any) -> list[int]:
        self.texts.append(text)
        self.goes_on.wait()
        return [1, 2, 3]


Ask = Callable[[Client], Awaitable[Any]]


def run(test: Callable[[Ask, SlowTokenizer], Awaitable[None]]) -> None:
    async def begun() -> None:
        options, tokenizer = ServerOptions(max_body=1 << 18, api_key_file="keys"), SlowTokenizer()
        llm = SimpleNamespace(tokenizer=tokenizer)
        service: Any = SimpleNamespace(
            options=options, admission=Admission(options), llm=llm, max_model_len=100
        )
        route = TokenRoutes(service).routes[0].endpoint
        await asyncio.wait_for(test(lambda client: route(client.request), tokenizer), 60)
        service.admission.close()

    asyncio.run(begun())


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_texts_of_clients_that_have_left_are_not_tokenized():
    async def test(ask: Ask, tokenizer: SlowTokenizer) -> None:
        clients = [Client("a") for _ in range(60)]
        flood = [asyncio.create_task(ask(client)) for client in clients]
        await until(lambda: tokenizer.texts)
        for client in clients:
            client.has_left.set()
        found = await asyncio.gather(*flood, return_exceptions=True)
        assert all(isinstance(error, ClientLeft) for error in found)
        tokenizer.goes_on.set()
        reply = await ask(Client("b"))
        assert json.loads(reply.body)["tokens"] == [1, 2, 3] and len(tokenizer.texts) == 2

    run(test)


def test_bodies_of_a_flood_wait_unread_for_room():
    async def test(ask: Ask, tokenizer: SlowTokenizer) -> None:
        flood, other, short = [Client("a") for _ in range(9)], Client("b"), Client("a", "x")
        tasks = [asyncio.create_task(ask(client)) for client in (*flood, other, short)]
        await until(lambda: other.is_read and short.is_read and len(tokenizer.texts) == 2)
        assert [client.is_read for client in flood] == [True] * 2 + [False] * 7
        assert set(tokenizer.texts) == {LONG, "x"}
        tokenizer.goes_on.set()
        assert {reply.status_code for reply in await asyncio.gather(*tasks)} == {200}

    run(test)


def test_bodies_that_do_not_arrive_take_no_room():
    async def test(ask: Ask, tokenizer: SlowTokenizer) -> None:
        tokenizer.goes_on.set()
        for length in (0, 1 << 18):
            stalled = [Client("a", length=length, sent=1) for _ in range(20)]
            tasks = [asyncio.create_task(ask(client)) for client in stalled]
            await until(lambda clients=stalled: all(client.is_read for client in clients))
            for text in ("x", LONG):
                assert (await ask(Client("a", text, length=0))).status_code == 200
            for client in stalled:
                client.has_left.set()
            await asyncio.gather(*tasks, return_exceptions=True)

    run(test)


def test_a_body_announced_as_too_long_takes_no_room():
    async def test(ask: Ask, tokenizer: SlowTokenizer) -> None:
        client = Client("a", length=(1 << 18) + 1)
        with pytest.raises(HttpError, match="more than 262144 bytes") as told:
            await ask(client)
        assert told.value.status == 413 and client.is_read and not tokenizer.texts

    run(test)


def test_json_of_too_many_values_is_refused_unparsed():
    async def test(ask: Ask, tokenizer: SlowTokenizer) -> None:
        body = b'{"prompt": [' + b"{}," * 33_000 + b"{}]}"
        with pytest.raises(RequestError, match="at most 65536 commas, colons and opening brackets"):
            await ask(Client("a", body=body))
        assert not tokenizer.texts

    run(test)
