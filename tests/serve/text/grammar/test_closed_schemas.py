"""Objects of a JSON Schema have the properties that it names, and whitespace between JSON's tokens ends."""

import json
import random
from itertools import islice
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pytest
from pydantic import BaseModel, Field, create_model
from suite.marks import full

from duetto.sampling.structured import StructuredOutputsParams
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER
from duetto.serve.text.grammar.compiler import GrammarCompiler
from duetto.serve.text.openai.errors import RequestError
from duetto.serve.text.openai.tasks import parse_task
from duetto.serve.text.tokenizer.tokenizer import Tokenizer
from duetto.serve.text.tools.schemas import json_schema
from duetto.serve.text.tools.schemas.json_schema import close_objects

pytest.importorskip("llguidance")

MODELS, LONGEST = 200, 400
LEAVES: list[Any] = [
    int, str, bool, Literal["a", "b"], int | None,
    Annotated[list[int], Field(max_length=2)], Annotated[dict[str, int], Field(max_length=1)],
]  # fmt: skip
X = {"type": "object", "properties": {"x": {"type": "integer"}}}
CLOSED = {"additionalProperties": False}


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    own = Tokenizer.from_folder(DEMO_FOLDER)
    assert own is not None
    return own


@pytest.fixture(scope="module")
def grammars(words) -> GrammarCompiler:
    return GrammarCompiler(words, len(words), [words.eos_token_id])


def drawn_model(seed: int) -> type[BaseModel]:
    """A model with up to two others as fields, optional fields, and no word about other keys."""
    rng = random.Random(seed)
    parts = list[type[BaseModel]]()
    for i in range(rng.randrange(3)):
        parts.append(model(rng, f"Part{i}", parts))
    return model(rng, "Model", parts)


def model(rng: random.Random, name: str, parts: list[type[BaseModel]]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for i in range(rng.randint(1, 3)):
        kind = field(rng, parts)
        own = (kind, ...) if rng.random() < 0.6 else (kind | None, None)
        fields[f"{rng.choice(['name', 'n', 'size'])}_{i}"] = own
    return create_model(name, **fields)


def field(rng: random.Random, parts: list[type[BaseModel]]) -> Any:
    if not parts or rng.random() < 0.4:
        return rng.choice(LEAVES)
    part = rng.choice(parts)
    return rng.choice([part, part | None, Annotated[list[part], Field(max_length=1)]])


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with every model closed by hand: models are what has a title and properties."""
    parts = {name: part | CLOSED for name, part in schema.get("$defs", {}).items()}
    return schema | CLOSED | ({"$defs": parts} if parts else {})


def drawn(
    grammars: GrammarCompiler, words: Tokenizer, asked: StructuredOutputsParams, seed: int
) -> str | None:
    """A random text that a grammar allows, which ends where it may; None if it becomes too long."""
    rng, ids, end = random.Random(seed), list[int](), words.eos_token_id
    constraint = grammars.compile_constraint(asked, 0)
    while len(ids) < LONGEST:
        bits = np.unpackbits(constraint.token_masks()[0].view(np.uint8), bitorder="little")
        found = np.flatnonzero(bits).tolist()
        if end in found:
            return words.decode(ids)
        marks = [id for id in found if set(words.decode([id])) & set('"}]')]
        ids.append(rng.choice(marks if marks and rng.random() < 0.5 else found))
        constraint.advance(ids)
        assert constraint.failure is None
    return None


def asked_of(schema: dict[str, Any], **fields: Any) -> StructuredOutputsParams:
    """As a body of OpenAI's asks for a schema."""
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}
    chat = {"messages": [{"role": "user", "content": "x"}], "response_format": form}
    found = parse_task("chat", None, chat, {}, None).params.structured_outputs
    assert found is not None
    return found


@pytest.mark.parametrize("models", [40, full(MODELS)])
def test_models_of_pydantic_get_no_foreign_key(grammars, words, models):
    whole, foreign = 0, 0
    for seed in range(models):
        asked = drawn_model(seed)
        schema = asked.model_json_schema()
        text = drawn(grammars, words, asked_of(schema, strict=True), seed)
        if text is not None:
            whole += 1
            asked.model_validate_json(text)
            value = json.loads(text)
            jsonschema.validate(value, strict(schema))
            foreign += not set(value) <= schema["properties"].keys()
    assert whole > 0.9 * models and not foreign


