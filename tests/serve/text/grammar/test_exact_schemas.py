"""Grammars of schemas allow no value that the schema refuses, where llguidance by itself would."""

import json
import random
from contextlib import suppress
from decimal import Decimal, getcontext
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from cases.text.letters import letters
from tokenizers import AddedToken

from duetto.sampling.structured import StructuredOutputsParams
from duetto.serve.text.grammar.compiler import GrammarCompiler
from duetto.serve.text.tools.schemas.exact_schema import adapt_schema, rewrite_pattern

pytest.importorskip("llguidance")

SUITE = Path(__file__).resolve().parents[5] / "shared" / "data" / "json_schemas" / "test_suite_2020_12.json"
END, V = 256, 257
LETTERS = letters()
MARKS = {*LETTERS.encode('\\"}]')}
LONGEST = 120  # tokens of a walk
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "null"}}


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(letters(None, AddedToken("<end>", special=True)), V, [END])


def accepts(grammars: GrammarCompiler, schema: dict[str, Any], text: str) -> bool:
    constraint = grammars.compile_constraint(StructuredOutputsParams(json=schema), 0)
    constraint.advance(LETTERS.encode(text))
    return constraint.failure is None and END in allowed_tokens(constraint)


def allowed_tokens(constraint) -> list[int]:
    return np.flatnonzero(
        np.unpackbits(constraint.token_masks()[0].view(np.uint8), bitorder="little")
    ).tolist()


def walk(grammars: GrammarCompiler, schema: dict[str, Any], seed: int) -> str | None:
    """Return a text of a grammar, drawn with many quotes and backslashes; None if it becomes too long."""
    rng, ids = random.Random(seed), list[int]()
    constraint = grammars.compile_constraint(StructuredOutputsParams(json=schema), 0)
    while len(ids) < LONGEST:
        tokens = [i for i in allowed_tokens(constraint) if i < 128 or i == END]
        if END in tokens and (len(tokens) == 1 or rng.random() < 0.4):
            return LETTERS.decode(ids)
        marks = sorted(MARKS.intersection(tokens))
        ids.append(rng.choice(marks if marks and rng.random() < 0.5 else [i for i in tokens if i != END]))
        constraint.advance(ids)
    return None


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        (r'^[^"]{1,8}$', [r"a\\\nb", r"\t", r"\u0001"], [r"\"", r"a\"b"]),
        (r"^[^\\]{1,8}$", [r"a\"", r"\n"], [r"\\", r"a\\b"]),
        (r'^[^<>:"/\\|?*]{1,12}$', ["a b", r"\n"], [r"\"", r"\\", "<"]),
        (r"^[\x00-!]$", ["!", r"\u0000", r"\n"], [r"\"", r"\\", "a"]),
        (r"^\p{Cc}$", [r"\n", r"\u0001"], [r"\"", r"\\"]),
        (r'^"[^"]*"$', [r"\"a\""], [r"\"a\"\""]),
        (r"^.$", ["a", r"\"", r"\\"], [r"\r", r"\n", "\u2028"]),
        (r"^\s\S$", [" a", "\ufeffa", r"\n\""], ["\x85a", "  "]),
        (r"^[[a&&b-]$", ["[", "&", "-", "b"], ["]", "c"]),
        (r"^[+--]$", ["+", ",", "-"], ["."]),
        (r"^\d\w$", ["1a"], ["\u0663a"]),
    ],
)
def test_a_pattern_means_the_text_not_its_escapes(grammars, pattern, right, wrong):
    for schema, form in (
        ({"type": "string", "pattern": pattern}, '"{}"'),
        ({"type": "object", "patternProperties": {pattern: {}}, "minProperties": 1}, '{{"{}": 1}}'),
    ):
        assert [accepts(grammars, schema, form.format(text)) for text in right] == [True] * len(right)
        assert [accepts(grammars, schema, form.format(text)) for text in wrong] == [False] * len(wrong)


def test_a_class_that_does_not_end_is_read_once():
    assert len(rewrite_pattern("[" * 100_000)) < 300_000


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"exclusiveMinimum": 0, "exclusiveMaximum": 0.5}, ["0.1", "0.499"], ["0", "0.0", "0.5"]),
        ({"exclusiveMinimum": 1, "maximum": 1.5}, ["1.5", "1.01"], ["1", "1.0"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["-0", "0", "-0.0"]),
        ({"minimum": 1, "exclusiveMinimum": True, "maximum": 1.5}, ["1.2"], ["1"]),
        ({"allOf": [{"exclusiveMinimum": 2}, {"maximum": 2.5}]}, ["2.5"], ["2"]),
        ({"exclusiveMaximum": 1, "minimum": 0}, ["0", "0.99"], ["1", "1.0"]),
        ({"minimum": 2**53 + 1, "maximum": 2**53 + 3}, [str(2**53 + 2)], [str(2**53), str(2**53 + 4)]),
        ({"exclusiveMinimum": 2**53}, [str(2**53 + 2)], [str(2**53)]),
        ({"exclusiveMaximum": -(2**53) - 1}, [str(-(2**53) - 2)], [str(-(2**53) - 1), str(-(2**53))]),
        ({"exclusiveMinimum": 4, "type": "integer"}, ["5"], ["4"]),
        ({"const": 2**53 + 2}, [str(2**53 + 2)], [str(2**53)]),
    ],
)
def test_numbers_keep_their_bounds(grammars, schema, right, wrong):
    whole = {"type": "number"} | schema
    assert [accepts(grammars, whole, text) for text in right] == [True] * len(right)
    assert [accepts(grammars, whole, text) for text in wrong] == [False] * len(wrong)


