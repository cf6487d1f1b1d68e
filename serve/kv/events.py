"""KV cache events in vLLM's format (`vllm/distributed/kv_events.py`): which pages can be found.

A batch of events is msgpack of the arrays and maps below, behind a topic and a number of 8 bytes, over
ZeroMQ. ZeroMQ's package is an extra of duetto's. Nothing here imports jax: a router decodes events too.
"""

import hashlib
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any

import msgspec
import numpy as np

from ...fields import converted
from ...refusals import unknown
from ..options.server import ServerOptions

DEVICE = "GPU"  # vLLM's name of the medium of pages in the pool, on any device
CLOSING = 1.0  # seconds in which the last events must be sent


class Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Event, encoded as a map with its class name as `type`."""


class BlockStored(Event):
    """Pages that can be found from now on, each the successor of the one before it. A page with
    `extra_keys` is found by more than its tokens."""

    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None

    @property
    def keys(self) -> list[tuple[Any, ...] | None]:
        return self.extra_keys or [None] * len(self.block_hashes)


class BlockRemoved(Event):
    """Pages that are not found any more."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    """No page is found any more."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events since the batch before, in order; `ts`: Unix time, seconds."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@dataclass(frozen=True)
class EventsConfig:
    """Options of the publisher: the keys of vLLM's `kv_events_config`. Raises ValueError for values that are
    not allowed."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "EventsConfig":
        types = {f.name: f.type for f in fields(cls)}
        for name in given:
            if name not in types:
                raise ValueError(f"kv_events_config: {unknown('key', name, types)}")
        values = {
            name: converted(f"kv_events_config: {name}", value, types[name]) for name, value in given.items()
        }
        return cls(**values)

    def __post_init__(self):
        if self.publisher not in (None, "zmq", "null"):
            raise ValueError(f"kv_events_config: publisher={self.publisher!r} is not allowed: zmq, or null")

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def events_of(options: ServerOptions) -> EventsConfig:
    """Return the publisher's options for a server; raises ValueError for values that are not allowed."""
    given = dict(options.kv_events_config or {})
    if options.kv_events_endpoint is not None:
        given |= {"enable_kv_cache_events": True, "endpoint": options.kv_events_endpoint}
    found = EventsConfig.of(given)
    if found.is_on:
        zmq("kv_events_config")
    return found


def zmq(option: str) -> Any:
    """Import ZeroMQ. Raises ValueError, with the package to install, where it is missing."""
    try:
        return import_module("zmq")
    except ImportError:
        raise ValueError(
            f"{option} is not allowed: there is no pyzmq; pip install 'duetto[events]'"
        ) from None


def number_of(name: bytes) -> int:
    """Return a page's name as subscribers get it: a number of 64 bits."""
    return int.from_bytes(name[-8:])


@dataclass
class Translator:
    """Makes events from the notifications of an engine's page pools.

    `root` is the name before the first page. Several shards may have a page of one name: it is removed when
    the last of them has lost it.
    """

    root: bytes
    page_size: int
    _copies: Counter[bytes] = field(default_factory=Counter)

    def stored(self, parent: bytes | None, name: bytes, tokens: Sequence[int]) -> BlockStored | None:
        self._copies[name] += 1
        if self._copies[name] > 1:
            return None
        page = np.asarray(tokens, np.int32).tobytes()
        plain = hashlib.blake2b((parent or self.root) + page, digest_size=16).digest() == name
        return BlockStored(
            [number_of(name)], None if parent is None else number_of(parent), list(tokens), self.page_size,
            medium=DEVICE, extra_keys=None if plain else [("written by decode",)], group_idx=0,
        )  # fmt: skip

    def removed(self, name: bytes) -> BlockRemoved | None:
        self._copies[name] -= 1
        if self._copies[name] > 0:
            return None
        del self._copies[name]
        return BlockRemoved([number_of(name)], medium=DEVICE, group_idx=0)

    def cleared(self) -> AllBlocksCleared:
        self._copies.clear()
        return AllBlocksCleared()


class Publisher:
    """Publishes events from a thread of its own, so the engine never waits. A slow subscriber misses batches,
    which it sees by their numbers."""

    def __init__(self, config: EventsConfig, root: bytes, page_size: int):
        self._zmq = zmq("kv_events_config")
        self._topic, self._translator = config.topic.encode(), Translator(root, page_size)
        self._said = queue.SimpleQueue[tuple[Any, ...] | None]()
        self._context = self._zmq.Context()
        self._socket = self._context.socket(self._zmq.PUB)
        self._socket.set_hwm(config.hwm)
        self._open(config.endpoint)
        self._thread = threading.Thread(target=self._run, name="duetto-events", daemon=True)
        self._thread.start()

    def _open(self, endpoint: str) -> None:
        """Bind an address of all interfaces or of a file, connect to any other, as vLLM does. Raises
        ValueError where that fails."""
        own = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        try:
            (self._socket.bind if own else self._socket.connect)(endpoint)
        except self._zmq.ZMQError as error:
            self._socket.close(0)
            self._context.term()
            raise ValueError(f"kv_events_config: endpoint={endpoint!r} cannot be had: {error}") from None

    # ------------------------------------------------------------ notifications of a pool, engine's thread

    def stored(self, parent: bytes | None, name: bytes, tokens: Sequence[int]) -> None:
        self._said.put(("stored", parent, name, tokens))

    def removed(self, name: bytes) -> None:
        self._said.put(("removed", name))

    def cleared(self) -> None:
        self._said.put(("cleared",))

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        encode, number, is_over = msgspec.msgpack.Encoder().encode, 0, False
        while not is_over:
            said, is_over = self._next()
            made = [getattr(self._translator, what)(*given) for what, *given in said]
            events = merged([event for event in made if event is not None])
            if events:
                told = encode(KVEventBatch(time.time(), events, 0))
                self._socket.send_multipart((self._topic, number.to_bytes(8), told))
                number += 1
        self._socket.close(int(1e3 * CLOSING))

    def _next(self) -> tuple[list[tuple[Any, ...]], bool]:
        """Wait for a notification; return all that are queued, and whether the last was the end."""
        said = [self._said.get()]
        while not self._said.empty():
            said.append(self._said.get())
        return [one for one in said if one is not None], None in said

    def close(self) -> None:
        self._said.put(None)
        self._thread.join()
        self._context.term()


def merged(events: Sequence[Any]) -> list[Any]:
    """Merge events whose pages follow each other."""
    found: list[Any] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, BlockStored) and isinstance(last, BlockStored) and follows(last, event):
            last.extra_keys = [*last.keys, *event.keys] if last.extra_keys or event.extra_keys else None
            last.block_hashes += event.block_hashes
            last.token_ids += event.token_ids
        elif isinstance(event, BlockRemoved) and isinstance(last, BlockRemoved):
            last.block_hashes += event.block_hashes
        else:
            found.append(event)
    return found


def follows(last: BlockStored, event: BlockStored) -> bool:
    return event.parent_block_hash == last.block_hashes[-1]
