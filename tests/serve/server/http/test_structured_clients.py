"""Libraries that ask a server for values of a type get them: by tools, by schemas, and by patterns."""

import json
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from duetto import LLM, SamplingParams

from ..conftest import Running, start

pytestmark = [
    pytest.mark.extras,  # warnings are of these packages' own making
    pytest.mark.filterwarnings("ignore"),
]
ASKED = {"temperature": 0.0, "max_tokens": 120}
QUESTION = "rain?"


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
    """What is said to the question."""
    params = SamplingParams(temperature=0.0, max_tokens=16)
    with LLM(max_num_seqs=8, max_model_len=1024, page_size=16, max_prefill_tokens=64) as llm:
        (out,) = llm.chat([{"role": "user", "content": QUESTION}], params, use_tqdm=False)
    return out.outputs[0].text


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_instructor(room, mode):
    instructor: Any = pytest.importorskip("instructor")
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
    library: Any = pytest.importorskip("pydantic_ai")
    provider = import_module("pydantic_ai.providers.openai").OpenAIProvider(
        base_url=f"{room.url}/v1", api_key="first-key"
    )
    model = getattr(import_module("pydantic_ai.models.openai"), api)("demo", provider=provider)
    for output in (library.ToolOutput(City), library.NativeOutput(City)):
        agent = library.Agent(model, output_type=output, model_settings=ASKED)
        assert isinstance(agent.run_sync(QUESTION).output, City)
    plain = library.Agent(model, model_settings=ASKED | {"max_tokens": 16})
    assert plain.run_sync(QUESTION).output == said


def test_llama_index(room, said):
    like: Any = pytest.importorskip("llama_index.llms.openai_like")
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
    outlines: Any = pytest.importorskip("outlines")
    with room.openai() as client:
        theirs = outlines.from_openai(client, "demo")
        City.model_validate_json(theirs(QUESTION, City, **ASKED))
        ours = outlines.from_vllm(client, "demo")
        City.model_validate_json(ours(QUESTION, City, **ASKED))
        assert ours(QUESTION, Literal["yes", "no"], **ASKED) in ("yes", "no")
        assert re.fullmatch("[a-f]{4}", ours(QUESTION, outlines.types.Regex("[a-f]{4}"), **ASKED))


def test_guidance(room, said):
    guidance: Any = pytest.importorskip("guidance")
    own = guidance.models.OpenAI("demo", api_key="first-key", base_url=f"{room.url}/v1", echo=False)
    with guidance.user():
        own += QUESTION
    with guidance.assistant():
        answered = own + guidance.gen("text", max_tokens=16, temperature=0.0)
        typed = own + guidance.json("city", schema=City, max_tokens=120, temperature=0.0)
    assert answered["text"] == said
    City.model_validate(json.loads(typed["city"]))
