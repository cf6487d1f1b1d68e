"""What grammars of calls allow: what templates write, and only what reads as calls of the tools."""

import json
import random

import jsonschema
import numpy as np
import pytest
from cases.text.dialects import ARGUMENTS, ASKED, CALL, FAMILIES, TOKENS, TOOL, template
from cases.text.letters import letters
from tokenizers import AddedToken

from duetto.serve.engine.startup.folder import DEMO
from duetto.serve.text.grammar.grammars import Grammars
from duetto.serve.text.openai.dialect import Dialect
from duetto.serve.text.tokenizer.chat import render_chat
from duetto.serve.text.tokenizer.tokenizer import Tokenizer
from duetto.serve.text.tools.formats import FORMATS, template_format
from duetto.serve.text.tools.reply_parser import ReasoningDelta, ReplyParser, text_of, whole_calls
from duetto.serve.text.tools.stream_reader import TextDelta
from duetto.serve.text.tools.tool import Tool, Toolbox
from duetto.serve.text.tools.tool_parser import ToolParser

pytest.importorskip("llguidance")

SAY = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 8},
        "to": {"$ref": "#/$defs/Place"}, "loud": {"type": "boolean"},
        "times": {"type": ["integer", "null"], "minimum": 0, "maximum": 99},
    },
    "required": ["to"],
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"],
                        "additionalProperties": False}},
}  # fmt: skip
FUNCTIONS = [{"name": "say", "parameters": SAY}, {"name": "now"}, TOOL["function"]]
TOOLS = [{"type": "function", "function": one} for one in FUNCTIONS]
SCHEMAS = {one["name"]: one.get("parameters", {}) for one in FUNCTIONS}
LONGEST = 120  # tokens of a walk


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    own = Tokenizer.from_folder(DEMO)
    assert own is not None
    return own


@pytest.fixture(scope="module")
def grammars(words) -> Grammars:
    return Grammars(words, len(words), [words.eos_token_id])


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(grammars, words, asked, seed: int) -> tuple[str, bool]:
    """A text that a grammar allows, and whether it is whole: it ends where it may, more often than not."""
    rng, ids, end = random.Random(seed), [], words.eos_token_id
    follower = grammars.constraint(asked, 0)
    while len(ids) < LONGEST:
        found = allowed(follower.masks()[0])
        if end in found and (len(found) == 1 or rng.random() < 0.6):
            return words.decode(ids), True
        ids.append(rng.choice([id for id in found if id != end]))
        follower.follow(ids)
        assert follower.failure is None
    return words.decode(ids), False


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_is_drawn_is_calls_with_arguments_of_their_schemas(words, grammars, name):
    dialect, whole = Dialect(words, name), 0
    boxes = [Toolbox(TOOLS, "required"), Toolbox(TOOLS, "required", is_several=False)]
    for seed, box in enumerate([*boxes, Toolbox(TOOLS, "required", "say")] * 3):
        text, is_whole = walk(grammars, words, dialect.constraints(box, []), seed)
        replier = ReplyParser("key", None, ToolParser(dialect.require_tool_format(), box.tools))
        parts = replier.take(text, at_end=True)
        calls = whole_calls(parts)
        if is_whole:
            whole += 1
            assert calls and not text_of(parts, TextDelta), text
            assert len({one["id"] for one in calls}) == len(calls)
            assert len(calls) == 1 or (box.is_several and box.only is None)
            for one in calls:
                assert box.only in (None, one["function"]["name"])
                checked = dict(SCHEMAS[one["function"]["name"]])
                if name in ("qwen3_coder", "seed_oss", "minimax_m2", "glm45"):  # texts are of any length
                    checked = json.loads(json.dumps(checked).replace("maxLength", "title-"))
                jsonschema.validate(json.loads(one["function"]["arguments"]), checked)
    assert whole >= 2


# Those of which the templates of the tests sort keys, or write Python's words.
WRITTEN = [name for name, one in FAMILIES.items() if one.calls in FORMATS and name not in ("granite", "lfm2")]


