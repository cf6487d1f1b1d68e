"""KV cache events of replicas, received in a thread."""

import threading
from collections.abc import Callable, Sequence

import msgspec

from ....kvcache.page_hash import extend
from ...host.streams import tell
from ...kv.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch, zmq
from ...kv.routing.prefix_index import EventPrefixIndex
from .prompts import TOKENS

PERIOD = 200  # milliseconds between checks for the end


class ReplicaPages:
    """Translates the page names in one replica's events to the router's own, for its prefix index. Pages
    whose parent is unknown, since its event was lost, are left out, and so are pages with keys in addition to
    their tokens: no prompt finds them."""

    def __init__(self, memory: EventPrefixIndex, page_size: int):
        self._memory, self._page_size = memory, page_size
        self._names: dict[int | bytes, bytes] = {}  # the router's names, by the replica's
        self._next = 0  # number of the batch that is expected

    def take(self, number: int, events: KVEventBatch) -> None:
        """Apply a batch of events; a gap in the numbers clears the index."""
        if number != self._next:
            self._clear()
        self._next = number + 1
        for event in events.events:
            match event:
                case BlockStored():
                    self._stored(event)
                case BlockRemoved():
                    for own in event.block_hashes:
                        if (name := self._names.pop(own, None)) is not None:
                            self._memory.removed(name)
                case AllBlocksCleared():
                    self._clear()

    def _clear(self) -> None:
        self._names.clear()
        self._memory.forget()

    def _stored(self, event: BlockStored) -> None:
        parent = event.parent_block_hash
        start = TOKENS if parent is None else self._names.get(parent)
        if start is None or event.block_size != self._page_size or event.group_idx not in (None, 0):
            return
        names: list[bytes] = []
        extend(names, event.token_ids, len(event.block_hashes), event.block_size, start)
        for own, name, keys in zip(event.block_hashes, names, event.keys, strict=True):
            if keys:
                return
            self._names[own] = name
            self._memory.stored(name)


class Listener:
    """Receives the events of all replicas in a thread of its own, which calls `on_events` with the replica's
    index, the number of the batch, and the batch."""

    def __init__(self, places: Sequence[str], on_events: Callable[[int, int, KVEventBatch], None]):
        self._zmq, self._on_events, self._is_over = zmq("kv_events"), on_events, False
        self._context = self._zmq.Context()
        self._thread = threading.Thread(
            target=self._listen, args=(places,), name="duetto-events", daemon=True
        )
        self._thread.start()

    def _listen(self, places: Sequence[str]) -> None:
        poller, sockets, read = self._zmq.Poller(), {}, msgspec.msgpack.Decoder(KVEventBatch).decode
        for i, place in enumerate(places):
            socket = self._context.socket(self._zmq.SUB)
            socket.setsockopt(self._zmq.LINGER, 0)
            socket.connect(place)
            socket.subscribe(b"")
            poller.register(socket, self._zmq.POLLIN)
            sockets[socket] = i
        while not self._is_over:
            for socket, _ in poller.poll(PERIOD):
                _, number, payload = socket.recv_multipart()
                try:
                    self._on_events(sockets[socket], int.from_bytes(number), read(payload))
                except msgspec.DecodeError as error:
                    tell(f"duetto: events from {places[sockets[socket]]} cannot be read: {error}")
        for socket in sockets:
            socket.close()

    def close(self) -> None:
        self._is_over = True
        self._thread.join()
        self._context.term()
