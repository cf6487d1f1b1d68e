"""Libraries that ask a server for values of a type get them: by tools, by schemas, and by patterns."""

import asyncio
import json
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal

import openai
import pytest
from cases.requests import SIZES, SMALLEST
from pydantic import BaseModel

from duetto import LLM, SamplingParams

from ..conftest import Running, start

pytestmark = [
    pytest.mark.extras,
    pytest.mark.filterwarnings("ignore"),
]  # warnings of these packages' own making
ABSENT = "docs/serving.md, Clients, names the extra that installs it"
ASKED = {"temperature": 0.0, "max_tokens": 120}
QUESTION = "rain?"
COLD = 1e-6  # greedy, too; guidance leaves 0 out of its requests


class City(BaseModel):
    name: Literal["Oslo", "Lund"]
    large: bool


@pytest.fixture(scope="module")
def room(keys) -> Iterator[Running]:
    """A server with room for the schemas that these libraries write into prompts."""
    running = start(
        "--max-model-len", "1024", "--tool-call-parser", "hermes", "--enable-auto-tool-choice",
        "--served-model-name", "demo", "--api-key-file", str(keys),
    )  # fmt: skip
    yield running
    assert running.stop() == 0, running.said


@pytest.fixture(scope="module")
def said() -> str:
    """What is said to the question by an engine as the server's."""
    params = SamplingParams(temperature=0.0, max_tokens=16)
    options = SIZES | {"max_model_len": 1024, "max_prefill_delay": 0.0, "background_compilation": False}
    with LLM(model=SMALLEST, dtype="float32", **options) as llm:
        (out,) = llm.chat([{"role": "user", "content": QUESTION}], params, use_tqdm=False)
    return out.outputs[0].text


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(room, mode):
    instructor: Any = pytest.importorskip("instructor", reason=ABSENT)
    with room.openai() as client:
        own = instructor.from_openai(client, mode=instructor.Mode[mode])
        limit = "max_output_tokens" if mode.startswith("RESPONSES") else "max_tokens"
        city = own.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": QUESTION}],
            response_model=City,
            max_retries=0,
            temperature=0.0,
            **{limit: 120},
        )
    assert isinstance(city, City)


@pytest.mark.parametrize("api", ["OpenAIChatModel", "OpenAIResponsesModel"])
def test_pydantic_ai(room, said, api):
    library: Any = pytest.importorskip("pydantic_ai", reason=ABSENT)
    providers, models = (import_module(f"pydantic_ai.{name}.openai") for name in ("providers", "models"))

    async def asked() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{room.url}/v1", api_key="first-key") as client:
            model = getattr(models, api)("demo", provider=providers.OpenAIProvider(openai_client=client))
            agents = [
                library.Agent(model, output_type=library.ToolOutput(City), model_settings=ASKED),
                library.Agent(model, output_type=library.NativeOutput(City), model_settings=ASKED),
                library.Agent(model, model_settings=ASKED | {"max_tokens": 16}),
            ]
            return [(await agent.run(QUESTION)).output for agent in agents]

    called, constrained, plain = asyncio.run(asked())
    assert isinstance(called, City) and isinstance(constrained, City) and plain == said


def test_llama_index(room, said):
    like: Any = pytest.importorskip("llama_index.llms.openai_like", reason=ABSENT)
    message = import_module("llama_index.core.llms").ChatMessage(role="user", content=QUESTION)
    to = {
        "model": "demo", "api_base": f"{room.url}/v1", "api_key": "first-key", "context_window": 1024,
        "is_chat_model": True, "temperature": 0.0,
    }  # fmt: skip
    own = like.OpenAILike(**to, max_tokens=16)
    assert own.chat([message]).message.content == said
    assert "".join(chunk.delta for chunk in own.stream_chat([message])) == said
    caller = like.OpenAILike(**to, max_tokens=120, is_function_calling_model=True)
    assert isinstance(caller.as_structured_llm(City).chat([message]).raw, City)


def test_outlines(room):
    outlines: Any = pytest.importorskip("outlines", reason=ABSENT)
    with room.openai() as client:
        theirs = outlines.from_openai(client, "demo")
        City.model_validate_json(theirs(QUESTION, City, **ASKED))
        ours = outlines.from_vllm(client, "demo")
        City.model_validate_json(ours(QUESTION, City, **ASKED))
        assert ours(QUESTION, Literal["yes", "no"], **ASKED) in ("yes", "no")
        assert re.fullmatch("[a-f]{4}", ours(QUESTION, outlines.types.Regex("[a-f]{4}"), **ASKED))


def test_guidance(room, said):
    guidance: Any = pytest.importorskip("guidance", reason=ABSENT)
    own = guidance.models.OpenAI("demo", api_key="first-key", base_url=f"{room.url}/v1", echo=False)
    with guidance.user():
        own += QUESTION
    with guidance.assistant():
        answered = own + guidance.gen("text", max_tokens=16, temperature=COLD)
        typed = own + guidance.json("city", schema=City, max_tokens=120, temperature=COLD)
    assert answered["text"] == said
    City.model_validate(json.loads(typed["city"]))
