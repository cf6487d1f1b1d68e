"""What a router knows of prompts and of replicas' pages."""

from pathlib import Path

import pytest

import duetto.checkpoints
from duetto.serve.kv.routing.memory import Sent, Told
from duetto.serve.kv.routing.replicas import ROW, Job, Replica, best
from duetto.serve.options.router import RouterOptions
from duetto.serve.server.router.http import Target
from duetto.serve.server.router.prompts import Prompt, Texts, Tokens
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

DEMO = Path(duetto.checkpoints.__file__).parent / "demo"
NAMES = [bytes([i]) * 16 for i in range(8)]


def test_pages_that_were_sent_last_stay_and_of_a_prompt_the_first():
    memory = Sent(4)
    memory.sent(NAMES[:3])
    assert memory.hits(NAMES) == 3 and memory.hits(NAMES[1:]) == 2 and memory.hits(NAMES[4:]) == 0
    memory.sent(NAMES[4:7])
    assert memory.hits(NAMES) == 1 and memory.hits(NAMES[4:]) == 3
    memory.ended(NAMES)
    assert memory.hits(NAMES[4:]) == 3
    memory.forget()
    assert memory.hits(NAMES[4:]) == 0


def test_what_is_on_its_way_is_there_until_it_ends():
    memory = Told()
    memory.sent(NAMES[:3])
    memory.sent(NAMES[:2])
    memory.stored(NAMES[0])
    memory.ended(NAMES[:3])
    assert memory.hits(NAMES) == 2
    memory.ended(NAMES[:2])
    assert memory.hits(NAMES) == 1
    memory.removed(NAMES[0])
    assert memory.hits(NAMES) == 0


def replica() -> Replica:
    made = Replica(Target("x", 1), Sent(100))
    made.is_ready = True
    return made


def test_the_longest_prefix_wins_unless_its_replica_is_busier_by_more_than_that_saves():
    one, two = replica(), replica()
    prompt = Prompt(NAMES, 64, 8 * 64)
    one.take(Job(prompt))
    assert one.load == 512 + ROW and two.load == 0
    assert best([one, two], prompt, 9, ()) is two  # 512 + ROW + 1 there, 512 here
    begun = next(iter(one.jobs))
    one.begun(begun)
    assert one.load == ROW and best([one, two], prompt, 9, ()) is one  # ROW + 1 there, 512 here
    assert best([one, two], prompt, 1, ()) is two and best([one, two], prompt, 9, {one}) is two
    two.is_ready = False
    assert best([one, two], prompt, 1, ()) is None
    one.leave(begun)
    one.leave(begun)
    assert one.load == 0 and one.hit_tokens == 0 and one.prompt_tokens == 512


def test_equal_beginnings_have_equal_names():
    tokenizer = Tokenizer.from_folder(DEMO)
    assert tokenizer is not None
    talk = [{"role": "user", "content": "sort a list of numbers " * 20}]
    longer = [*talk, {"role": "assistant", "content": "x"}, {"role": "user", "content": "and reverse it"}]
    for naming in (Texts(4), Tokens(tokenizer, 4)):
        short, long = (naming("/v1/chat/completions", {"messages": one}) for one in (talk, longer))
        shared = sum(a == b for a, b in zip(short.names, long.names, strict=False))
        assert len(long.names) > shared >= len(short.names) - 4 and short.page == 4 and short.tokens > 16
        text = naming("/v1/completions", {"prompt": ["import os\n" * 9, "y"]})
        assert text.names == naming("/v1/completions", {"prompt": "import os\n" * 9}).names != ()
        ids = naming("/v1/completions", {"prompt": list(range(60, 70))})
        assert len(ids.names) == 2 and ids.tokens == 10
        response = naming("/v1/responses", {"input": "sort a list of numbers " * 20})
        assert response.tokens > 16
        assert naming("/v1/embeddings", {"input": "sort a list of numbers " * 20}).names
        assert naming("/v1/completions", {}).tokens <= 1
    tokenizer.chat_template = "{{ tools }}{{ messages[0].content }}"
    tools = [{"type": "function", "function": {"name": name}} for name in ("rain", "snow")]
    for naming in (Texts(4), Tokens(tokenizer, 4)):  # tools stand before the messages
        one, two, same = (
            naming("/v1/chat/completions", {"messages": talk, "tools": given}).names
            for given in (tools[:1], tools[1:], tools[:1])
        )
        assert one == same and not {*one[12:]} & {*two[12:]}
    assert Tokens(tokenizer, 4)("/v1/chat/completions", {"messages": [{"role": 3}]}) == Prompt()
    assert Texts(4)("/v1/chat/completions", {"messages": [{"role": 3}]}).tokens


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
    assert Target.of("https://a.example") == Target("a.example", 443, True)
    assert Target.of("http://[::1]:81/") == Target("::1", 81)
