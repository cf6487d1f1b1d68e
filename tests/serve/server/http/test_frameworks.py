"""Frameworks that speak OpenAI's API get from a server what the library gives."""

import asyncio
import os
from functools import reduce
from importlib import import_module
from operator import add
from typing import Any

import pytest
from cases.requests import SIZES, SMALLEST

from duetto import LLM, SamplingParams

pytestmark = pytest.mark.extras
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it looks for prices at its import
# Of these packages' own making.
QUIET = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::UserWarning"
)
OPTIONS = {
    "model": SMALLEST, "dtype": "float32", "max_prefill_delay": 0.0, "background_compilation": False,
    **SIZES,
}  # fmt: skip
TEXT, ASKED = "def add(a, b):", {"temperature": 0.0, "max_tokens": 16}
MESSAGES = [{"role": "user", "content": "sort a list"}]


@pytest.fixture(scope="module")
def llm():
    """As the server's engine."""
    with LLM(**OPTIONS) as own:
        yield own


@pytest.fixture(scope="module")
def said(llm) -> str:
    """What is said to the messages."""
    return llm.chat(MESSAGES, SamplingParams(**ASKED), use_tqdm=False)[0].outputs[0].text


@pytest.fixture(scope="module")
def continued(llm) -> list[str]:
    """How texts go on."""
    return [
        out.outputs[0].text for out in llm.generate([TEXT, "import"], SamplingParams(**ASKED), use_tqdm=False)
    ]


# ------------------------------------------------------------ langchain


@QUIET
def test_langchain_chats(server, said):
    langchain: Any = pytest.importorskip("langchain_openai")
    own = langchain.ChatOpenAI(base_url=f"{server.url}/v1", api_key="first-key", model="demo", **ASKED)
    whole = own.invoke("sort a list")
    assert whole.content == said and whole.usage_metadata["output_tokens"] == 16
    assert "".join(chunk.content for chunk in own.stream("sort a list")) == said
    assert [one.content for one in own.batch(["sort a list"] * 3)] == [said] * 3
    assert asyncio.run(own.ainvoke(MESSAGES)).content == said


@QUIET
def test_langchain_binds_tools(server):
    """Calls come whole and as a stream, and their results go back."""
    langchain: Any = pytest.importorskip("langchain_openai")
    messages: Any = import_module("langchain_core.messages")
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 120}
    own = langchain.ChatOpenAI(base_url=f"{server.url}/v1", api_key="first-key", model="demo", **options)
    city = {"type": "string", "enum": ["Malmö", "Oslo"]}
    schema = {"type": "object", "properties": {"city": city}, "required": ["city"]}
    rain = {"type": "function", "function": {"name": "rain", "description": "", "parameters": schema}}
    for choice in ("any", "rain"):
        bound = own.bind_tools([rain], tool_choice=choice, parallel_tool_calls=False)
        whole = bound.invoke("rain?")
        (call,) = whole.tool_calls
        assert call["name"] == "rain" and call["args"]["city"] in city["enum"] and not whole.content
        first, *others = bound.stream("rain?")
        (streamed,) = reduce(add, others, first).tool_calls
        assert (streamed["name"], streamed["args"]) == (call["name"], call["args"])
    result = messages.ToolMessage("3 mm", tool_call_id=call["id"])
    assert own.invoke([*MESSAGES, whole, result]).content


@QUIET
def test_langchain_completes(server, continued):
    langchain: Any = pytest.importorskip("langchain_openai")
    own = langchain.OpenAI(base_url=f"{server.url}/v1", api_key="first-key", model="demo", **ASKED)
    assert own.batch([TEXT, "import"]) == continued
    assert "".join(own.stream(TEXT)) == continued[0]


# ------------------------------------------------------------ litellm


@QUIET
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(server, said, continued, provider):
    litellm: Any = pytest.importorskip("litellm")
    to = {"api_base": f"{server.url}/v1", "api_key": "first-key", "model": f"{provider}/demo"}
    chat = to | {"messages": MESSAGES} | ASKED
    assert litellm.completion(**chat).choices[0].message.content == said
    assert pieces(litellm.completion(stream=True, **chat)) == said
    assert asyncio.run(streamed(litellm, chat)) == said
    assert litellm.text_completion(**to, prompt=TEXT, **ASKED).choices[0].text == continued[0]


@QUIET
def test_litellm_tells_errors_apart(server):
    litellm: Any = pytest.importorskip("litellm")
    to = {"api_base": f"{server.url}/v1", "api_key": "first-key", "model": "openai/demo", "max_retries": 0}
    wrong = [
        ({"model": "openai/none"}, litellm.NotFoundError, "model 'none' is not served here"),
        ({"temperature": -1}, litellm.BadRequestError, "temperature=-1"),
        ({"api_key": "unknown"}, litellm.AuthenticationError, "the API key is missing or unknown"),
        ({"messages": [{"role": "user", "content": "x " * 900}]}, litellm.BadRequestError, "at most 255"),
    ]
    for fields, error, message in wrong:
        with pytest.raises(error, match=message):
            litellm.completion(**(to | {"messages": MESSAGES} | fields))


def pieces(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def streamed(litellm: Any, chat: dict[str, Any]) -> str:
    return pieces([chunk async for chunk in await litellm.acompletion(stream=True, **chat)])


# ------------------------------------------------------------ lm-eval


@pytest.fixture
def evaluated(server, monkeypatch):
    """Makes lm-eval's model of a server, which tokenizes there, too."""
    reason = "lm-eval[api] takes too long to install for every run: docs/serving.md"
    models: Any = pytest.importorskip("lm_eval.models.openai_completions", reason=reason)
    monkeypatch.setenv("OPENAI_API_KEY", "first-key")

    def made(**options: Any) -> Any:
        return models.LocalCompletionsAPI(
            base_url=f"{server.url}/v1/completions",
            model="demo",
            max_length=256,
            auth_token="first-key",
            **options,
        )

    return made


def instances(kind: str, *given: tuple[Any, ...]) -> list[Any]:
    module: Any = import_module("lm_eval.api.instance")
    return [module.Instance(kind, {}, one, 0) for one in given]


@QUIET
@pytest.mark.parametrize("options", [{}, {"batch_size": 2}, {"num_concurrent": 3}])
def test_lm_eval_scores(evaluated, llm, options):
    own = evaluated(tokenizer_backend="remote", **options)
    pairs = [(TEXT, "\n    return a + b"), ("import", " os"), ("for i in", " range(3):")]
    found = own.loglikelihood(instances("loglikelihood", *pairs))
    assert [one for one, _ in found] == pytest.approx([likelihood(llm, *pair) for pair in pairs], abs=1e-4)
    rolling = own.loglikelihood_rolling(instances("loglikelihood_rolling", *[(a + b,) for a, b in pairs]))
    end = llm.tokenizer.eos_token  # what lm-eval has in front of a text
    assert rolling == pytest.approx([likelihood(llm, end, a + b) for a, b in pairs], abs=1e-4)


def likelihood(llm: LLM, text: str, more: str) -> float:
    """Of what comes after the tokens of a text, where both are tokenized together."""
    start, ids = len(llm.tokenizer.encode(text)), llm.tokenizer.encode(text + more)
    return llm.log_likelihood({"prompt_token_ids": ids[:start]}, ids[start:])[0].total


@QUIET
def test_lm_eval_generates(evaluated, llm, continued):
    own = evaluated(tokenizer_backend="auto")
    asked = instances("generate_until", (TEXT, {"until": ["\n\n\n"], "max_gen_toks": 16}))
    assert own.tokenizer_backend == "remote" and own.generate_until(asked) == continued[:1]
