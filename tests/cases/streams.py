"""Requests of the invariance suite as streams of the server, and the bits of what comes."""

import asyncio
from dataclasses import asdict
from typing import Any

import httpx
import msgspec
import numpy as np

from duetto import LLM, SamplingParams
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.http.main import make_server_app
from duetto.serve.server.service.service import Service

FIELDS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "logprobs", "logit_bias",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


def streamed(
    llm: LLM, texts: list[list[int]], params: list[SamplingParams]
) -> list[list[tuple[int, bytes, tuple[int, ...]]]]:
    """As `bits`, of streams that are all served at once, of a model without a tokenizer."""
    bodies = [body(text, one) for text, one in zip(texts, params, strict=True)]
    return [bits_of(answer) for answer in asyncio.run(answers(llm, bodies))]


def body(prompt: list[int], params: SamplingParams) -> dict[str, Any]:
    given = {name: value for name, value in asdict(params).items() if name in FIELDS}
    bias = {str(i): value for i, value in (given["logit_bias"] or {}).items()}
    return given | {"prompt": prompt, "stream": True, "logit_bias": bias or None}


async def answers(llm: LLM, bodies: list[dict[str, Any]]) -> list[str]:
    service = Service(llm, ServerOptions(), {})
    transport = httpx.ASGITransport(make_server_app(service, [], None))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=None) as client:
            found = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
    finally:
        await service.close()
    return [answer.text for answer in found]


def bits_of(answer: str) -> list[tuple[int, bytes, tuple[int, ...]]]:
    events = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: {")]
    choices = [choice for event in events for choice in msgspec.json.decode(event)["choices"]]
    assert choices[-1]["finish_reason"] == "length"
    found = []
    for choice in choices:
        scores = choice["logprobs"]
        rows = zip(choice["token_ids"], scores["token_logprobs"], scores["top_logprobs"], strict=True)
        for token, own, top in rows:
            at = {token: own} | {int(name.removeprefix("token_id:")): score for name, score in top.items()}
            found.append((token, np.array(list(at.values())).tobytes(), tuple(at)))
    return found