def test_drawn_numbers_are_within_drawn_bounds(grammars):
    getcontext().prec, rng, count = 400, random.Random(0), 0
    ends = [0, 0.5, 1, 1.5, -1, -0.5, 0.1 + 0.2, 2**53 + 1, -(2**53) - 3, 2**53 + 6]
    for seed in range(150):
        low, high = sorted(rng.choices(ends, k=2))
        names = rng.choice(["minimum", "exclusiveMinimum"]), rng.choice(["maximum", "exclusiveMaximum"])
        schema = {"type": rng.choice(["number", "integer"]), names[0]: low, names[1]: high}
        try:
            text = walk(grammars, schema, seed)
        except ValueError as error:
            assert "Unsatisfiable" in str(error) or "nvalid" in str(error) or "mpty" in str(error), error
            continue
        if text is not None:
            number, least, most = Decimal(text), Decimal(repr(low)), Decimal(repr(high))
            count += 1
            assert least < number or (number == least and names[0] == "minimum"), (schema, text)
            assert number < most or (number == most and names[1] == "maximum"), (schema, text)
    assert count > 60


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (OPEN, ['{"a": 1, "b": null}'], ['{"a": 1, "\\u0061": null}', '{"\\u0061": null}']),
        ({"properties": {'"': {"const": 1}}} | OPEN | {"properties": {'"': {"const": 1}}}, ['{"\\"": 1}'],
         ['{"\\u0022": null}']),
        ({"type": "object", "minProperties": 2, "required": ["a"]}, ['{"a": 1, "b": 1}'], ['{"a": 1}']),
        ({"type": "object", "properties": {"a": {"const": "\x01"}}}, ['{"a": "\\u0001"}'], ['{"a": ""}']),
    ],
)  # fmt: skip
def test_names_are_counted_and_not_repeated(grammars, schema, right, wrong):
    assert [accepts(grammars, schema, text) for text in right] == [True] * len(right)
    assert [accepts(grammars, schema, text) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize(
    "idle",
    [
        {"uniqueItems": False}, {"not": False}, {"format": "int32"}, {"propertyNames": {}}, {"if": {}},
        {"then": False}, {"minContains": 2}, {"dependentRequired": {}}, {"unevaluatedProperties": True},
        {"$dynamicAnchor": "a"}, {"maxLength": 3.0}, {"propertyNames": True}, {"patternProperties": {}},
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {"type": ["null", "string"], "title": "Key", "pattern": "^.*", "format": "int32"}},
        {"propertyNames": {"minLength": 0, "not": False, "maximum": 5, "required": ["a"]}},
    ],
)  # fmt: skip
def test_keywords_that_refuse_nothing_are_allowed(grammars, idle):
    assert accepts(grammars, {"type": "string"} | idle, '"abc"')
    assert accepts(grammars, {"type": "object", "properties": {"a": {"items": idle}}}, '{"a": ["abc"]}')


@pytest.mark.parametrize(
    "names",
    [
        False, {"type": "integer"}, {"type": []}, {"not": {}}, {"pattern": "^.*$"}, {"pattern": "a"},
        {"minLength": 1}, {"maxLength": 9}, {"enum": ["a"]}, {"const": "a"}, {"format": "date"},
        {"anyOf": []}, {"$ref": "#"},
    ],
)  # fmt: skip
def test_names_that_some_string_breaks_are_refused(grammars, names):
    with pytest.raises(ValueError, match="propertyNames"):
        accepts(grammars, {"type": "object", "propertyNames": names}, "{}")


def test_constants_and_names_that_look_like_keywords_stay():
    schema = {"const": {"uniqueItems": False, "pattern": "."}, "properties": {"format": {"default": "."}}}
    kept = json.loads(json.dumps(schema))
    adapt_schema(kept)
    assert kept == schema


def test_drawn_objects_are_of_their_drawn_schemas(grammars):
    """Objects with names that need escapes, which allow others."""
    rng, count = random.Random(1), 0
    parts = [
        {"type": "integer"},
        {"type": "null"},
        {"const": 1},
        {"type": "string", "pattern": '^[^"]$'},
        True,
    ]
    names = ["a", '"', "\\", "\t", "/", ""]
    for seed in range(80):
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: rng.choice(parts) for name in rng.sample(names, rng.randrange(3))},
            "required": rng.sample(names, rng.randrange(2)),
            "additionalProperties": rng.choice([*parts, False]),
        }
        schema |= rng.choice([{}, {"minProperties": len(schema["required"]) + 1}])
        try:
            text = walk(grammars, schema, seed)
        except ValueError:
            continue
        if text is not None:
            count += 1
            jsonschema.validate(json.loads(text), schema)
    assert count > 30


@pytest.mark.skipif(not SUITE.exists(), reason=f"there is no {SUITE.name} beside the clone")
def test_the_suite_of_json_schema(grammars):
    """No invalid instance is allowed, of schemas that are not refused."""
    cases = [case for group in json.loads(SUITE.read_text()).values() for case in group]
    wrong, count = [], 0
    for case in (case for case in cases if isinstance(case["schema"], dict)):
        for test in (test for test in case["tests"] if test["valid"] is False):
            with suppress(ValueError):
                count += 1
                if accepts(grammars, case["schema"], json.dumps(test["data"], ensure_ascii=False)):
                    wrong.append((case["description"], test["description"]))
    assert count > 200 and not wrong
