"""Events of the cache: what a pool says, how it is written, and what a router makes of it."""

import queue
import random
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from cases.requests import SIZES

from duetto import LLM, SamplingParams
from duetto.kvcache.page_hash import extend_page_hashes
from duetto.kvcache.tables import PageTables
from duetto.model.embeddings.prompt import EmbeddingSpan
from duetto.serve.kv.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    EventsConfig,
    EventTranslator,
    KVEventBatch,
    merge_events,
    read_events_config,
)  # fmt: skip
from duetto.serve.kv.routing.prefix_index import EventPrefixIndex
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.router.events import Listener, PrefixIndexUpdater
from duetto.serve.server.router.prompts import TOKENS_ROOT

ROOT = b"r" * 16


class Noted:
    """Keeps what a pool says, as a subscriber would."""

    def __init__(self, page_size: int = 4, root: bytes = ROOT):
        self.translator, self.memory, self.count = EventTranslator(root, page_size), EventPrefixIndex(), 0
        self.pages, self.names = PrefixIndexUpdater(self.memory, page_size), set[bytes]()

    def on_stored(self, parent_hash: bytes | None, page_hash: bytes, tokens: Any, salt: bytes = b"") -> None:
        self.names.add(page_hash)
        self._tell(self.translator.translate_stored(parent_hash, page_hash, tokens, salt))

    def on_removed(self, page_hash: bytes) -> None:
        self.names.remove(page_hash)
        self._tell(self.translator.translate_removed(page_hash))

    def on_cleared(self) -> None:
        self.names.clear()
        self._tell(self.translator.translate_cleared())

    def _tell(self, event: Any) -> None:
        told = msgspec.msgpack.encode(KVEventBatch(0.0, [event], 0))
        self.pages.apply_batch(self.count, msgspec.msgpack.decode(told, type=KVEventBatch))
        self.count += 1


def names_of(tokens: list[int], page_size: int, start: bytes) -> list[bytes]:
    names: list[bytes] = []
    extend_page_hashes(names, tokens, len(tokens) // page_size, page_size, start)
    return names


def test_events_rebuild_the_pages_of_the_pool():
    tables, draw = PageTables([None], [12], 4, step_tokens=8), random.Random(0)
    noted = Noted()
    tables.set_listener(noted)
    prompts = [[draw.choice((1, 2)) for _ in range(12)] + [3] * 8 for _ in range(12)]
    for i, prompt in enumerate(draw.choices(prompts, k=300)):
        names = names_of(prompt, 4, ROOT)
        found = tables.find_prefix(names)
        assert noted.memory.count_cached(names_of(prompt, 4, TOKENS_ROOT)) == len(found[0])
        own = tables.admit(found, len(prompt), len(prompt) + 1)
        tables.cache_pages(own, names, len(found[0]), prompt)
        tables.release(own, len(prompt) + 1)
        assert noted.names == {name for name, _ in tables.pools[0].list_cached_pages()}
        if i % 100 == 99:
            tables.reset_prefix_cache()
            assert not noted.names and not noted.memory.count_cached(names_of(prompt, 4, TOKENS_ROOT))


def test_events_of_salted_pages_have_the_salt():
    tables, noted, prompt = PageTables([None], [12], 4, step_tokens=8), Noted(), [*range(12)]
    tables.set_listener(noted)
    own = tables.admit([[]], 12, 13)
    for salt in (b"", b"s" * 16):
        names = names_of(prompt, 4, ROOT + salt)
        tables.cache_pages(own, names, 0, prompt, (), salt)
        found = [
            noted.memory.count_cached(names_of(prompt, 4, TOKENS_ROOT + known))
            for known in (b"", b"s" * 16, b"t" * 16)
        ]
        assert found == [3 * (known == salt) for known in (b"", b"s" * 16, b"t" * 16)]
        tables.reset_prefix_cache()


@pytest.fixture(scope="module")
def llm(tiny) -> Iterator[LLM]:
    with LLM.from_params(tiny.config, tiny.params, **SIZES) as llm:
        yield llm


def test_events_report_pages_of_prompts_and_of_outputs(llm):
    scheduler, size = llm.engine.scheduler, llm.engine.tables.page_size
    noted = Noted(size, scheduler.root_hash)
    llm.engine.tables.set_listener(noted)
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 300) for _ in range(3 * size + 1)] for _ in range(4)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=size, ignore_eos=True), use_tqdm=False)
    pool = llm.engine.tables.pools[0]
    assert noted.names == {name for name, _ in pool.list_cached_pages()} != set()
    for output in outputs:
        text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        found = noted.memory.count_cached(names_of(text, size, TOKENS_ROOT))
        full = names_of(text[:-1], size, scheduler.root_hash)
        assert found == len(llm.engine.tables.find_prefix(full)[0]) >= 3
    llm.engine.tables.reset_prefix_cache()
    assert not noted.names
    pool.listener = None


