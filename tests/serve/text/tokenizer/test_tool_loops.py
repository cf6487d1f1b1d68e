"""Messages sent back as they came: each template sees of them what Transformers shows it of the well-formed
conversation."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from cases.text.chat import TEMPLATES
from cases.text.dialects import (
    ANSWER,
    ARGUMENTS,
    ASKED,
    CALL,
    CALLED,
    FAMILIES,
    FILE,
    RESULT,
    SYSTEM,
    TOKENS,
    TOOL,
    template,
)
from cases.text.letters import letters
from tokenizers import AddedToken

from duetto.serve.text.tokenizer.chats.chat import normalise_messages, render_chat, tokenize_chat
from duetto.serve.text.tokenizer.chats.messages import read_arguments

GOLDEN = json.loads(FILE.read_text(encoding="utf-8"))
WRITTEN = json.dumps(ARGUMENTS, ensure_ascii=False)
NULLS = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "name"))

Message = dict[str, Any]
# What a client sends of a message: the reply's object, its `model_dump()`, and that without nulls.
SENT: dict[str, Callable[[Message], Message]] = {
    "object": lambda message: message,
    "dump": lambda message: {"content": None, "tool_calls": None, **NULLS, **message},
    "dump of others": lambda message: {"content": None, "tool_calls": [], **message},
    "without nulls": lambda message: {k: v for k, v in message.items() if v is not None},
}
DEEPSEEK = (  # asks for null, as those of DeepSeek do, and joins the arguments to text
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}<call>"
    "{% for call in m.tool_calls %}{{ call.function.name + ' ' + call.function.arguments }}{% endfor %}"
    "{% elif m.role == 'assistant' %}<answer>{{ m.content + '.' }}{% else %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)


def called(arguments: Any = WRITTEN) -> Message:
    function = {"name": "rain", "arguments": arguments}
    return {**CALLED, "reasoning_content": "look", "tool_calls": [{**CALL, "function": function}]}


def render(source: str, messages: list[Message], **options: Any) -> str:
    return render_chat(source, messages, **{**TOKENS, **options})


@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("family", FAMILIES)
def test_replies_sent_back_are_rendered_as_well_formed_ones(family, sent):
    given = [SYSTEM, ASKED, SENT[sent](called()), RESULT, SENT[sent](ANSWER)]
    for generate in (True, False):
        text = render(template(family), given, tools=[TOOL], add_generation_prompt=generate)
        assert text == GOLDEN[f"{family}|answered|{generate}"]


@pytest.mark.parametrize("sent", SENT)
def test_a_template_that_asks_for_null_gets_null(sent):
    given = [ASKED, SENT[sent](called()), RESULT]
    expected = f"{ASKED['content']}<call>rain {WRITTEN}{RESULT['content']}"
    assert render(DEEPSEEK, given) == expected
    assert render(DEEPSEEK, [ASKED, SENT[sent](ANSWER)]) == f"{ASKED['content']}<answer>Yes, 3 mm.."


def test_templates_that_need_text_beside_calls_get_empty_text():
    source = "{% for m in messages %}[{{ m['content'] + ']' }}{% endfor %}"
    assert render(source, [ASKED, called()]) == f"[{ASKED['content']}][]"


@pytest.mark.parametrize("source", [*TEMPLATES.values(), *map(template, FAMILIES)])
def test_an_empty_list_of_calls_is_no_call(source):
    answer = {"role": "assistant", "content": "fine"}
    given = [[ASKED, answer | calls, ASKED] for calls in ({}, {"tool_calls": []}, {"tool_calls": None})]
    assert len({render(source, messages, tools=[TOOL]) for messages in given}) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "Mal', " ", "", "[]", "null", "42", '"x"', "[" * 100_000, '{"x": ' * 5_000, "1" * 5_000,
        None, 42, [],
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", ["qwen3", "deepseek_v31", "glm4_moe"])
def test_arguments_that_are_no_object_are_empty(family, arguments):
    source = template(family)
    assert render(source, [ASKED, called(arguments)]) == render(source, [ASKED, called("{}")])
    assert render(source, [ASKED, called({})]) == render(source, [ASKED, called("{}")])


def test_a_template_of_text_gets_the_text_as_it_came():
    written = '{"city":"Malm\\u00f6", "days":[1,\n2.50]}'
    assert written in render(template("deepseek_v31"), [ASKED, called(written)])
    assert '{"city": "Malmö", "days": [1, 2.5]}' in render(template("qwen3"), [ASKED, called(written)])
    assert '{"city": "Malmö"}' in render(template("deepseek_v31"), [ASKED, called({"city": "Malmö"})])


def test_fields_of_calls_have_one_order():
    source = "{{ messages[1].tool_calls | tojson }}"
    call = {"function": {"arguments": "{}", "name": "f", "parsed": None}, "type": "function", "id": "a"}
    given = [ASKED, {"role": "assistant", "tool_calls": [call | {"index": None}]}]
    expected = '[{"id": "a", "type": "function", "function": {"name": "f", "arguments": {}}}]'
    assert render(source, given) == expected


def test_special_tokens_in_arguments_as_text_are_hidden_too():
    tokenizer = letters(DEEPSEEK, AddedToken("<end>", special=True, normalized=False))
    written = '{"a":"x<end>y"}'
    (end,) = tokenizer.special_ids
    assert tokenize_chat(tokenizer, [ASKED, called(written)]).count(end) == 1
    tokenizer.split_special_tokens = True
    ids = tokenize_chat(tokenizer, [ASKED, called(written)])
    assert end not in ids and tokenizer.decode(ids).endswith(f"rain {written}")


def test_halves_of_surrogate_pairs_in_arguments_are_replaced():
    assert read_arguments(r'{"\ud83d": ["\ud83d\ude00", "\ude00x"]}') == {"\ufffd": ["😀", "\ufffdx"]}
    assert read_arguments(r'{"a": "\\ud83d"}') == {"a": r"\ud83d"}


def test_a_reply_without_text_has_an_empty_one():
    given = [ASKED, {"role": "assistant", "content": None, "reasoning": "hm"}, ASKED]
    assert normalise_messages(given)[1]["reasoning_content"] == "hm"
    text = [ASKED, {"role": "assistant", "content": "", "reasoning": "hm"}, ASKED]
    assert render(DEEPSEEK, given) == render(DEEPSEEK, text)


# ---------------------------------------------------------------- parts

PARTS = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
WHOLE = "{% if m.content is string %}{{ m.content }}{% else %}"
LOOPS = {  # as families with images write them
    "loop": WHOLE + "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}",
    "macro": "{% macro show(x) %}{% if x is string %}{{ x }}{% elif x is iterable %}{% for c in x %}"
    "{{ c.text if c.type == 'text' }}{% endfor %}{% endif %}{% endmacro %}{{ show(m.content) }}",
    "filter": WHOLE
    + "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}{% endif %}",
    "parts alone": "{% for c in m.content %}{{ c['text'] if c['type'] == 'text' }}{% endfor %}",
}


def each(source: str) -> str:
    return "{% for m in messages %}[" + source + "]{% endfor %}"


@pytest.mark.parametrize("role", ["system", "user", "assistant"])
@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS)
def test_a_template_that_reads_parts_gets_them(source, role):
    given = [{"role": role, "content": PARTS}, {"role": role, "content": "c d"}]
    assert render(each(source), given) == "[a b][c d]"


@pytest.mark.parametrize(
    "source", ["{{ m.content }}", "{{ m.content + '' }}", "{{ m.content | trim }}", "{{ m.content[:] }}"]
)
def test_a_template_without_parts_gets_text_joined_by_newlines(source):
    assert render(each(source), [{"role": "user", "content": PARTS}]) == "[a \nb]"
    assert render(each(source), [{"role": "critic", "content": PARTS}]) == "[a \nb]"


def test_parts_are_read_by_role():
    source = "{% if m.role == 'user' %}" + LOOPS["loop"] + "{% else %}{{ m.content | tojson }}{% endif %}"
    given = [ASKED, called(), RESULT | {"content": PARTS}, {"role": "user", "content": PARTS}]
    assert render(each(source), given).endswith(r'["a \nb"][a b]')


def test_the_last_part_is_continued():
    options = {"continue_final_message": True, "add_generation_prompt": False}
    given = [ASKED, {"role": "assistant", "content": PARTS}]
    assert render(each(LOOPS["loop"]), given, **options) == f"[{ASKED['content']}][a b"
    said = [ASKED, {"role": "assistant", "content": "so \n"}]
    assert render(each("{{ m.content }}"), said, **options).endswith("[so \n")
    assert render(each("{{ m.content | trim }}"), said, **options).endswith("[so")
