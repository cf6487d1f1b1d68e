"""Requests that docs/serving.md shows are answered."""

import contextlib
import io
import json

import pytest
from cases.documents import ROOT, blocks, commands

ADDRESS = "http://127.0.0.1:8000"


def requests() -> list[list[str]]:
    found = [block for block in blocks(ROOT / "docs" / "serving.md") if block.language == "sh"]
    return [words for block in found for words in commands(block) if words[0] == "curl"]


@pytest.mark.parametrize("words", requests(), ids=lambda words: words[-1][:40])
def test_a_request_is_answered(words, server):
    url = next(word for word in words if word.startswith(ADDRESS)).removeprefix(ADDRESS)
    body = json.loads(words[words.index("-d") + 1])
    with server.http() as http:
        answer = http.post(url, json={"max_tokens": 8} | body)
    assert answer.status_code == 200, answer.text
    if body.get("stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        assert answer.json()["choices"][0]["finish_reason"] in ("stop", "length")


def test_the_client_of_openai_streams(server):
    (block,) = (block for block in blocks(ROOT / "docs" / "serving.md") if block.language == "python")
    text = block.text.replace(ADDRESS, server.url).replace('api_key="none"', 'api_key="first-key"')
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(text, {})  # noqa: S102
    assert printed.getvalue().strip()
