"""What a client learns of another's prompts by the tokens that count as cached."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from cases.requests import SIZES, SMALLEST

from duetto import LLM
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.http.main import make_server_app
from duetto.serve.server.service.service import Service

KEYS = ["first", "second"]
TALK = [{"role": "user", "content": "import os\n" * 8}]
BODIES = {
    "completions": {"prompt": "import os\n" * 8, "max_tokens": 1},
    "chat/completions": {"messages": TALK, "max_tokens": 1},
    "responses": {"input": "import os\n" * 8, "max_output_tokens": 1},
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    own: Any = {"max_prefill_delay": 0.0, "background_compilation": False, "use_tqdm_on_load": False}
    with LLM(SMALLEST, **SIZES, **own) as llm:
        yield llm


def cached(llm: LLM, path: str, asks: list[tuple[str, Any]], isolation: str) -> list[int]:
    """Cached tokens of requests, one after the other, each of a key and with a salt."""

    async def asked() -> list[int]:
        options = ServerOptions(prefix_cache_isolation=isolation, api_key_file="keys")
        service = Service(llm, options, {})
        transport, found = httpx.ASGITransport(make_server_app(service, KEYS, None)), []
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60) as client:
            for key, salt in asks:
                headers, body = {"authorization": f"Bearer {key}"}, BODIES[path] | {"cache_salt": salt}
                reply = await client.post(f"/v1/{path}", json=body, headers=headers)
                assert reply.status_code == 200, reply.text
                usage = reply.json()["usage"]
                details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
                found.append(details["cached_tokens"])
        await service.close()
        return found

    llm.engine.tables.reset_prefix_cache()
    return asyncio.run(asked())


@pytest.mark.parametrize("path", BODIES)
def test_keys_share_no_cached_prompts_where_they_are_isolated(llm, path):
    first, second = KEYS
    asks = [(first, None), (second, None), (second, None), (first, "a"), (second, "a"), (first, "a")]
    _, *found = cached(llm, path, asks, "key")
    assert found[0] == found[2] == found[3] == 0 and found[1] == found[4] > 0
    _, *found = cached(llm, path, asks, "none")
    assert found[2] == 0 and found[0] == found[1] == found[3] == found[4] > 0


@pytest.mark.parametrize("salt", ["", 3, ["a"], "a" * 1025])
@pytest.mark.parametrize("path", [*BODIES, "embeddings"])
def test_a_salt_that_is_none_is_refused_by_its_field(llm, path, salt):
    async def asked() -> httpx.Response:
        service = Service(llm, ServerOptions(), {})
        transport = httpx.ASGITransport(make_server_app(service, [], None))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            body = BODIES.get(path, {"input": "x"}) | {"cache_salt": salt}
            reply = await client.post(f"/v1/{path}", json=body)
        await service.close()
        return reply

    error = asyncio.run(asked())
    assert error.status_code == 400 and error.json()["error"]["param"] == "cache_salt"


@pytest.mark.parametrize(
    "options, refusal",
    [
        ({"prefix_cache_isolation": "user", "api_key_file": "k"}, "'user' is not allowed: none or key"),
        ({"prefix_cache_isolation": "key"}, "'key' is not allowed without api_key_file"),
    ],
)
def test_an_isolation_that_isolates_nobody_is_refused(options, refusal):
    with pytest.raises(ValueError, match=f"prefix_cache_isolation {refusal}"):
        ServerOptions(**options)
