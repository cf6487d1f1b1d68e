"""What a router calls the pages of prompts, its options, and addresses."""

from pathlib import Path

import pytest

import duetto.checkpoints
from duetto.serve.kv.routing.placement import RoutedPrompt
from duetto.serve.options.router import RouterOptions
from duetto.serve.server.router.http_client import ServerAddress
from duetto.serve.server.router.prompts import TextPageHasher, TokenPageHasher
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

DEMO = Path(duetto.checkpoints.__file__).parent / "demo"


def test_equal_prefixes_have_equal_hashes():
    tokenizer = Tokenizer.from_folder(DEMO)
    assert tokenizer is not None
    talk = [{"role": "user", "content": "sort a list of numbers " * 20}]
    longer = [*talk, {"role": "assistant", "content": "x"}, {"role": "user", "content": "and reverse it"}]
    for naming in (TextPageHasher(4), TokenPageHasher(tokenizer, 4)):
        short, long = (naming("/v1/chat/completions", {"messages": one}) for one in (talk, longer))
        shared = sum(a == b for a, b in zip(short.page_hashes, long.page_hashes, strict=False))
        assert (
            len(long.page_hashes) > shared >= len(short.page_hashes) - 4
            and short.page_size == 4
            and short.tokens > 16
        )
        text = naming("/v1/completions", {"prompt": ["import os\n" * 9, "y"]})
        assert text.page_hashes == naming("/v1/completions", {"prompt": "import os\n" * 9}).page_hashes != ()
        ids = naming("/v1/completions", {"prompt": list(range(60, 70))})
        assert len(ids.page_hashes) == 2 and ids.tokens == 10
        response = naming("/v1/responses", {"input": "sort a list of numbers " * 20})
        assert response.tokens > 16
        assert naming("/v1/embeddings", {"input": "sort a list of numbers " * 20}).page_hashes
        assert naming("/v1/completions", {}).tokens <= 1
    tokenizer.chat_template = "{{ tools }}{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": name}} for name in ("rain", "snow")]
    for naming in (TextPageHasher(4), TokenPageHasher(tokenizer, 4)):  # tools stand before the messages
        one, two, same = (
            naming("/v1/chat/completions", {"messages": talk, "tools": given}).page_hashes
            for given in (tools[:1], tools[1:], tools[:1])
        )
        assert one == same and not {*one[12:]} & {*two[12:]}
    assert (
        TokenPageHasher(tokenizer, 4)("/v1/chat/completions", {"messages": [{"role": 3}]}) == RoutedPrompt()
    )
    assert TextPageHasher(4)("/v1/chat/completions", {"messages": [{"role": 3}]}).tokens


def test_prompts_of_other_salts_share_no_hash():
    tokenizer = Tokenizer.from_folder(DEMO)
    assert tokenizer is not None
    for naming in (TextPageHasher(4), TokenPageHasher(tokenizer, 4)):
        for prompt in ("import os\n" * 9, list(range(60, 100))):
            salts = None, "a", "b", "a", "", 3  # replicas refuse the last two
            bodies = [{"prompt": prompt, "cache_salt": salt} for salt in salts]
            plain, a, b, again, *wrong = [naming("/v1/completions", body).page_hashes for body in bodies]
            assert a == again and wrong == [plain, plain]
            assert not {*plain} & {*a} and not {*plain} & {*b} and not {*a} & {*b}


@pytest.mark.parametrize("name", ["chat_template", "now", "tokenizer"])
def test_a_router_renders_no_template_of_a_client(name):
    tokenizer = Tokenizer.from_folder(DEMO)
    assert tokenizer is not None
    body = {"messages": [{"role": "user", "content": "sort a list " * 9}]}
    assert TokenPageHasher(tokenizer, 4)("/v1/chat/completions", body).page_hashes
    variables = {"chat_template_kwargs": {name: "{{ messages }}"}}
    assert TokenPageHasher(tokenizer, 4)("/v1/chat/completions", body | variables) == RoutedPrompt()


WRONG = [
    ({}, "replica is missing"),
    ({"replica": ["x"]}, "replica 'x' is not allowed"),
    ({"replica": ["http://a"] * 2}, "each has another address"),
    ({"replica": ["http://a"], "kv_events": ["tcp://a:1"]}, "without tokenizer"),
    ({"replica": ["http://a"], "kv_events": [], "tokenizer": "x"}, "0 for 1 replicas"),
    ({"replica": ["http://a"], "kv_events": ["a:1"], "tokenizer": "x"}, "kv_events 'a:1' is not allowed"),
    ({"replica": ["http://a"], "page_size": 0}, "page_size 0 is not allowed: more than 0"),
]


@pytest.mark.parametrize("given, message", WRONG)
def test_options_that_are_not_allowed_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        RouterOptions(**given)


def test_addresses():
    assert ServerAddress.from_url("https://a.example") == ServerAddress("a.example", 443, True)
    assert ServerAddress.from_url("http://[::1]:81/") == ServerAddress("::1", 81)
