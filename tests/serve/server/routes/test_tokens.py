"""/tokenize counts what a completion or a chat would read, and refuses what it does not know."""

from types import SimpleNamespace
from typing import Any

import pytest
from cases.text.letters import letters
from tokenizers import AddedToken, processors

from duetto.serve.server.routes.tokens import TokenRoutes
from duetto.serve.server.service.errors import HttpError
from duetto.serve.text.openai.errors import RequestError
from duetto.serve.text.openai.tasks import parse_task, tokenize_prompt
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

TEMPLATE = (
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}{{ mood }}{{ reasoning_effort }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ASKED = [{"role": "user", "content": "é"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "so "}]
TOOL = {"type": "function", "function": {"name": "f"}}


def tokenizer() -> Tokenizer:
    found = letters(TEMPLATE, AddedToken("<s>", special=True))
    start = found.token_id("<s>")
    assert start is not None
    found._backend.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", start)]
    )
    return found


WORDS = tokenizer()


def require_model(name: str) -> str:
    if name != "demo":
        raise HttpError(404, "no such model", "model_not_found")
    return name


@pytest.fixture(scope="module")
def routes() -> TokenRoutes:
    llm = SimpleNamespace(tokenizer=WORDS, config=SimpleNamespace(vocab_size=300))
    service: Any = SimpleNamespace(llm=llm, max_model_len=256, require_model=require_model)
    return TokenRoutes(service)


def text(routes: TokenRoutes, **body: Any) -> str:
    return WORDS.decode(routes.tokenize(body)["tokens"])


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "é"}, "<s>é"),
        ({"prompt": "é", "add_special_tokens": False}, "é"),
        ({"prompt": "é", "model": "demo", "tools": [], "add_generation_prompt": True}, "<s>é"),
        ({"prompt": "é", "chat_template_kwargs": {}, "continue_final_message": False}, "<s>é"),
        ({"messages": ASKED}, "<user>é</><assistant>"),
        ({"messages": ASKED, "add_special_tokens": True}, "<s><user>é</><assistant>"),
        ({"messages": ASKED, "add_generation_prompt": False}, "<user>é</>"),
        ({"messages": BEGUN, "continue_final_message": True}, "<user>é</><assistant>so "),
        ({"messages": ASKED, "chat_template_kwargs": {"mood": "!"}}, "!<user>é</><assistant>"),
        ({"messages": ASKED, "reasoning_effort": "low", "tools": [TOOL]}, "[f]low<user>é</><assistant>"),
    ],
)
def test_each_field_has_its_effect(routes, body, expected):
    assert text(routes, **body) == expected


def test_a_whole_body_is_counted_as_it_is_read(routes):
    body = {
        "messages": ASKED, "model": "demo", "max_tokens": 3, "temperature": 0.5, "user": "u",
        "tools": [TOOL], "tool_choice": "auto", "chat_template_kwargs": {"mood": "!"}, "top_logprobs": 0,
    }  # fmt: skip
    task = parse_task("chat", None, body, {}, None)
    assert routes.tokenize(body | {"stream": True})["tokens"] == tokenize_prompt(task, WORDS, 100)
    body = {"prompt": "é", "max_tokens": 3, "logprobs": 2, "echo": True, "suffix": ""}
    assert text(routes, **body) == "<s>é"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": "x", "add_special_token": False}, "add_special_token.*did you mean add_special_tokens"),
        ({"prompt": "x", "chat_template": "y"}, "chat_template is not supported"),
        ({"messages": ASKED, "chat_template": "y"}, "chat_template is not supported"),
        ({"messages": ASKED, "documents": [{"text": "x"}]}, "documents"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "messages": ASKED}, "prompt=.x.*one of prompt and messages"),
        ({"prompt": "x", "tools": [TOOL]}, "tools=.*only with messages"),
        ({"prompt": "x", "reasoning_effort": "low"}, "reasoning_effort=.*only with messages"),
        ({"prompt": "x", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs=.*only with messages"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message=true.*only with messages"),
        ({"prompt": "x", "add_generation_prompt": False}, "add_generation_prompt=false.*only with messages"),
        ({"messages": ASKED, "chat_template_kwargs": [1]}, "chat_template_kwargs"),
        ({"messages": ASKED, "chat_template_kwargs": {"add_special_tokens": True}}, "chat_template_kwargs"),
        ({"messages": ASKED, "chat_template_kwargs": {"continue_final_message": 1}}, "chat_template_kwargs"),
        ({"messages": ASKED, "reasoning_effort": "some"}, "reasoning_effort"),
        ({"messages": ASKED, "add_special_tokens": 1}, "add_special_tokens"),
        (
            {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message needs",
        ),
        ({}, "prompt=null"),
        ({"prompt": "x", "model": 3}, "model"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(routes, body, named):
    with pytest.raises(RequestError, match=named):
        routes.tokenize(body)


def test_tokens_are_given_as_the_vocabulary_writes_them(routes):
    found = routes.tokenize({"prompt": "é", "return_token_strs": True})
    assert found["token_strs"] == ["<s>", "Ã", "©"]
    assert found | {"token_strs": 0} == {"count": 3, "max_model_len": 256, "token_strs": 0} | {
        "tokens": WORDS.convert_tokens_to_ids(found["token_strs"])
    }


def test_tokens_become_a_text_again_and_nothing_else_is_known(routes):
    ids = WORDS.encode("é")
    assert routes.detokenize({"tokens": ids, "model": "demo", "user": "u"}) == {"prompt": "<s>é"}
    for body in ({"skip_special_tokens": True}, {"temperature": 1}, {"echo": True}):
        with pytest.raises(RequestError, match=next(iter(body))):
            routes.detokenize({"tokens": ids} | body)
    for reply, body in ((routes.detokenize, {"tokens": ids}), (routes.tokenize, {"prompt": "x"})):
        with pytest.raises(HttpError, match="no such model"):
            reply(body | {"model": "other"})
