"""Values that schemas of parameters allow, however these are put together, and in bounded steps."""

from typing import Any

import pytest

from duetto.serve.text.tools.schemas import allowed_values
from duetto.serve.text.tools.schemas.allowed_values import ANY_VALUE
from duetto.serve.text.tools.tool import Tool

ALL = frozenset(ANY_VALUE)
WORDS = {"type": "string", "enum": ["a", "b"]}
DEFINITIONS = {"Word": WORDS, "Again": {"$ref": "#/$defs/Word"}, "Count": {"type": "integer"}}
AGAIN = {"$ref": "#/$defs/Again"}


def root_of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "$defs": DEFINITIONS}


def reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/properties/{name}"}


@pytest.mark.parametrize(
    ("schema", "kinds", "strings"),
    [
        (AGAIN, {"string"}, {"a", "b"}),
        ({"anyOf": [WORDS, {"const": "c"}]}, {"string"}, {"a", "b", "c"}),
        ({"anyOf": [WORDS, {"type": "null"}]}, {"string", "null"}, {"a", "b"}),
        ({"oneOf": [AGAIN, {"type": "integer"}]}, {"string", "integer"}, {"a", "b"}),
        ({"oneOf": [AGAIN, {"enum": ["b", "c"]}]}, {"string"}, {"a", "c"}),
        ({"oneOf": [AGAIN, AGAIN, {"type": "null"}]}, {"null"}, set()),
        ({"oneOf": [{"const": 1}, {"enum": [1.0, True]}, {"type": "array"}]}, {"boolean", "array"}, set()),
        ({"not": {}}, set(), set()),
        ({"allOf": [AGAIN, {"enum": ["b", "c", 1]}]}, {"string"}, {"b"}),
        ({"allOf": [{"$ref": "#/$defs/Count"}]}, {"integer"}, set()),
        ({"allOf": [{"type": "number"}, {"type": ["integer", "string"]}]}, {"integer"}, set()),
        (AGAIN | {"enum": ["a"]}, {"string"}, {"a"}),
        ({"anyOf": [WORDS, {"type": "string"}]}, {"string"}, None),
        ({"type": "number"}, {"number", "integer"}, set()),
        ({"enum": [1, 2.0, True, None, [1]]}, {"integer", "boolean", "null", "array"}, set()),
        ({"anyOf": [True]}, ALL, None),
        ({"anyOf": [False, WORDS]}, {"string"}, {"a", "b"}),
        ({"$ref": "#/nowhere"}, ALL, None),
        ({}, ALL, None),
    ],
)
def test_values_are_those_of_all_parts_together(schema, kinds, strings):
    values = Tool("f", root_of(x=schema)).allowed_values("x")
    assert {*values} == kinds
    texts = values.get("string", {})
    assert (None if texts is None else {*texts}) == strings


@pytest.mark.parametrize(
    ("properties", "kinds"),
    [
        ({"x": {"anyOf": [reference("x")] * 40}}, ALL),
        ({"x": {"anyOf": [reference("x"), {"type": "integer"}]}}, {"integer"}),
        ({"x": {"allOf": [reference("x"), {"type": "integer"}]}}, {"integer"}),
        ({"x": {"anyOf": [reference("y")] * 9}, "y": {"anyOf": [reference("x"), WORDS]}}, {"string"}),
        (
            {f"x{i or ''}": {"anyOf": [reference(f"x{i + 1}")] * 40} for i in range(30)}
            | {"x30": {"type": "integer"}},
            {"integer"},
        ),
        (
            {f"x{i or ''}": reference(f"x{i + 1}") for i in range(2000)} | {"x2000": {"type": "null"}},
            {"null"},
        ),
    ],
)
def test_a_schema_is_visited_once(properties, kinds, monkeypatch):
    monkeypatch.setattr(allowed_values, "MAX_STEPS", 25_000)
    assert {*Tool("f", root_of(**properties)).allowed_values("x")} == kinds


def test_schemas_in_a_loop_are_the_same_from_everywhere():
    both = root_of(x={"anyOf": [reference("y"), WORDS]}, y={"anyOf": [reference("x"), {"type": "null"}]})
    tool = Tool("f", both)
    assert [{*tool.allowed_values(name)} for name in ("x", "y", "x")] == [{"string", "null"}] * 3


def test_a_loop_is_resolved_once_for_all_parameters():
    definitions = {
        f"u{i}": {"anyOf": [{"$ref": f"#/$defs/u{(i + 1) % 150}"}, {"const": f"c{i}"}]} for i in range(150)
    }
    names = [f"p{i}" for i in range(20)]
    properties = {name: {"anyOf": [{"$ref": "#/$defs/u0"}, {"type": "null"}]} for name in names}
    tool = Tool("f", {"properties": properties, "$defs": definitions})
    counts = [
        {kind: len(values or ()) for kind, values in tool.allowed_values(name).items()} for name in names
    ]
    assert counts == [{"string": 150, "null": 1}] * 20


