"""KV cache events in vLLM's format (`vllm/distributed/kv_events.py`): which pages are in the prefix cache.

A batch of events is msgpack of the arrays and maps below, after a topic and a number of 8 bytes, over ZeroMQ.
ZeroMQ's package is an extra of duetto's. Nothing here imports jax: a router decodes events too.
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

from ...option_fields import convert_field
from ...refusals import unknown_name_message
from ..options.server import ServerOptions

MEDIUM_GPU = "GPU"  # vLLM's name of the medium of pages in the pool, on any device
CLOSE_SECONDS = 1.0  # seconds within which the last events are sent


class Event(msgspec.Struct, tag=True, omit_defaults=True, gc=False):
    """Event, encoded as a map with its class name as `type`."""


class BlockStored(Event):
    """Pages that can be found from now on, each the successor of the page before it.

    block_hashes: of the pages.
    parent_block_hash: of the page before the first; None if a prompt begins there.
    token_ids: tokens of all pages.
    block_size: tokens of a page.
    extra_keys: for each page, keys besides its tokens that its hash depends on; None if there are none.
    """

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
    def extra_keys_by_page(self) -> list[tuple[Any, ...] | None]:
        """Extra keys of each page."""
        return self.extra_keys or [None] * len(self.block_hashes)


class BlockRemoved(Event):
    """Pages that cannot be found any more."""

    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    """Event after which no page can be found."""


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Events since the batch before, in order.

    ts: Unix time, seconds.
    """

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
    def from_mapping(cls, values: Mapping[str, Any]) -> "EventsConfig":
        """Make a config of the keys of `kv_events_config`. Raises ValueError for an unknown key or a value of
        another type."""
        types = {f.name: f.type for f in fields(cls)}
        for name in values:
            if name not in types:
                raise ValueError(f"kv_events_config: {unknown_name_message('key', name, types)}")
        converted_values = {
            name: convert_field(f"kv_events_config: {name}", value, types[name])
            for name, value in values.items()
        }
        return cls(**converted_values)

    def __post_init__(self):
        if self.publisher not in (None, "zmq", "null"):
            raise ValueError(f"kv_events_config: publisher={self.publisher!r} is not allowed: zmq, or null")

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"


def read_events_config(options: ServerOptions) -> EventsConfig:
    """Return the publisher's options of a server. Raises ValueError for values that are not allowed."""
    values = dict(options.kv_events_config or {})
    if options.kv_events_endpoint is not None:
        values |= {"enable_kv_cache_events": True, "endpoint": options.kv_events_endpoint}
    config = EventsConfig.from_mapping(values)
    if config.is_on:
        import_zmq("kv_events_config")
    return config


def import_zmq(option: str) -> Any:
    """Import ZeroMQ. Raises ValueError, with the package to install, if it is missing."""
    try:
        return import_module("zmq")
    except ImportError:
        raise ValueError(
            f"{option} is not allowed: there is no pyzmq; pip install 'duetto[events]'"
        ) from None


def external_block_hash(page_hash: bytes) -> int:
    """Return a page hash as subscribers receive it: a number of 64 bits."""
    return int.from_bytes(page_hash[-8:])


@dataclass
class EventTranslator:
    """Translator of the notifications of an engine's page pools to events.

    Several shards may have a page of one hash: it is removed when the last shard has evicted it.

    root: hash before the first page.
    page_size: tokens of a page.
    """

    root: bytes
    page_size: int
    _shard_copies: Counter[bytes] = field(default_factory=Counter)

    def translate_stored(
        self, parent_hash: bytes | None, page_hash: bytes, tokens: Sequence[int], salt: bytes = b""
    ) -> BlockStored | None:
        """Return the event of a stored page; None if another shard has the page already.

        A page has a key besides its tokens if no prompt of tokens alone finds it: decode wrote it, or an
        encoder's embeddings are in it.
        """
        self._shard_copies[page_hash] += 1
        if self._shard_copies[page_hash] > 1:
            return None
        page = np.asarray(tokens, np.int32).tobytes()
        start = parent_hash or self.root + salt
        is_plain = hashlib.blake2b(start + page, digest_size=16).digest() == page_hash
        salt_keys = (salt.hex(),) if parent_hash is None and salt else None
        keys = salt_keys if is_plain else ("written by decode",)
        parent = None if parent_hash is None else external_block_hash(parent_hash)
        return BlockStored(
            [external_block_hash(page_hash)], parent, list(tokens), self.page_size,
            medium=MEDIUM_GPU, extra_keys=None if keys is None else [keys], group_idx=0,
        )  # fmt: skip

    def translate_removed(self, page_hash: bytes) -> BlockRemoved | None:
        """Return the event of an evicted page; None if another shard still has the page."""
        self._shard_copies[page_hash] -= 1
        if self._shard_copies[page_hash] > 0:
            return None
        del self._shard_copies[page_hash]
        return BlockRemoved([external_block_hash(page_hash)], medium=MEDIUM_GPU, group_idx=0)

    def translate_cleared(self) -> AllBlocksCleared:
        self._shard_copies.clear()
        return AllBlocksCleared()