@pytest.mark.parametrize("family", WRITTEN)
def test_a_grammar_allows_what_the_template_writes(words, grammars, family):
    arguments = {name: ARGUMENTS[name] for name in ("city", "days")}
    function = {"name": "rain", "arguments": json.dumps(arguments, ensure_ascii=False)}
    called = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]}
    whole = render_chat(template(family), [ASKED, called], **TOKENS, add_generation_prompt=False)
    begin = template_format(template(family)).begin
    text = whole[whole.index(begin) :].removesuffix(FAMILIES[family].ends)
    dialect = Dialect(words, FAMILIES[family].calls)
    follower = grammars.constraint(dialect.constraints(Toolbox([TOOL], "required"), []), 0)
    follower.follow(words.encode(text))
    assert follower.failure is None and words.eos_token_id in allowed(follower.masks()[0])


@pytest.mark.parametrize("begun", [False, True])
def test_special_tokens_are_marks_and_reasoning_comes_before_calls(begun):
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    source = "{{ messages[0].content }}<think></think>{{ tools }}<tool_call>"
    own = letters(
        source, *(AddedToken(mark, special=True) for mark in marks), AddedToken("<end>", special=True)
    )
    dialect, ids = Dialect(own), [own.token_id(mark) for mark in marks]
    grammars = Grammars(own, len(own), [own.token_id("<end>")])
    prompt = own.encode("a<think>" if begun else "a")
    follower = grammars.constraint(dialect.constraints(Toolbox(TOOLS, "required", "now"), prompt), 0)
    first = allowed(follower.masks()[0])
    assert (ids[1] in first and own.token_id("b") in first) if begun else first == [ids[0], ids[2]]
    text = (
        "" if begun else "<think>"
    ) + 'b"</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    follower.follow(own.encode(text))
    assert follower.failure is None and own.token_id("<end>") in allowed(follower.masks()[0])
    replier = ReplyParser(
        "key", dialect.reasoning(prompt), ToolParser(dialect.require_tool_format(), Toolbox(TOOLS).tools)
    )
    parts = replier.take(text, at_end=True)
    assert text_of(parts, ReasoningDelta) == 'b"' and not text_of(parts, TextDelta) and replier.count == 1
    assert dialect.calls_special and dialect.keeps_special


def test_a_call_of_gpt_oss_ends_with_the_token_that_ends_a_reply():
    """Its mark is an end token of the model. Behind reasoning the call begins a message of its own."""
    marks = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>")
    own = letters(template("gpt_oss"), *(AddedToken(mark, special=True) for mark in marks))
    dialect, end = Dialect(own), own.token_id("<|call|>")
    grammars, prompt = Grammars(own, len(own), [end]), own.encode("<|start|>assistant")
    asked = dialect.constraints(Toolbox(TOOLS, "required", "now"), prompt)
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    for before in ("", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"):
        follower = grammars.constraint(asked, 0)
        follower.follow(own.encode(before + call))
        assert follower.failure is None and allowed(follower.masks()[0]) == [end]
        parser = ToolParser(dialect.require_tool_format(), Toolbox(TOOLS).tools)
        parts = ReplyParser("key", dialect.reasoning(prompt), parser).take(before + call, at_end=True)
        assert whole_calls(parts)[0]["function"] == {"name": "now", "arguments": "{}"}
        assert not text_of(parts, TextDelta) and text_of(parts, ReasoningDelta) == ("hm" if before else "")


def test_schemas_of_arguments_are_closed_where_they_name_all():
    place = {"type": "object", "properties": {"x": {"type": "integer"}}}
    closed = {"additionalProperties": False}
    assert Tool("f").arguments == {"type": "object"} | closed
    assert Tool("f", place).arguments == place | closed
    assert Tool("f", place | {"additionalProperties": True}).arguments["additionalProperties"] is True
    assert Tool("f", {"type": "object"}).arguments == {"type": "object"}
    other = {"type": "object", "properties": {"y": {}}}
    either = Tool("f", {"anyOf": [place, other]}).arguments
    assert either == {"type": "object", "anyOf": [place | closed, other | closed]}
    named = Tool("f", {"$ref": "#/$defs/Place", "$defs": {"Place": place}})
    assert named.arguments == place | closed | {"$defs": {"Place": place | closed}}
    assert named.schema("x") == {"type": "integer"} and named.schema("y") == {}
