"""Grammars by themselves: what they allow, token by token, and what cannot be compiled."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases.text.letters import letters
from tokenizers import AddedToken

from duetto import SamplingParams
from duetto.sampling.structured import StructuredOutputsParams
from duetto.serve.llm.input_processor import InputProcessor
from duetto.serve.options.engine import EngineOptions
from duetto.serve.text.grammar import vocabulary
from duetto.serve.text.grammar.compiler import GrammarCompiler
from duetto.serve.text.grammar.constraint import Constraint

END, V = 256, 300
MASKBENCH = Path(__file__).resolve().parents[5] / "shared" / "data" / "json_schemas" / "maskbench_240.jsonl"


@pytest.fixture(scope="module")
def grammars() -> GrammarCompiler:
    return GrammarCompiler(letters(None, AddedToken("<end>", special=True)), V, [END])


def ids(text: str) -> list[int]:
    return letters().encode(text)


def allowed(constraint: Constraint) -> set[int]:
    (mask,) = constraint.token_masks()
    return {*np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()}


def accepts(constraint: Constraint, text: str) -> bool:
    """Token by token, each of which must be among those allowed, and an end after all of them."""
    tokens = ids(text)
    for i, token in enumerate(tokens):
        if token not in allowed(constraint):
            return False
        constraint.advance(tokens[: i + 1])
    return constraint.failure is None and END in allowed(constraint)


TWO = json.dumps(
    {"grammars": [{"lark_grammar": 'start: "a" @b'}, {"name": "b", "lark_grammar": "start: /[0-9]/"}]}
)


@pytest.mark.parametrize(
    ("asked", "right", "wrong"),
    [
        ({"regex": "a+b?"}, ["a", "aab"], ["", "b", "aba", "ab "]),
        ({"choice": ["yes", 'no"\n', "é|ü", "yesterday"]}, ["yes", 'no"\n', "é|ü"], ["ye", "é", "no"]),
        ({"choice": ["a\x7f", *map(str, range(3000))]}, ["a\x7f", "29", "2999"], ["a", "3000"]),
        ({"json": {"type": "array", "maxItems": 1}}, ["[]", '[ {"a":\n1}]'], ["[1,2]", "{}", "[] "]),
        ({"json": '{"const": {"a": [1]}}', "disable_any_whitespace": True}, ['{"a":[1]}'], ['{"a": [1]}']),
        ({"json": {"type": "array"}, "whitespace_pattern": "_*"}, ["[_1__,2]"], ["[1, 2]"]),
        ({"json_object": True}, ["{}", '{"a": [null]}'], ["[]", "1"]),
        ({"grammar": 'start: "(" start? ")"'}, ["()", "((()))"], ["", "(()", "())"]),
        ({"grammar": 'start: "::="'}, ["::="], ["="]),
        ({"grammar": TWO}, ["a3"], ["a", "3"]),
        ({"grammar": 'root ::= "a" sign [0-9]+\nsign ::= "+" | "-"'}, ["a+1", "a-07"], ["a1", "a+"]),
    ],
)  # fmt: skip
def test_texts_are_allowed_as_asked(grammars, asked, right, wrong):
    params = SamplingParams(structured_outputs=asked).structured_outputs
    assert [accepts(grammars.compile_constraint(params, 0), text) for text in right] == [True] * len(right)
    assert [accepts(grammars.compile_constraint(params, 0), text) for text in wrong] == [False] * len(wrong)


def test_tokens_of_no_text_by_their_numbers_and_names():
    """As calls of tools begin and end."""
    tokenizer = letters(None, *[AddedToken(t, special=True) for t in ("<end>", "<call>", "</call>")])
    asked = StructuredOutputsParams(grammar='start: <call> %json {"type":"object","required":["a"]} <[258]>')
    constraint = GrammarCompiler(tokenizer, V, [END]).compile_constraint(asked, 2)
    assert allowed(constraint) == {257} and [*constraint.choose_draft([], 4)] == [257, *ids("{")]
    constraint.advance([1, 2, 257, *ids('{"a":1}')])
    assert 258 in allowed(constraint)
    constraint.advance([1, 2, 257, *ids('{"a":1}'), 258])
    assert allowed(constraint) == {END} and constraint.failure is None


def test_draft_tokens_are_cut_and_forced_tokens_drafted(grammars):
    constraint = grammars.compile_constraint(StructuredOutputsParams(choice=["yes", "no", "perhaps not"]), 1)
    yes, never = ids("yes"), ids("yet")
    assert [*constraint.choose_draft([*yes, END], 9)] == yes and [
        *constraint.choose_draft(never, 9)
    ] == never[:2]
    assert [*constraint.choose_draft([-1, -1], 9)] == []
    before = allowed(constraint)
    assert [len(constraint.token_masks(guess)) for guess in (yes, [*yes, END, 5], never, [END])] == [
        4,
        4,
        3,
        1,
    ]
    assert allowed(constraint) == before  # masks of guesses leave no trace
    constraint.advance([7, *ids("p")])
    assert [*constraint.choose_draft([], 4)] == ids("erha") and [
        *constraint.choose_draft(ids("er"), 4)
    ] == ids("erha")
    constraint.advance([7, *ids("perhaps not")])
    constraint.advance([7, *ids("perhaps not"), END, END])  # with ignore_eos
    assert (
        [*constraint.choose_draft(yes, 4)] == []
        and allowed(constraint) == {END}
        and constraint.failure is None
    )


def test_copies_advance_independently(grammars):
    first, second = (
        grammars.compile_constraint(StructuredOutputsParams(choice=["ab", "cd"]), 0) for _ in range(2)
    )
    first.advance(ids("a"))
    assert allowed(second) == {*ids("ac")} and allowed(first) == {*ids("b")}
    second.advance(ids("x"))
    assert "not allowed" in second.failure and first.failure is None


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"json": {"type": "strin"}}, "Invalid type: strin"),
        ({"grammar": "{}"}, "needs a list of grammars"),
        ({"grammar": '{"grammars": {"a": 1}}'}, "needs a list of grammars"),
        ({"grammar": '{"grammars": [1]}'}, "each of the grammars in the JSON of a grammar is an object"),
        ({"grammar": "{"}, "Expecting property name"),
        ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys: .*uniqueItems"),
        ({"json": {"minProperties": 3, "required": ["a"]}}, "minProperties=3: at most 2"),
        ({"json": {"enum": [1, {"id": 2**53 + 1}]}}, "enum has 9007199254740993: beyond"),
        ({"json": {"const": 2**64 - 1}}, "const has 18446744073709551615: beyond"),
        ({"json": {"enum": [*range(200_001)]}}, "more than 200000 values"),
        ({"json": {"anyOf": [{}] * 50_001}}, "more than 50000 schemas"),
        (
            {"json": {"properties": {"a": {"const": "\x01"}}, "additionalProperties": {}}},
            "a control character",
        ),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"not": {}}}, "Unimplemented keys"),
        ({"regex": "(["}, "invalid regex"),
        ({"grammar": "start: other"}, 'unknown name: "other"'),
        ({"grammar": "root ::= other"}, "Rule 'other' not found"),
        ({"grammar": 'root ::= "a'}, "Unexpected end of input"),
        ({"grammar": "start: <none>"}, "unknown special token"),
        ({"grammar": "start: start"}, "no token of the vocabulary may follow"),
        ({"choice": ["\ud800"]}, "surrogates not allowed"),
    ],
)
def test_what_cannot_be_compiled_says_why(grammars, asked, why):
    params = SamplingParams(structured_outputs=asked).structured_outputs
    for _ in range(2):
        with pytest.raises(ValueError, match=f"structured_outputs is not allowed: .*{why}"):
            grammars.compile_constraint(params, 0)


def test_a_vocabulary_that_lacks_what_a_grammar_wants(monkeypatch):
    tokenizer = letters(None, AddedToken("<end>", special=True))
    words, gone = tokenizer.token_bytes, ids("bc")
    monkeypatch.setattr(tokenizer, "token_bytes", lambda i: b"" if i in gone else words(i))
    constraint = GrammarCompiler(tokenizer, V, [END]).compile_constraint(
        StructuredOutputsParams(regex="a[bc]"), 0
    )
    constraint.advance(ids("a"))
    assert constraint.failure == "no token of the vocabulary may follow"


def test_long_tokens_and_panics(monkeypatch):
    """llguidance panics on very long tokens: they are left out."""
    tokenizer, asked = (
        letters(None, AddedToken("<end>"), AddedToken("x" * 5000)),
        StructuredOutputsParams(regex="x{9000}"),
    )
    assert allowed(GrammarCompiler(tokenizer, V, [END]).compile_constraint(asked, 0)) == {*ids("x")}
    monkeypatch.setattr(vocabulary, "MAX_TOKEN_BYTES", 10_000)
    with pytest.raises(ValueError, match="structured_outputs: llguidance panicked: assertion failed"):
        GrammarCompiler(tokenizer, V, [END]).compile_constraint(asked, 0)


def test_missing_requirements_are_named(grammars, monkeypatch):
    def refused(tokenizer, ends, known=()) -> str:
        intake = InputProcessor(V, 64, EngineOptions(), tokenizer, ends)
        params = SamplingParams(structured_outputs={"regex": "a"})
        with pytest.raises(ValueError, match=r"^structured_outputs") as error:
            intake.make_subscription([1], params, resumed_outputs=known)
        return str(error.value)

    assert "no tokenizer" in refused(None, (END,))
    assert "no end-of-sequence token" in refused(letters(), ())
    assert "token 3 is not allowed" in refused(letters(), (END,), known=[[3]])
    monkeypatch.setitem(sys.modules, "llguidance", None)
    assert "pip install 'duetto[structured]'" in refused(letters(), (END,))


@pytest.mark.full
@pytest.mark.skipif(not MASKBENCH.exists(), reason=f"there is no {MASKBENCH.name} beside the clone")
def test_schemas_of_maskbench(grammars):
    """Valid instances are allowed token by token, invalid ones are not; what llguidance cannot do is said.
    Some have keys that their schemas do not name, which are allowed where the schemas say so."""
    right, refused, wrong, with_others = 0, 0, [], 0
    for line in MASKBENCH.read_text().splitlines():
        case = json.loads(line)
        try:
            asked = StructuredOutputsParams(json=case["schema"])
            checks = [grammars.compile_constraint(asked, 0) for _ in case["tests"]]
        except ValueError as error:
            assert str(error).startswith("structured_outputs is not allowed: ")
            refused += 1
            continue
        for constraint, test in zip(checks, case["tests"], strict=True):
            text = json.dumps(test["data"], ensure_ascii=False)
            is_right = accepts(constraint, text) == test["valid"]
            if not is_right and test["valid"]:
                asked = StructuredOutputsParams(json=opened(case["schema"]))
                is_right = accepts(grammars.compile_constraint(asked, 0), text)
                with_others += is_right
            right += is_right
            wrong += [] if is_right else [(case["name"], test["valid"])]
    assert refused <= 7 and with_others <= 11 and not wrong, (refused, with_others, wrong)


def opened(schema: Any) -> Any:
    """A schema whose objects may have keys that it does not name, unless it says otherwise."""
    if isinstance(schema, list):
        return [opened(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {name: opened(part) for name, part in schema.items()}
    return {"additionalProperties": True} | parts if "properties" in parts else parts
