"""What grammars of calls allow: what templates write, and only what reads as calls of the tools."""

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from cases.text.dialects import ARGUMENTS, ASKED, CALL, FAMILIES, TOKENS, TOOL, template
from cases.text.letters import letters
from suite.marks import full_if
from tokenizers import AddedToken

from duetto.serve.engine.startup.model_folder import DEMO_FOLDER
from duetto.serve.text.grammar.compiler import GrammarCompiler
from duetto.serve.text.openai.dialect import Dialect
from duetto.serve.text.openai.errors import RequestError
from duetto.serve.text.tokenizer.chats.chat import render_chat
from duetto.serve.text.tokenizer.tokenizer import Tokenizer
from duetto.serve.text.tools.formats import TOOL_FORMATS, find_template_format
from duetto.serve.text.tools.reply_parser import (
    ReasoningDelta,
    ReplyParser,
    join_part_texts,
    list_whole_calls,
)
from duetto.serve.text.tools.schemas.allowed_values import ANY_VALUE
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
    own = Tokenizer.from_folder(DEMO_FOLDER)
    assert own is not None
    return own


@pytest.fixture(scope="module")
def grammars(words) -> GrammarCompiler:
    return GrammarCompiler(words, len(words), [words.eos_token_id])


def allowed(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(grammars, words, asked, seed: int) -> tuple[str, bool]:
    """A text that a grammar allows, and whether it is whole: it ends where it may, more often than not."""
    rng, ids, end = random.Random(seed), [], words.eos_token_id
    follower = grammars.compile_constraint(asked, 0)
    while len(ids) < LONGEST:
        found = allowed(follower.token_masks()[0])
        if end in found and (len(found) == 1 or rng.random() < 0.6):
            return words.decode(ids), True
        ids.append(rng.choice([id for id in found if id != end]))
        follower.advance(ids)
        assert follower.failure is None
    return words.decode(ids), False


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_whatever_is_drawn_is_calls_with_arguments_of_their_schemas(words, grammars, name):
    dialect, whole = Dialect(words, name), 0
    boxes = [Toolbox(TOOLS, "required"), Toolbox(TOOLS, "required", allows_parallel_calls=False)]
    for seed, box in enumerate([*boxes, Toolbox(TOOLS, "required", "say")] * 3):
        text, is_whole = walk(grammars, words, dialect.call_grammar(box, []), seed)
        replier = ReplyParser("key", None, ToolParser(dialect.require_tool_format(), box.tools))
        parts = replier.parse_chunk(text, at_end=True)
        calls = list_whole_calls(parts)
        if is_whole:
            whole += 1
            assert calls and not join_part_texts(parts, TextDelta), text
            assert len({one["id"] for one in calls}) == len(calls)
            assert len(calls) == 1 or (box.allows_parallel_calls and box.forced_name is None)
            for one in calls:
                assert box.forced_name in (None, one["function"]["name"])
                checked = dict(SCHEMAS[one["function"]["name"]])
                if name in BETWEEN_TAGS:  # texts are of any length
                    checked = json.loads(json.dumps(checked).replace("maxLength", "title-"))
                jsonschema.validate(json.loads(one["function"]["arguments"]), checked)
    assert whole >= 2


BETWEEN_TAGS = ("qwen3_coder", "seed_oss", "minimax_m2", "glm45")
PARTS = {  # of schemas, as pydantic and others put them together
    "Color": {"enum": ["red", "blue"]},
    "Paint": {"$ref": "#/$defs/Color"},
    "Count": {"type": "integer", "exclusiveMinimum": 3, "maximum": 20},
    "Place": {"type": "object", "properties": {"y": {"$ref": "#/$defs/Paint"}}, "required": ["y"]},
}
PROPERTIES = {
    "union_of_enums": {"anyOf": [{"type": "string", "enum": ["pending", "done"]}, {"const": "deleted"}]},
    "optional_literal": {"anyOf": [{"enum": ["fast", "slow"], "type": "string"}, {"type": "null"}]},
    "reference_to_a_reference": {"$ref": "#/$defs/Paint"},
    "one_of": {"oneOf": [{"const": "x"}, {"type": "integer", "maximum": 5}]},
    "all_of": {"allOf": [{"$ref": "#/$defs/Count"}]},
    "all_of_enums": {"allOf": [{"$ref": "#/$defs/Paint"}, {"enum": ["blue", "green"]}]},
    "numbers_as_texts": {"anyOf": [{"enum": ["1", "2"]}, {"type": "integer", "minimum": 5, "maximum": 6}]},
    "control_character": {"enum": ["a\x7f"]},
    "enum_of_several_types": {"enum": ["1", 2, None, True]},
    "true_or_nothing": {"anyOf": [{"const": True}, {"type": "null"}]},
    "another_property": {"$ref": "#/properties/all_of"},
    "fraction": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5},
    "object_or_word": {"anyOf": [{"const": "none"}, {"$ref": "#/$defs/Place"}]},
}  # fmt: skip