@pytest.mark.parametrize("fields", [{}, {"strict": False}, {"strict": True}])
def test_a_schema_decides_whether_other_keys_are_allowed(grammars, words, fields):
    """As xgrammar's grammars for vLLM: `strict` changes nothing."""
    shut = grammars.compile_constraint(asked_of(X, **fields), 0)
    shut.advance(words.encode('{"x": 1, "y"'))
    assert "is not allowed" in (shut.failure or "")
    opened = grammars.compile_constraint(asked_of(X | {"additionalProperties": True}, **fields), 0)
    opened.advance(words.encode('{"x": 1, "y": []}'))
    assert opened.failure is None


@pytest.mark.parametrize("value", [True, False, None])
def test_vllms_switch_of_other_keys_is_accepted(value):
    asked = {"json": X, "disable_additional_properties": value}
    task = parse_task("completion", None, {"prompt": "x", "structured_outputs": asked}, {}, None)
    assert task.params.structured_outputs == StructuredOutputsParams(json=X)


def test_strict_is_true_or_false():
    with pytest.raises(RequestError, match='response_format.strict="yes" is not allowed'):
        asked_of(X, strict="yes")


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (X, X | CLOSED),
        ({"type": "object"}, {"type": "object"}),
        (X | {"additionalProperties": {"type": "null"}}, X | {"additionalProperties": {"type": "null"}}),
        ({"patternProperties": {"^a": X}}, {"patternProperties": {"^a": X | CLOSED}} | CLOSED),
        ({"anyOf": [X, {"type": "null"}]}, {"anyOf": [X | CLOSED, {"type": "null"}]}),
        ({"allOf": [X], "title": "A"}, {"allOf": [X | CLOSED], "title": "A"}),
        ({"allOf": [X, {"required": ["x"]}]}, {"allOf": [X, {"required": ["x"]}]}),
        (X | {"anyOf": [X, X]}, X | {"anyOf": [X, X]}),
        ({"items": X, "anyOf": [{"items": X}]}, {"items": X, "anyOf": [{"items": X}]}),
        ({"required": ["y"], "anyOf": [X]}, {"required": ["y"], "anyOf": [X]}),
        (X | {"required": ["x", "y"]}, X | {"required": ["x", "y"]}),
        ({"items": [X], "default": X, "enum": [X]}, {"items": [X | CLOSED], "default": X, "enum": [X]}),
    ],
)  # fmt: skip
def test_which_objects_are_closed(schema, wanted):
    assert close_objects(schema) == wanted


def test_what_a_reference_combines_stays_open():
    parts = {"A": X, "B": {"$ref": "#/$defs/A"}, "C": X}
    both = {"allOf": [{"$ref": "#/$defs/B"}, X | {"title": "B"}], "$defs": parts}
    assert close_objects(both) == both | {"$defs": parts | {"C": X | CLOSED}}
    loop = {"$ref": "#/$defs/A", "properties": {}, "$defs": {"A": {"$ref": "#/$defs/A"}}}
    assert close_objects(loop) == loop


def having(name: str, **others: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "integer"}}, "required": [name], **others}


def nested(key: str, depth: int) -> dict[str, Any]:
    """Schemas of one key, one in another."""
    own: dict[str, Any] = {}
    for _ in range(depth):
        own = {key: [own] if key in ("allOf", "anyOf", "oneOf", "prefixItems") else own}
        own = own if key not in TABLES else {key: {"a": own[key]}}
    return own


TABLES = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
KEYS = (*TABLES, "allOf", "anyOf", "oneOf", "prefixItems", "items", "additionalItems", "additionalProperties")


@pytest.mark.parametrize("key", KEYS)
def test_each_schema_is_visited_once(key):
    depth = 12
    assert len([*islice(json_schema.iterate_schemas(nested(key, depth)), depth + 2)]) <= depth + 1


def visits(monkeypatch, depth: int) -> int:
    """How often keys of schemas are read when each of a chain of schemas is combined with the next."""
    seen, parts = list[str](), json_schema.keyword_schemas

    def counted(name: str, schema: Any) -> list[Any]:
        seen.append(name)
        return parts(name, schema)

    own = X
    for _ in range(depth):
        own = X | {"allOf": [own]}
    with monkeypatch.context() as patch:
        patch.setattr(json_schema, "keyword_schemas", counted)
        close_objects(own)
    return len(seen)


def test_visits_grow_as_the_schema_does(monkeypatch):
    assert visits(monkeypatch, 80) < 2.2 * visits(monkeypatch, 40)