class EventPublisher:
    """Publisher of events, in a thread of its own: the engine never waits. A slow subscriber misses batches,
    and notices it by their numbers."""

    def __init__(self, config: EventsConfig, root: bytes, page_size: int):
        self._zmq = import_zmq("kv_events_config")
        self._topic, self._translator = config.topic.encode(), EventTranslator(root, page_size)
        self._notifications = queue.SimpleQueue[tuple[Any, ...] | None]()
        self._context = self._zmq.Context()
        self._socket = self._context.socket(self._zmq.PUB)
        self._socket.set_hwm(config.hwm)
        self._open_socket(config.endpoint)
        self._thread = threading.Thread(
            target=self._publish_batches, name="duetto-kv-events-publisher", daemon=True
        )
        self._thread.start()

    def _open_socket(self, endpoint: str) -> None:
        """Bind the socket to an address of all interfaces or of a file; connect it to any other address, as
        vLLM does. Raises ValueError if that fails."""
        is_bound = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        try:
            (self._socket.bind if is_bound else self._socket.connect)(endpoint)
        except self._zmq.ZMQError as error:
            self._socket.close(0)
            self._context.term()
            raise ValueError(f"kv_events_config: endpoint={endpoint!r} cannot be had: {error}") from None

    # ------------------------------------------------------------ notifications of a pool, engine's thread

    def on_stored(
        self, parent_hash: bytes | None, page_hash: bytes, tokens: Sequence[int], salt: bytes = b""
    ) -> None:
        self._notifications.put(("translate_stored", parent_hash, page_hash, tokens, salt))

    def on_removed(self, page_hash: bytes) -> None:
        self._notifications.put(("translate_removed", page_hash))

    def on_cleared(self) -> None:
        self._notifications.put(("translate_cleared",))

    # ------------------------------------------------------------ the thread

    def _publish_batches(self) -> None:
        """Send a batch for all queued notifications, again and again until `close`."""
        encode, number, is_last = msgspec.msgpack.Encoder().encode, 0, False
        while not is_last:
            notifications, is_last = self._next_notifications()
            translated = [
                getattr(self._translator, method)(*arguments) for method, *arguments in notifications
            ]
            events = merge_events([event for event in translated if event is not None])
            if events:
                message = encode(KVEventBatch(time.time(), events, 0))
                self._socket.send_multipart((self._topic, number.to_bytes(8), message))
                number += 1
        self._socket.close(int(1e3 * CLOSE_SECONDS))

    def _next_notifications(self) -> tuple[list[tuple[Any, ...]], bool]:
        """Wait for a notification. Returns all queued notifications, and True if the publisher is closed."""
        notifications = [self._notifications.get()]
        while not self._notifications.empty():
            notifications.append(self._notifications.get())
        return [x for x in notifications if x is not None], None in notifications

    def close(self) -> None:
        self._notifications.put(None)
        self._thread.join()
        self._context.term()


def merge_events(events: Sequence[Any]) -> list[Any]:
    """Merge consecutive events: stored pages that follow each other, and removed pages."""
    merged_events: list[Any] = []
    for event in events:
        previous = merged_events[-1] if merged_events else None
        if (
            isinstance(event, BlockStored)
            and isinstance(previous, BlockStored)
            and is_successor(previous, event)
        ):
            previous.extra_keys = (
                [*previous.extra_keys_by_page, *event.extra_keys_by_page]
                if previous.extra_keys or event.extra_keys
                else None
            )
            previous.block_hashes += event.block_hashes
            previous.token_ids += event.token_ids
        elif isinstance(event, BlockRemoved) and isinstance(previous, BlockRemoved):
            previous.block_hashes += event.block_hashes
        else:
            merged_events.append(event)
    return merged_events


def is_successor(stored: BlockStored, next_stored: BlockStored) -> bool:
    """Return True if the pages of `next_stored` follow the pages of `stored`."""
    return next_stored.parent_block_hash == stored.block_hashes[-1]