UNQUOTED = {"overlapping_enums": {"oneOf": [{"$ref": "#/$defs/Paint"}, {"enum": ["blue", "green"]}]}}


@full_if(lambda name: name in ("seed_oss", "minimax_m2", "lfm2"))
@pytest.mark.parametrize("name", [*BETWEEN_TAGS, "lfm2", "olmo3"])
def test_values_keep_schemas_that_are_put_together(words, grammars, name):
    whole, dialect = 0, Dialect(words, name)
    listed = PROPERTIES | UNQUOTED if name in BETWEEN_TAGS else PROPERTIES
    for i, (key, schema) in enumerate(listed.items()):
        properties = {key: schema, "all_of": PROPERTIES["all_of"]}
        parameters = {"type": "object", "properties": properties, "required": [key], "$defs": PARTS}
        box = Toolbox(
            [{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required", "f"
        )
        asked = dialect.call_grammar(box, [])
        for seed in range(3):
            text, is_whole = walk(grammars, words, asked, 100 * i + seed)
            replier = ReplyParser("key", None, ToolParser(dialect.require_tool_format(), box.tools))
            calls = list_whole_calls(replier.parse_chunk(text, at_end=True))
            if is_whole:
                whole += 1
                jsonschema.validate(json.loads(calls[0]["function"]["arguments"]), parameters)
    assert whole > 1.5 * len(PROPERTIES)


@pytest.mark.parametrize("name", ["qwen3_coder", "lfm2", "hermes"])
def test_arguments_by_a_chain_of_references_are_all_written(words, grammars, name):
    place = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x", "y"],
             "additionalProperties": {"type": "null"}}  # fmt: skip
    chain = {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": place}}
    box = Toolbox([{"type": "function", "function": {"name": "f", "parameters": chain}}], "required", "f")
    dialect = Dialect(words, name)
    text, is_whole = walk(grammars, words, dialect.call_grammar(box, []), 2)
    replier = ReplyParser("key", None, ToolParser(dialect.require_tool_format(), box.tools))
    (call,) = list_whole_calls(replier.parse_chunk(text, at_end=True))
    assert is_whole
    jsonschema.validate(json.loads(call["function"]["arguments"]), chain)


X = {"properties": {"x": {}, "y": {}}}


def of_x(**schema: Any) -> dict[str, Any]:
    return {"properties": {"x": schema, "y": {"not": {"const": "a"}}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        (X | {"anyOf": [{"required": ["x"]}, {"required": ["y"]}]}, "anyOf of all parameters together"),
        ({"allOf": [X]}, "allOf of all"),
        (X | {"minProperties": 1}, "minProperties of all"),
        (X | {"maxProperties": 1}, "maxProperties of all"),
        ({"patternProperties": {"z": {}}, "required": ["z"]}, "patternProperties of all"),
        (X | {"patternProperties": {"^x": {"type": "boolean"}}}, "patternProperties of all"),
        (of_x(enum=["a", "b"], **{"not": {"const": "a"}}), "not of a value"),
        (of_x(enum=["a", "b"], **{"if": {"const": "a"}, "then": False}), "if of a value"),
        (of_x(allOf=[{"$ref": "#/properties/y"}], enum=["a", "b"]), "not of a value"),
        (of_x(oneOf=[{"type": "string"}, {"enum": ["a"]}]), "oneOf of a value"),
        (of_x(**{"$ref": "#A"}), r"\$ref='#A': a reference to no part"),
        (of_x(**{"$ref": "http://x.example/a"}), r"\$ref='http://x.example/a'"),
        (of_x(type="object", properties={"z": {"$ref": "#/$defs/None"}}), r"\$ref='#/\$defs/None'"),
        (of_x(enum=["a", "b</parameter>"]), "a constant 'b</parameter>'"),
        ({"properties": {"x": False}, "required": ["x"]}, "a required parameter named 'x'"),
        ({"properties": {"a>b": {"type": "integer"}}}, "a parameter named 'a>b'"),
        ({"properties": {"x": {"enum": [2**53 + 1]}}}, "enum has 9007199254740993"),
        ({"properties": {"x": {"anyOf": [{}] * 200_001}}}, "more than 200000 values"),
        (
            {
                "properties": {f"p{i}": {"$ref": f"#/properties/p{i + 1}"} for i in range(400)}
                | {"p400": {"type": "integer"}}
            },
            "more than 50000 schemas",
        ),
    ],
)
def test_a_schema_that_calls_cannot_keep_is_refused(words, parameters, why):
    box = Toolbox([{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required")
    with pytest.raises(RequestError, match=f"tools is not allowed: .*{why}"):
        Dialect(words, "qwen3_coder").call_grammar(box, [])


@pytest.mark.parametrize("schema", [{"type": "boolean", "not": {"const": True}}, {"$ref": "#A"}])
def test_words_of_python_are_refused_with_what_they_lose(words, schema):
    function = {"name": "f", "parameters": of_x(**schema)}
    with pytest.raises(RequestError, match="tools is not allowed: .*(not of a value|a reference to no part)"):
        Dialect(words, "lfm2").call_grammar(
            Toolbox([{"type": "function", "function": function}], "required"), []
        )


@pytest.mark.parametrize("name", [*BETWEEN_TAGS, "lfm2", "olmo3", "hermes"])
@pytest.mark.parametrize("schema", [False, {"enum": []}, {"allOf": [{"const": 1}, {"type": "string"}]}])
def test_parameters_without_values_are_left_out(words, grammars, name, schema):
    parameters = {
        "properties": {"x": schema, "y": {"type": "integer"}},
        "propertyNames": {"type": "string", "title": "Name"},
        "patternProperties": {},
        "required": ["y"],
    }
    box = Toolbox(
        [{"type": "function", "function": {"name": "f", "parameters": parameters}}], "required", "f"
    )
    dialect = Dialect(words, name)
    wholes = [walk(grammars, words, dialect.call_grammar(box, []), seed) for seed in range(4)]
    texts = [text for text, is_whole in wholes if is_whole]
    assert texts
    for text in texts:
        replier = ReplyParser("key", None, ToolParser(dialect.require_tool_format(), box.tools))
        (call,) = list_whole_calls(replier.parse_chunk(text, at_end=True))
        assert [*json.loads(call["function"]["arguments"])] == ["y"]


def test_a_schema_that_is_nested_too_deeply_is_refused(words):
    deep: dict = {}
    for _ in range(20_000):
        deep = {"items": deep}
    box = Toolbox([{"type": "function", "function": {"name": "f", "parameters": deep}}], "required")
    for name in ("qwen3_coder", "hermes"):
        with pytest.raises(RequestError, match="tools is not allowed: maximum recursion depth"):
            Dialect(words, name).call_grammar(box, [])


# Those of which the templates of the tests sort keys, or write Python's words.
WRITTEN = [
    name for name, one in FAMILIES.items() if one.calls in TOOL_FORMATS and name not in ("granite", "lfm2")
]


@pytest.mark.parametrize("family", WRITTEN)
def test_a_grammar_allows_what_the_template_writes(words, grammars, family):
    arguments = {name: ARGUMENTS[name] for name in ("city", "days")}
    function = {"name": "rain", "arguments": json.dumps(arguments, ensure_ascii=False)}
    called = {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": function}]}
    whole = render_chat(template(family), [ASKED, called], **TOKENS, add_generation_prompt=False)
    begin = find_template_format(template(family)).begin
    text = whole[whole.index(begin) :].removesuffix(FAMILIES[family].ends)
    dialect = Dialect(words, FAMILIES[family].calls)
    follower = grammars.compile_constraint(dialect.call_grammar(Toolbox([TOOL], "required"), []), 0)
    follower.advance(words.encode(text))
    assert follower.failure is None and words.eos_token_id in allowed(follower.token_masks()[0])


@pytest.mark.parametrize("begun", [False, True])
def test_special_tokens_are_marks_and_reasoning_comes_before_calls(begun):
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    source = "{{ messages[0].content }}<think></think>{{ tools }}<tool_call>"
    own = letters(
        source, *(AddedToken(mark, special=True) for mark in marks), AddedToken("<end>", special=True)
    )
    dialect, ids = Dialect(own), [own.token_id(mark) for mark in marks]
    grammars = GrammarCompiler(own, len(own), [own.token_id("<end>")])
    prompt = own.encode("a<think>" if begun else "a")
    follower = grammars.compile_constraint(dialect.call_grammar(Toolbox(TOOLS, "required", "now"), prompt), 0)
    first = allowed(follower.token_masks()[0])
    assert (ids[1] in first and own.token_id("b") in first) if begun else first == [ids[0], ids[2]]
    text = (
        "" if begun else "<think>"
    ) + 'b"</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    follower.advance(own.encode(text))
    assert follower.failure is None and own.token_id("<end>") in allowed(follower.token_masks()[0])
    replier = ReplyParser(
        "key",
        dialect.make_reasoning_parser(prompt),
        ToolParser(dialect.require_tool_format(), Toolbox(TOOLS).tools),
    )
    parts = replier.parse_chunk(text, at_end=True)
    assert (
        join_part_texts(parts, ReasoningDelta) == 'b"'
        and not join_part_texts(parts, TextDelta)
        and replier.num_calls == 1
    )
    assert dialect.has_special_call_marks and dialect.has_special_reasoning_marks


def test_gpt_oss_calls_end_with_the_end_token():
    """Its mark is an end token of the model. Behind reasoning the call begins a message of its own."""
    marks = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>")
    own = letters(template("gpt_oss"), *(AddedToken(mark, special=True) for mark in marks))
    dialect, end = Dialect(own), own.token_id("<|call|>")
    grammars, prompt = GrammarCompiler(own, len(own), [end]), own.encode("<|start|>assistant")
    asked = dialect.call_grammar(Toolbox(TOOLS, "required", "now"), prompt)
    call = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    for before in ("", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"):
        follower = grammars.compile_constraint(asked, 0)
        follower.advance(own.encode(before + call))
        assert follower.failure is None and allowed(follower.token_masks()[0]) == [end]
        parser = ToolParser(dialect.require_tool_format(), Toolbox(TOOLS).tools)
        parts = ReplyParser("key", dialect.make_reasoning_parser(prompt), parser).parse_chunk(
            before + call, at_end=True
        )
        assert list_whole_calls(parts)[0]["function"] == {"name": "now", "arguments": "{}"}
        assert not join_part_texts(parts, TextDelta) and join_part_texts(parts, ReasoningDelta) == (
            "hm" if before else ""
        )


def test_schemas_of_arguments_are_closed_where_they_name_all():
    place = {"type": "object", "properties": {"x": {"type": "integer"}}}
    closed = {"additionalProperties": False}
    assert Tool("f").arguments_schema == {"type": "object"} | closed
    assert Tool("f", place).arguments_schema == place | closed
    assert Tool("f", place | {"additionalProperties": True}).arguments_schema["additionalProperties"] is True
    assert Tool("f", {"type": "object"}).arguments_schema == {"type": "object"}
    other = {"type": "object", "properties": {"y": {}}}
    either = Tool("f", {"anyOf": [place, other]}).arguments_schema
    assert either == {"type": "object", "anyOf": [place | closed, other | closed]}
    named = Tool("f", {"$ref": "#/$defs/Place", "$defs": {"Place": place}})
    assert named.arguments_schema == place | closed | {"$defs": {"Place": place | closed}}
    assert named.allowed_values("x") == {"integer": None} and named.allowed_values("y") == ANY_VALUE
