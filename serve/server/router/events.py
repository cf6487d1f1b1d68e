"""KV cache events of replicas, received in a thread."""

import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ....kvcache.page_hash import extend_page_hashes
from ...host.streams import print_stderr
from ...kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, import_zmq
from ...kv.routing.prefix_index import EventPrefixIndex
from .prompts import TOKENS_ROOT

SALT_PATTERN = re.compile("[0-9a-f]{32}")
POLL_MILLISECONDS = 200  # milliseconds between checks for the end


class PrefixIndexUpdater:
    """Translates the block hashes in one replica's events to the router's page hashes, for its prefix index.

    Skips pages whose parent is unknown, since its event was lost. Also skips pages with keys other than
    tokens and a cache salt: no prompt finds them.
    """

    def __init__(self, prefix_index: EventPrefixIndex, page_size: int):
        self._prefix_index, self._page_size = prefix_index, page_size
        self._page_hashes: dict[
            int | bytes, bytes
        ] = {}  # the router's page hashes, by the replica's block hashes
        self._next_batch = 0  # number of the batch that is expected

    def apply_batch(self, number: int, events: KVEventBatch) -> None:
        """Apply a batch of events. A gap in the batch numbers clears the index."""
        if number != self._next_batch:
            self._clear()
        self._next_batch = number + 1
        for event in events.events:
            match event:
                case BlockStored():
                    self._store_blocks(event)
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        if (page_hash := self._page_hashes.pop(block_hash, None)) is not None:
                            self._prefix_index.on_page_removed(page_hash)
                case AllBlocksCleared():
                    self._clear()

    def _clear(self) -> None:
        self._page_hashes.clear()
        self._prefix_index.clear()

    def _store_blocks(self, stored: BlockStored) -> None:
        start = self._parent_hash(stored)
        if start is None or stored.block_size != self._page_size or stored.group_idx not in (None, 0):
            return
        hashes: list[bytes] = []
        extend_page_hashes(hashes, stored.token_ids, len(stored.block_hashes), stored.block_size, start)
        for i, (block_hash, page_hash, keys) in enumerate(
            zip(stored.block_hashes, hashes, stored.extra_keys_by_page, strict=True)
        ):
            if keys and (i or stored.parent_block_hash is not None):
                return
            self._page_hashes[block_hash] = page_hash
            self._prefix_index.on_page_stored(page_hash)

    def _parent_hash(self, stored: BlockStored) -> bytes | None:
        """Return the router's hash of the page before an event's first page, or the root hash if the prompt
        begins there. Returns None if it is not known."""
        if stored.parent_block_hash is not None:
            return self._page_hashes.get(stored.parent_block_hash)
        salt = parse_event_salt(stored.extra_keys_by_page[0] if stored.extra_keys_by_page else None)
        return None if salt is None else TOKENS_ROOT + salt


def parse_event_salt(keys: tuple[Any, ...] | None) -> bytes | None:
    """Return the cache salt in the keys of a prompt's first page; b"" without keys, None for other keys."""
    match keys:
        case None | ():
            return b""
        case (str(digits),) if SALT_PATTERN.fullmatch(digits):
            return bytes.fromhex(digits)
    return None


class Listener:
    """Receives the events of all replicas in a thread of its own. The thread calls `on_events` with the index
    of the replica, the number of the batch, and the batch."""

    def __init__(self, endpoints: Sequence[str], on_events: Callable[[int, int, KVEventBatch], None]):
        self._zmq, self._on_events, self._is_over = import_zmq("kv_events"), on_events, False
        self._context = self._zmq.Context()
        self._thread = threading.Thread(
            target=self._listen, args=(endpoints,), name="duetto-kv-events-listener", daemon=True
        )
        self._thread.start()

    def _listen(self, endpoints: Sequence[str]) -> None:
        poller, sockets, read = self._zmq.Poller(), {}, msgspec.msgpack.Decoder(KVEventBatch).decode
        for i, endpoint in enumerate(endpoints):
            socket = self._context.socket(self._zmq.SUB)
            socket.setsockopt(self._zmq.LINGER, 0)
            socket.connect(endpoint)
            socket.subscribe(b"")
            poller.register(socket, self._zmq.POLLIN)
            sockets[socket] = i
        while not self._is_over:
            for socket, _ in poller.poll(POLL_MILLISECONDS):
                _, number, payload = socket.recv_multipart()
                try:
                    self._on_events(sockets[socket], int.from_bytes(number), read(payload))
                except msgspec.DecodeError as error:
                    print_stderr(f"duetto: events from {endpoints[sockets[socket]]} cannot be read: {error}")
        for socket in sockets:
            socket.close()

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        self._context.term()
