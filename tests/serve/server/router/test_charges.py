"""What a request costs its client's share at a router, whatever its body says."""

from typing import Any

import pytest

from duetto.serve.server.router.prompts import (
    MAX_HASHED_TOKENS,
    MAX_REQUEST_CHOICES,
    UNBOUNDED_TOKENS,
    TextPageHasher,
    charged_tokens,
)

TEXT, CHAT, RESPONSE = "/v1/completions", "/v1/chat/completions", "/v1/responses"
NO_NUMBERS: list[Any] = [
    -1_000_000_000, 0, -(10**30), True, False, "50", 50.0, -0.5,
    float("inf"), float("-inf"), float("nan"), [50], {},
]  # fmt: skip


def charged(path: str, **fields: Any) -> int:
    return charged_tokens(path, fields, TextPageHasher(64)(path, fields))


@pytest.mark.parametrize("value", NO_NUMBERS, ids=str)
def test_invalid_numbers_do_not_reduce_the_charge(value):
    plain = charged(TEXT, prompt="a" * 40)
    assert plain == 10 + 16
    assert charged(TEXT, prompt="a" * 40, max_tokens=value) == plain
    assert charged(TEXT, prompt="a" * 40, n=value) == plain
    for path, name in (
        (CHAT, "max_completion_tokens"),
        (CHAT, "max_tokens"),
        (RESPONSE, "max_output_tokens"),
    ):
        assert charged(path, **{name: value}) >= UNBOUNDED_TOKENS
    assert charged("/v1/embeddings", input=value, max_tokens=value) >= 1


def test_all_completions_of_all_prompts_count():
    assert charged(TEXT, prompt="a" * 40, max_tokens=50, n=3) == 10 + 150
    assert charged(TEXT, prompt=["a" * 40, "b" * 400], max_tokens=50, n=3) == 110 + 300
    assert charged(TEXT, prompt=[[1, 2, 3], [4, 5]], max_tokens=5) == 5 + 10
    assert charged("/v1/embeddings", input=["a" * 40] * 100) == 1000
    assert charged(CHAT, messages=[], max_completion_tokens=7, max_tokens=900, n=2) < 30
    assert charged(CHAT, messages=[], max_completion_tokens=None, max_tokens=7) < 20


@pytest.mark.parametrize("huge", [10**9, 10**30, 1 << 64])
def test_no_number_is_beyond_what_a_replica_could_do(huge):
    assert charged(TEXT, prompt="", max_tokens=huge) == MAX_HASHED_TOKENS
    assert charged(TEXT, prompt="", n=huge) == 16 * MAX_REQUEST_CHOICES


BODIES: list[dict[str, Any]] = [
    {}, {"prompt": 5, "input": 5, "messages": 5},
    {"prompt": {"a": 1}, "input": {"a": 1}, "messages": {"a": 1}},
    {"input": True, "prompt": True, "messages": True}, {"prompt": ["a", 5, None], "input": ["a", 5, None]},
    {"prompt": [10**30] * 64, "input": [10**30] * 64}, {"prompt": [-1] * 64, "input": [1 << 31] * 64},
    {"input": 1.5, "instructions": 5, "tools": 5},
]  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=str)
def test_invalid_bodies_are_charged_and_left_to_replicas(body):
    for path in (TEXT, CHAT, RESPONSE, "/v1/embeddings", "/tokenize", "/detokenize"):
        assert charged(path, **body) >= 1