P, Q = having("p"), having("q")
PQ, QP = {"x": {"p": 1, "q": 2}}, {"x": {"q": 2, "p": 1}}  # keys in the order in which schemas name them
ESCAPED = {"allOf": [{"$ref": "#/$defs/a%20b"}, Q], "$defs": {"a b": P}}
INDEXED = {"allOf": [{"$ref": "#/$defs/L/anyOf/0"}, Q], "$defs": {"L": {"anyOf": [P]}}}
UNKNOWN = {"allOf": [{"$ref": "#p"}, Q], "$defs": {"P": {"$anchor": "p", **P}}}
ELSEWHERE = {
    "$ref": "#/parts/both",
    "parts": {"both": {"allOf": [P, {"$ref": "#/$defs/q"}]}},
    "$defs": {"q": Q},
}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"allOf": [having("x", properties={"x": P}), {"properties": {"x": Q}}]}, PQ),
        (having("x", properties={"x": P}, anyOf=[{"properties": {"x": Q}}]), PQ),
        ({"allOf": [having("x", properties={"x": P}), {"patternProperties": {"^x": Q}}]}, PQ),
        ({"allOf": [{"patternProperties": {"^x": Q}}, having("x", properties={"x": P})]}, QP),
        ({"allOf": [having("x", properties={"x": P}), {"additionalProperties": Q}]}, PQ),
        (having("x", properties={"x": P}, patternProperties={"^x": Q}), PQ),
        ({"type": "array", "minItems": 1, "items": P, "allOf": [{"items": Q}]}, [PQ["x"]]),
        ({"type": "array", "minItems": 1, "prefixItems": [P], "allOf": [{"items": Q}]}, [PQ["x"]]),
        (ESCAPED, PQ["x"]),
        (INDEXED, PQ["x"]),
        (UNKNOWN, PQ["x"]),
        (ELSEWHERE, PQ["x"]),
        ({"required": ["y"], "type": "object", "anyOf": [P]}, {"p": 1, "y": 2}),
    ],
)
def test_values_that_several_schemas_describe_stay_possible(grammars, words, schema, value):
    jsonschema.validate(value, schema)
    constraint = grammars.compile_constraint(StructuredOutputsParams(json=schema), 0)
    constraint.advance(words.encode(json.dumps(value)))
    assert constraint.failure is None


def test_values_of_other_names_are_closed():
    both = {"allOf": [{"properties": {"x": X, "y": X}}, {"properties": {"x": X, "z": X}}]}
    first, second = close_objects(both)["allOf"]
    assert first == {"properties": {"x": X, "y": X | CLOSED}}
    assert second == {"properties": {"x": X, "z": X | CLOSED}}


@pytest.mark.parametrize(
    ("reference", "wanted"),
    [
        ("", True),
        ("#", True),
        ("#/a b/0", 1),
        ("#/a%20b/1", 2),
        ("#/c~1d/~0", 3),
        ("#/a%20b/2", None),
        ("#/a%20b/x", None),
        ("#/a%20b/" + "9" * 5000, None),
        ("#anchor", None),
        ("other#/a%20b/0", None),
        ("#/a%20b/0/0", None),
    ],
)
def test_what_references_mean(reference, wanted):
    root = {"a b": [1, 2], "c/d": {"~": 3}, "anchor": 4}
    assert json_schema.resolve_reference(root, reference) == (root if wanted is True else wanted)


@pytest.mark.parametrize("text", ['{"x":1}', '{ "x" : 1 }', '{\n  "x": 1\n}', '{\r\n\t\t"x": 1}'])
def test_json_as_programs_write_it_is_allowed(grammars, words, text):
    constraint = grammars.compile_constraint(StructuredOutputsParams(json=X), 0)
    constraint.advance(words.encode(text))
    assert constraint.failure is None


@pytest.mark.parametrize("space", ["  ", "\n\n", "\n" + " " * 21, "\t"])
def test_whitespace_has_a_bound(grammars, words, space):
    own = {"bounded": StructuredOutputsParams(json=X), "free": {"whitespace_pattern": r"[ \t\r\n]*"}}
    constraint = grammars.compile_constraint(own["bounded"], 0)
    constraint.advance(words.encode("{" + space + '"x": 1}'))
    assert "is not allowed" in (constraint.failure or "")
    free = grammars.compile_constraint(StructuredOutputsParams(json=X, **own["free"]), 0)
    free.advance(words.encode("{" + space + '"x": 1}'))
    assert free.failure is None