def test_schemas_of_a_loop_keep_their_other_keywords():
    x = {"allOf": [reference("y"), reference("z")]}
    y = {"anyOf": [reference("z"), {"const": 5}]}
    z = {"type": "string", "anyOf": [reference("y"), {"const": "a"}]}
    for names in ("xyz", "zyx"):
        tool = Tool("f", root_of(x=x, y=y, z=z))
        values = {
            name: {key for some in tool.allowed_values(name).values() for key in some or ()} for name in names
        }
        assert values == {"x": {"a"}, "y": {"5", "a"}, "z": {"a"}}


def test_steps_have_a_bound():
    wide = root_of(x={"anyOf": [{"type": "integer"}] * 60_000}, y={"enum": [*range(60_000)]})
    for name in ("x", "y"):
        with pytest.raises(ValueError, match="more than 5000 schemas, or 50000 literals"):
            Tool("f", wide).allowed_values(name)
        assert Tool("f", wide).read_argument(name, "5") == "5" and Tool("f", wide).may_be_string(name)


@pytest.mark.parametrize("step", ["a/", "%61"])
def test_long_references_are_counted_and_looked_up_once(step, monkeypatch):
    looked_up = []
    monkeypatch.setattr(allowed_values, "resolve_reference", lambda _, name: looked_up.append(name))
    several = [{"$ref": f"#/{step * 1200}{i}"} for i in range(100)]
    assert Tool("f", root_of(x={"anyOf": several * 2}, y={"anyOf": several})).allowed_values("x") == ANY_VALUE
    assert len(looked_up) == 100
    with pytest.raises(ValueError, match="more than 5000 schemas, or 50000 literals"):
        Tool(
            "f", root_of(x={"anyOf": [{"$ref": f"#/{step * 1200}{i}"} for i in range(2000)]})
        ).allowed_values("x")
    assert len(looked_up) < 600


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"enum": ["1", 2]}, "1", '"1"'),
        ({"enum": ["1", 2]}, "2", "2"),
        ({"enum": ["1", 2]}, "3", "3"),
        ({"anyOf": [{"enum": ["1", "2"]}, {"type": "integer", "minimum": 5}]}, "1", '"1"'),
        ({"anyOf": [{"enum": ["1", "2"]}, {"type": "integer", "minimum": 5}]}, "5", "5"),
        ({"enum": ["1", 1]}, "1", "1"),
        ({"anyOf": [{"enum": ["[1]"]}, {"type": "array", "minItems": 2}]}, "[1]", '"[1]"'),
        ({"anyOf": [WORDS, {"type": "null"}]}, "None", "null"),
        ({"anyOf": [WORDS, {"type": "integer"}]}, "a", '"a"'),
        ({"anyOf": [{"type": "string"}, {"const": 7}]}, "8", '"8"'),
        (AGAIN, "true", '"true"'),
        ({"allOf": [{"$ref": "#/$defs/Count"}]}, "5", "5"),
        ({"type": "integer"}, "5.0", "5.0"),
        ({"type": "boolean"}, "maybe", '"maybe"'),
        ({"const": "x", "type": "integer"}, "5", "5"),
    ],
)
def test_texts_become_values_that_the_schema_allows(schema, text, value):
    assert Tool("f", root_of(x=schema)).read_argument("x", text) == value


def test_a_parameter_without_a_name_has_the_type_of_others():
    tool = Tool("f", {"properties": {"x": {"type": "string"}}, "additionalProperties": {"type": "string"}})
    assert tool.read_argument("y", "5") == '"5"'
    assert Tool("f", {"additionalProperties": {"type": "integer"}}).read_argument("y", "5") == "5"
    assert Tool("f", {"patternProperties": {"y": {"type": "string"}}}).read_argument("y", "5") == "5"


def test_a_long_reference_is_resolved_once_per_grammar(monkeypatch):
    looked_up = []
    monkeypatch.setattr(allowed_values, "resolve_reference", lambda _, name: looked_up.append(name))
    tool = Tool("f", root_of(x={"anyOf": [{"$ref": "#/" + "a/" * 5000}] * 500}))
    with pytest.raises(ValueError, match=r"^\$ref='#/a/.{,95}: a reference to no part"):
        tool.check_literals("x")
    assert len(looked_up) == 1


def test_options_that_share_no_string_are_allowed():
    tool = Tool("f", root_of(x={"oneOf": [{"type": "string"}, False, {"enum": []}, {"type": "array"}]}))
    tool.check_literals("x")
