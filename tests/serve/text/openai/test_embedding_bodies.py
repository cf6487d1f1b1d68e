"""What bodies of /v1/embeddings become, and their replies."""

import base64

import numpy as np
import pytest

from duetto import PoolingParams
from duetto.serve.text.openai.embeddings import MAX_INPUTS, embedding_reply, parse_embedding_body
from duetto.serve.text.openai.errors import RequestError


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_inputs_are_texts_or_token_ids(given, prompts):
    inputs = parse_embedding_body(
        {"input": given, "model": "m", "dimensions": 8, "normalize": False, "user": "u"}
    )
    assert [task.prompt for task in inputs.tasks] == prompts and not inputs.is_base64
    assert {task.pooling for task in inputs.tasks} == {PoolingParams(8, normalize=False)}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": None}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, f"at most {MAX_INPUTS}"),
        ({"input": [[1.5]]}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"dimensions": 0}, "dimensions 0"),
        ({"dimensions": 1.5}, "dimensions 1.5"),
        ({"pooling": "cls"}, "pooling 'cls'"),
        ({"normalize": "yes"}, "normalize 'yes'"),
        ({"model": 3}, "model"),
        ({"dimension": 3}, "did you mean dimensions"),
        ({"temperature": 1.0}, "temperature"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_is_not_allowed_is_named(fields, named):
    with pytest.raises(RequestError, match=named):
        parse_embedding_body({"input": "x"} | fields)


def test_numbers_are_written_exactly():
    numbers = np.array([0.1, -2.5, 1e-9], np.float32)
    plain, packed = (
        embedding_reply("m", parse_embedding_body({"input": "x", "encoding_format": form}), [numbers], 3)
        for form in ("float", "base64")
    )
    assert plain["data"][0]["embedding"] == numbers.tolist() and plain["usage"]["total_tokens"] == 3
    assert np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4").tolist() == numbers.tolist()
