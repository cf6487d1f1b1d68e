"""Streams that go on in another server, from the tokens that came."""

import asyncio
import json
import time
from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import jax
import pytest
from cases.requests import SIZES, SMALLEST
from suite.marks import full, full_if

from duetto import LLM, SamplingParams
from duetto.sampling.custom_processors import trace_processors
from duetto.serve.engine.core.request import Request
from duetto.serve.kv.offload.realm import hash_answer_realm
from duetto.serve.llm.weights import set_answer_realm
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.http.main import make_server_app
from duetto.serve.server.routes import completions
from duetto.serve.server.service.service import Service
from duetto.serve.server.streams.completion_stream import TokenReporter
from duetto.serve.text.openai.tasks import Task

ID = "0123456789abcdef" * 2
TALK = [{"role": "user", "content": "sort a list"}]
ASKED = {
    "text": ("completions", {"prompt": "def add(a, b):", "max_tokens": 12, "temperature": 1.0, "n": 2}),
    "seeds": ("completions", {"prompt": "x = ", "max_tokens": 12, "n": 2, "seed": [9, 4], "logprobs": 0}),
    "prompts": ("completions", {"prompt": ["import", [60, 61, 62]], "max_tokens": 9, "ignore_eos": True}),
    "scores": ("completions", {"prompt": "import os", "max_tokens": 9, "logprobs": 2, "temperature": 0.0}),
    "penalty": ("completions", {"prompt": "x = ", "max_tokens": 12, "repetition_penalty": 1.3, "stop": "zz"}),
    "chat": ("chat/completions", {"messages": TALK, "max_tokens": 10, "logprobs": True, "top_logprobs": 1}),
    "response": ("responses", {"input": "sort a list", "max_output_tokens": 10}),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    own: Any = {"max_prefill_delay": 0.0, "background_compilation": False, "use_tqdm_on_load": False}
    with LLM(SMALLEST, **SIZES, **own) as llm:
        yield llm


def ask(llm: LLM, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    async def asked() -> httpx.Response:
        service = Service(llm, ServerOptions(), {})
        transport = httpx.ASGITransport(make_server_app(service, [], None))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            reply = await client.post(f"/v1/{path}", json=body, headers=headers, timeout=60)
        await service.close()
        return reply

    return asyncio.run(asked())


def stream(llm: LLM, path: str, body: dict[str, Any], **known: Any) -> list[tuple[list[dict], dict]]:
    """The events of a stream, in groups with the tokens behind them."""
    resume = {"id": ID, "created": 1_700_000_000} | known
    reply = ask(llm, path, body | {"stream": True, "resume": resume})
    assert reply.status_code == 200, reply.text
    *pieces, end, nothing = reply.text.split("\n\n")
    assert (end, nothing) == (": end", "")
    groups, events = [], []
    for piece in pieces:
        if piece.startswith(": tokens "):
            groups.append((events, json.loads(piece.removeprefix(": tokens "))))
            events = []
        elif not piece.startswith(":") and not piece.endswith("[DONE]"):
            events.append(json.loads(piece.partition("data: ")[2]))
    return [*groups, (events, {})]


def merged(groups: list[tuple[list[dict], dict]]) -> Any:
    """What a client makes of events: of each choice its texts and lists put together."""
    found: dict[Any, dict[str, Any]] = {}
    for event in (event for events, _ in groups for event in events):
        if "sequence_number" in event:
            own = found.setdefault("response", {"numbers": [], "text": ""})
            own["numbers"].append(event["sequence_number"])
            own["text"] += event.get("delta", "")
            own["end"] = event.get("response")
            continue
        assert event["id"].endswith(ID) and event["created"] == 1_700_000_000
        for choice in event["choices"]:
            own = found.setdefault(choice["index"], {"text": "", "scores": [], "roles": 0, "end": None})
            delta = choice.get("delta", {})
            own["text"] += choice.get("text", "") + (delta.get("content") or "")
            own["roles"] += "role" in delta
            own["end"] = own["end"] or choice["finish_reason"]
            if choice["logprobs"]:
                own["scores"].append([*choice["logprobs"].values()])
    for own in found.values():
        own["scores"] = [x for parts in zip(*own.get("scores", ()), strict=True) for p in parts for x in p]
    return found


@full_if(lambda name: name in ("penalty", "text"))
@pytest.mark.parametrize("name", ASKED)
def test_a_stream_goes_on_from_any_of_its_tokens(llm, name):
    path, body = ASKED[name]
    groups = stream(llm, path, body)
    whole = merged(groups)
    outputs: list[list[int]] = [[], []]
    for i, (_, tokens) in enumerate(groups[:-1], 1):
        for choice, ids in tokens.items():
            outputs[int(choice)] += ids
        if i not in (1, 2, 5, len(groups) - 1):
            continue
        count = sum(len(events) for events, _ in groups[:i])
        known = outputs if name in ("text", "seeds", "prompts") else outputs[:1]
        llm.engine.tables.reset_prefix_cache()  # the other server has seen nothing of it
        rest = stream(llm, path, body, outputs=known, events=count)
        both = merged([*groups[:i], *rest])
        if name == "response":  # how tokens are dealt to events is no promise
            numbers = both["response"].pop("numbers")
            assert numbers == list(range(len(numbers)))
            both["response"]["numbers"] = whole["response"]["numbers"]
        assert both == whole


def test_each_choice_may_have_a_seed(llm):
    path, body = ASKED["seeds"]
    choices = ask(llm, path, body).json()["choices"]
    for seed, choice in zip(body["seed"], choices, strict=True):
        (alone,) = ask(llm, path, body | {"n": 1, "seed": seed}).json()["choices"]
        assert alone["text"] == choice["text"] and alone["logprobs"] == choice["logprobs"]
    assert choices[0]["text"] != choices[1]["text"]
    refused = ask(llm, path, body | {"n": 3})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "seed"
    assert "seed=(9, 4) is not allowed: one seed, or a list of as many as n=3" in refused.text


def whole(llm: LLM, path: str, body: dict[str, Any], **known: Any) -> tuple[list[dict], dict[str, Any]]:
    """The tokens that are told of a whole answer, one word after the other, and the answer."""
    reply = ask(llm, path, body | {"resume": {"id": ID, "created": 1_700_000_000} | known})
    *told, answer, end, nothing = reply.text.split("\n\n")
    assert (end, nothing) == (": end", ""), reply.text
    tokens = [one.removeprefix(": tokens ") for one in told if one.startswith(": tokens ")]
    return list(map(json.loads, tokens)), json.loads(answer[6:])


@pytest.mark.parametrize("name", [full("text"), "prompts", "penalty", full("talk"), "response"])
def test_a_whole_answer_goes_on_from_any_of_its_tokens(llm, name, monkeypatch):
    monkeypatch.setattr(completions, "TOKEN_COMMENT_SECONDS", 0.0)
    path, body = ASKED["chat" if name == "talk" else name]
    body = {field: value for field, value in body.items() if "logprobs" not in field} | {"seed": 5}
    told, answer = whole(llm, path, body)
    plain = ask(llm, path, body).json()
    assert plain | {"id": 0, "created": 0} == answer | {"id": 0, "created": 0} or name == "response"
    assert answer["id"].endswith(ID)
    outputs: list[list[int]] = [[], []]
    for i, tokens in enumerate(told, 1):
        for choice, ids in tokens.items():
            outputs[int(choice)] += ids
        if i in (1, 4, len(told)):
            llm.engine.tables.reset_prefix_cache()
            _, again = whole(llm, path, body, outputs=outputs if name in ("text", "prompts") else outputs[:1])
            assert uncached(again) == uncached(answer)


def uncached(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without how many tokens were found in a cache."""
    usage = {name: value for name, value in answer["usage"].items() if "details" not in name}
    return answer | {"usage": usage}


def test_whole_answers_with_scores_report_no_tokens(llm):
    path, body = ASKED["scores"]
    given = {"resume": {"id": ID, "created": 1_700_000_000}}
    found, plain = ask(llm, path, body | given).json(), ask(llm, path, body).json()
    assert found["choices"] == plain["choices"] and found["id"].endswith(ID)
    given["resume"]["outputs"] = [[60]]
    assert "no tokens beside logprobs" in ask(llm, path, body | given).json()["error"]["message"]


def test_tokens_that_came_are_counted(llm):
    path, body = "completions", {"prompt": "import", "max_tokens": 8, "ignore_eos": True}
    body["stream_options"] = {"include_usage": True}
    groups = stream(llm, path, body)
    known = [ids for _, tokens in groups for ids in tokens.get("0", [])][:3]
    (usage,) = stream(llm, path, body, outputs=[known])[-1][0]
    assert len(known) == 3 and usage["usage"]["completion_tokens"] == 8


WRONG = [
    ({"id": "x", "created": 0}, "32 hexadecimal digits"),
    ({"id": ID}, "missing required field `created`"),
    ({"id": ID, "created": 1, "events": -1}, "0 to 4294967295 events"),
    ({"id": ID, "created": 1, "events": 1 << 70}, "resume is not allowed"),
    ({"id": ID, "created": 1, "realm": 5}, "realm"),
    ({"id": ID, "created": 1, "outputs": [[1], [2]]}, "at most 1 choices"),
    ({"id": ID, "created": 1, "outputs": [[70000]]}, "outside the vocabulary"),
    ({"id": ID, "created": 1, "outputs": [[60] * 5]}, "5 tokens are known, but the request ends after 4"),
]


@pytest.mark.parametrize("resume, message", WRONG)
def test_what_cannot_go_on_is_refused(llm, resume, message):
    body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True, "stream": True, "resume": resume}
    reply = ask(llm, "completions", body)
    assert reply.status_code == 400 and message in reply.json()["error"]["message"]


def test_times_are_of_the_part_that_is_served_here(llm):
    before = time.monotonic()
    known = {"id": ID, "created": 1, "outputs": [[60, 61]]}
    ask(llm, "completions", {"prompt": "x", "max_tokens": 4, "stream": True, "resume": known})
    assert llm.engine.stats.e2e.numbers[-1] <= time.monotonic() - before


def test_the_prefill_engine_of_the_routers_header_is_asked(llm, monkeypatch):
    asked = []
    monkeypatch.setattr(llm.engine.page_finder, "start_remote_prefill", lambda *told: asked.append(told[2]))
    for headers in ({"x-duetto-prefill": "a:1"}, {}):
        ask(llm, "completions", {"prompt": ["x", "y"], "max_tokens": 1}, **headers)
    assert asked == ["a:1", "a:1", None, None]


def realms(llm: LLM, body: dict[str, Any]) -> list[str]:
    """The realms that a stream names."""
    resume = {"id": ID, "created": 1}
    reply = ask(llm, "completions", body | {"stream": True, "resume": resume})
    return [part[len(": realm ") :] for part in reply.text.split("\n\n") if part.startswith(": realm ")]


def test_an_answer_goes_on_only_where_its_realm_is(llm):
    body = {"prompt": "def add(", "max_tokens": 8, "ignore_eos": True, "seed": 1}
    (own,) = realms(llm, body)
    known = {"id": ID, "created": 1, "outputs": [[60, 61]], "events": 2}
    asked = body | {"stream": True, "resume": known | {"realm": own}}
    assert ask(llm, "completions", asked).status_code == 200
    before = llm.params
    try:
        llm.update_params(jax.tree.map(lambda x: x * 1.5, before))
        for form in (asked, asked | {"stream": False}):
            reply = ask(llm, "completions", form)
            assert reply.status_code == 409 and reply.json()["error"]["code"] == "other_realm"
        assert realms(llm, body) != [own]
    finally:
        llm.update_params(before)
    assert realms(llm, body) == [own]
    parts = llm.session, llm.input_processor
    for others in (["demo", [("temperature", 0.5)], None], ["named otherwise", [], None]):
        assert (
            set_answer_realm(*parts, *others).name != own == set_answer_realm(*parts, "demo", [], None).name
        )


def test_processors_and_the_longest_request_are_part_of_the_realm(llm):
    """The first decide tokens, and the second where an answer ends."""
    engine, names = llm.engine, []
    (processor,) = trace_processors(["cases.processors:ban_at_first"], llm.config.vocab_size, 8)
    for changed in ({}, {"processors": (processor,)}, {"max_model_len": engine.sizes.max_model_len + 1}, {}):
        other = copy(engine.programs)
        other.sizes = replace(engine.sizes, **changed)
        names.append(hash_answer_realm(other, engine.params, llm.options))
    assert names[0] == names[3] and len(set(names)) == 3


def test_new_weights_within_an_answer_change_its_realm(llm):
    """What is told of tokens is never the name before."""
    before, other = llm.params, jax.tree.map(lambda x: x * 1.5, llm.params)

    async def asked() -> tuple[str, list[str]]:
        service = Service(llm, ServerOptions(), {})
        told = TokenReporter(0.0, lambda: service.call_realm(call))
        names, texts = [service.answer_realm.name], []
        task = Task("completion", None, SamplingParams(max_tokens=200, ignore_eos=True), prompt=[60, 61, 62])
        async with service.open_call([task], service.admission.new_body()) as call:
            async for outputs in call.read_outputs():
                texts.append(told(outputs).decode())
                if len(texts) == 3:
                    await service.change_engine(lambda: llm.update_params(other, "keep"))
                    names.append(service.answer_realm.name)
        await service.close()
        return "".join(texts), names

    try:
        text, names = asyncio.run(asked())
    finally:
        llm.update_params(before)
    found = [part[len(": realm ") :] for part in text.split("\n\n") if part.startswith(": realm ")]
    assert found == names and len(set(names)) == 2


def test_a_server_that_is_ready_names_its_realm(llm):
    async def asked() -> tuple[httpx.Response, str]:
        service = Service(llm, ServerOptions(), {})
        transport = httpx.ASGITransport(make_server_app(service, [], None))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            reply = await client.get("/ready")
        await service.close()
        return reply, service.answer_realm.name

    reply, name = asyncio.run(asked())
    assert reply.status_code == 200 and reply.headers["x-duetto-realm"] == name and len(name) == 64


def test_an_adapter_is_a_part_of_the_realm(llm):
    realms = set_answer_realm(llm.session, llm.input_processor)
    adapters = [SimpleNamespace(digest=bytes([i])) for i in (1, 2)]
    found: list[str] = [realms.name_with_adapter(None), *(realms.name_with_adapter(one) for one in adapters)]  # type: ignore[arg-type]
    assert found == [realms.name, f"{realms.name} 01", f"{realms.name} 02"]


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_models_error_is_the_end_of_an_answer(llm, is_stream, monkeypatch):
    """Another server would compute the same: its router sends it to none."""
    append = Request.append

    def append_one(request: Request, token: int) -> None:
        append(request, token)
        request.fail_with_nan()

    monkeypatch.setattr(Request, "append", append_one)
    resume = {"id": ID, "created": 1_700_000_000}
    text = ask(
        llm, "completions", {"prompt": "a", "max_tokens": 60, "stream": is_stream, "resume": resume}
    ).text
    *_, error, end, nothing = text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "nan_logits"
    assert (end, nothing) == (": end", "")
