"""JSON of requests that is refused before it is parsed."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duetto.serve.text.openai import errors
from duetto.serve.text.openai.errors import RequestError, count_structural_chars, parse_request_object

LETTERS = st.text(st.sampled_from('a\\",:[{é'))
VALUES = st.recursive(
    st.integers() | st.none() | LETTERS,
    lambda inner: st.lists(inner) | st.dictionaries(LETTERS, inner),
    max_leaves=30,
)


def marks_in(value: Any) -> int:
    """Its commas, colons and opening brackets when it is written."""
    if isinstance(value, dict):
        return 1 + 2 * len(value) - bool(value) + sum(map(marks_in, value.values()))
    if isinstance(value, list):
        return 1 + len(value) - bool(value) + sum(map(marks_in, value))
    return 0


@given(value=VALUES, size=st.integers(1, 9))
def test_marks_of_json_are_those_outside_of_strings(value, size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(errors, "PIECE_BYTES", size)
        assert count_structural_chars(json.dumps(value).encode(), 10**6) == marks_in(value)


def test_json_may_have_as_many_marks_as_are_allowed():
    text = b'{"a": [1, 2, {"b, c": "[]"}]}'
    assert parse_request_object(text, "body", 7) == {"a": [1, 2, {"b, c": "[]"}]}
    with pytest.raises(RequestError, match="the body's JSON has too many values: at most 6 commas, colons"):
        parse_request_object(text, "body", 6)
