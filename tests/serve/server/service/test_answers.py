"""Answers that are encoded in parts."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from duetto.serve.server.service import errors

SCALARS = st.integers() | st.none() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(SCALARS, lambda x: st.lists(x) | st.dictionaries(st.text(), x), max_leaves=30)


@given(value=VALUES)
def test_an_answer_in_parts_is_the_whole_one(value):
    assert errors.encode_json(value) == msgspec.json.encode(value)


def test_no_part_of_an_answer_grows_with_its_tokens(monkeypatch):
    """Other threads run between the parts only."""
    sizes, encode = [], errors.ENCODER.encode
    noted = type("Noted", (), {"encode": lambda self, x: sizes.append(len(found := encode(x))) or found})()
    monkeypatch.setattr(errors, "ENCODER", noted)
    token = {"token": "a", "logprob": -1.5, "bytes": [97]}
    logprobs = {"content": [token | {"top_logprobs": [token] * 20}] * 1000}
    errors.encode_json({"choices": [{"index": i, "logprobs": logprobs} for i in range(3)]})
    assert max(sizes) < 2000