def test_events_have_the_form_that_vllm_gives_them():
    translator = EventTranslator(ROOT, 2)
    first, second = names_of([5, 6, 7, 8], 2, ROOT)
    made = [
        translator.translate_stored(None, first, [5, 6]),
        translator.translate_stored(first, second, [7, 8]),
    ]
    own = b"written by decode"[:16]
    made += [
        translator.translate_stored(second, own, [9, 9]),
        translator.translate_stored(None, first, [5, 6]),
    ]
    assert made.pop() is None and translator.translate_removed(first) is None  # another shard's copy
    made += [
        translator.translate_removed(first),
        translator.translate_removed(second),
        translator.translate_cleared(),
    ]
    ts, events, rank = msgspec.msgpack.decode(
        msgspec.msgpack.encode(KVEventBatch(1.5, merge_events(made), 0))
    )
    one, two, three = (int.from_bytes(name[8:]) for name in (first, second, own))
    assert (ts, rank) == (1.5, 0) and events == [
        {
            "type": "BlockStored", "block_hashes": [one, two, three], "parent_block_hash": None,
            "token_ids": [5, 6, 7, 8, 9, 9], "block_size": 2, "medium": "GPU",
            "extra_keys": [None, None, ["written by decode"]], "group_idx": 0,
        },
        {"type": "BlockRemoved", "block_hashes": [one, two], "medium": "GPU", "group_idx": 0},
        {"type": "AllBlocksCleared"},
    ]  # fmt: skip


def test_no_prompt_of_a_router_finds_pages_of_embeddings():
    """Their names depend on more than tokens, and so do those of all pages after them."""
    translator, memory, tokens = EventTranslator(ROOT, 2), EventPrefixIndex(), [5, 6, 7, 7, 7, 8]
    names: list[bytes] = []
    extend_page_hashes(names, tokens, 3, 2, ROOT, spans=[EmbeddingSpan(2, 3, b"content", None)])
    parents = [None, *names]
    stored = [translator.translate_stored(parents[i], names[i], tokens[2 * i : 2 * i + 2]) for i in range(3)]
    assert [event is not None and event.extra_keys is not None for event in stored] == [False, True, True]
    PrefixIndexUpdater(memory, 2).apply_batch(0, KVEventBatch(0.0, merge_events(stored)))
    assert memory.count_cached(names_of(tokens, 2, TOKENS_ROOT)) == 1


def test_missed_events_clear_the_index():
    memory = EventPrefixIndex()
    pages = PrefixIndexUpdater(memory, 2)
    first, second = names_of([5, 6, 7, 8], 2, TOKENS_ROOT)
    stored = BlockStored([1], None, [5, 6], 2)
    behind = BlockStored([b"2"], 1, [7, 8], 2)
    pages.apply_batch(0, KVEventBatch(0.0, [stored, behind]))
    assert memory.count_cached([first, second]) == 2
    pages.apply_batch(2, KVEventBatch(0.0, [behind]))  # its parent may be gone
    assert memory.count_cached([first]) == 0 and not pages._page_hashes
    pages.apply_batch(3, KVEventBatch(0.0, [BlockStored([3], None, [5, 6, 7, 8], 4), BlockRemoved([1, 9])]))
    pages.apply_batch(4, KVEventBatch(0.0, [BlockStored([4], None, [5, 6], 2, extra_keys=[("salt",)])]))
    assert memory.count_cached([first]) == 0
    pages.apply_batch(5, KVEventBatch(0.0, [stored, AllBlocksCleared()]))
    assert memory.count_cached([first]) == 0


def test_events_go_over_zeromq():
    pytest.importorskip("zmq", reason="needs duetto[events]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place, heard = f"tcp://127.0.0.1:{port}", []
    options = ServerOptions(kv_events_endpoint=f"tcp://*:{port}", kv_events_config={"topic": "kv@x"})
    publisher = EventPublisher(read_events_config(options), ROOT, 2)
    with pytest.raises(ValueError, match="cannot be had: Address already in use"):
        EventPublisher(read_events_config(options), ROOT, 2)
    listener = Listener([place], lambda replica, number, events: heard.append((replica, number, events)))
    names, end = names_of([5, 6], 2, ROOT), time.monotonic() + 20
    while not heard and time.monotonic() < end:  # who joins late misses what was told before
        publisher.on_stored(None, names[0], [5, 6])
        publisher.on_removed(names[0])
        time.sleep(0.02)
    publisher.close()
    listener.close()
    replica, _, events = heard[0]
    assert replica == 0 and {type(event) for event in events.events} == {BlockStored, BlockRemoved}
    numbers = [number for _, number, _ in heard]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def test_batches_are_numbered_from_zero(monkeypatch):
    """By the first number, a subscriber that was there from the start sees whether it missed a batch."""
    zmq = pytest.importorskip("zmq", reason="needs duetto[events]")
    sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
    monkeypatch.setattr(zmq.Socket, "send_multipart", lambda self, message: sent.put(message))
    publisher = EventPublisher(EventsConfig(endpoint="inproc://numbered", topic="kv@x"), ROOT, 2)
    (name,) = names_of([5, 6], 2, ROOT)
    for number, tell in enumerate((lambda: publisher.on_stored(None, name, [5, 6]), publisher.on_cleared)):
        tell()
        topic, told, _ = sent.get(timeout=20)
        assert (topic, int.from_bytes(told)) == (b"kv@x", number)
    publisher.close()
    assert sent.empty()


WRONG = [
    ({"endpiont": "x"}, "did you mean 'endpoint'"),
    ({"publisher": "kafka"}, "publisher='kafka' is not allowed: zmq, or null"),
    ({"replay_endpoint": "tcp://*:1"}, "replay_endpoint='tcp://"),
    ({"hwm": "x"}, "hwm='x'"),
]


@pytest.mark.parametrize("given, message", WRONG)
def test_what_is_not_allowed_is_named(given, message):
    with pytest.raises((ValueError, TypeError), match=message):
        read_events_config(ServerOptions(kv_events_config=given))
    assert not EventsConfig.from_mapping({"enable_kv_cache_events": True, "publisher": "null"}).is_on
