"""TCP server of a prefill engine (disaggregated prefill): decode engines have prompts computed and fetch
pages."""

import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from ...host.sockets.handshake import Handshake, HandshakeRejected, greet
from ...host.sockets.link import Link
from ...host.sockets.port import Port
from ...host.sockets.secret import Secret, key_in
from ...host.streams import warn
from ..offload.tier import Key
from .messages import (
    DECODER,
    PROTOCOL,
    SECONDS,
    CancelPrefill,
    GetPage,
    HandshakeAccepted,
    Message,
    PageData,
    PrefillDone,
    PrefillRequest,
    facts_of,
    sum_of,
)
from .service import PrefillService
from .transport import PageTransport, PageWriter

LONGEST = 1 << 26  # bytes of a message
OTHERS = "its model, weights, layout, canonical shapes, versions, machine or options are others"


class PrefillServer:
    """Listens at an address, and passes the requests of engines that know the secret to a PrefillService.
    Each connection has a receiver and a sender thread, so a client that stops reading is disconnected after a
    timeout and blocks no other. Each client chooses one of the transports for its pages.

    Raises what `Port` does, and ValueError for a file that has no key.
    """

    def __init__(
        self, address: tuple[str, int], transports: Mapping[str, PageTransport], key_file: str | None = None
    ):
        self._port: Port[tuple[Link[Message], PrefillService]] = Port(
            address, Secret("pages", key_in(key_file)), "duetto-prefill-server"
        )
        self.address = self._port.address
        self._transports = transports
        self._source: PrefillService | None = None
        self._facts: dict[str, str] | None = None
        self._most = 0  # bytes of a page
        self._links: set[Link[Message]] = set()
        self._lock = threading.Lock()

    def renew(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """Hand over pages of this realm from now on, or none; clients are disconnected and connect again."""
        with self._lock:
            self._facts = None if realm is None else facts_of(realm, page_bytes)
            self._most = max(page_bytes, default=0)
            links, self._links = self._links, set()
        for link in links:
            link.close()

    def serve(self, source: PrefillService) -> None:
        self._source = source
        self._port.begin(self._greet, self._host)

    def close(self) -> None:
        self._port.close()
        self.renew(None, ())

    # ------------------------------------------------------------ threads

    def _greet(self, connection: socket.socket) -> tuple[Link[Message], PrefillService] | None:
        """Return a client's link and the service, where the service has the pages that the client wants."""
        link, hello = greet(connection, SECONDS, DECODER)
        with self._lock:
            why = self._refusal(hello)
            if not why:
                self._links.add(link)
        if why:
            link.send(HandshakeRejected(why))
        return None if why or self._source is None else (link, self._source)

    def _refusal(self, hello: Handshake) -> str:
        """Return the reason to reject a client; empty where it wants the pages that are here."""
        theirs = hello.facts.get("protocol", "1")
        if theirs != PROTOCOL:
            return f"it speaks protocol {theirs} of pages, the prefill engine {PROTOCOL}: use one version"
        return OTHERS if self._facts is None or hello.differing(self._facts) else ""

    def _host(self, visitor: tuple[Link[Message], PrefillService]) -> None:
        """Serve one connection until it closes."""
        link, source = visitor
        try:
            self._visit(link, source)
        except (OSError, EOFError, ValueError):
            pass
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _visit(self, link: Link[Message], source: PrefillService) -> None:
        writers, most = dict[str, PageWriter](), self._most
        with ExitStack() as made:
            for name, transport in self._transports.items():
                try:
                    writers[name] = transport.writer(most)
                except OSError:  # this machine has none
                    continue
                except Exception as error:  # noqa: BLE001 - packages have errors of their own
                    warn(f"pages are not offered through {name}: {type(error).__name__}: {error}")
                else:
                    made.callback(writers[name].close)
            PrefillConnection(link, source, writers, most).run()


class PrefillConnection:
    """Serves a decode engine's requests, one after the other; pages have at most `most` bytes. The caller
    closes the writers."""

    def __init__(
        self, link: Link[Message], source: PrefillService, writers: Mapping[str, PageWriter], most: int
    ):
        self.link, self.source, self.writers, self.most = link, source, writers, most
        self._numbers: dict[int, int] = {}  # of the service, by the client's
        self._lock = threading.RLock()  # the service may answer within `begin`
        self._answers: queue.SimpleQueue[tuple[Message, PageWriter | None] | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Handle messages until the connection ends. Raises what the link does."""
        threading.Thread(target=self._answer, name="duetto-prefill-server", daemon=True).start()
        try:
            offers = {name: writer.offer for name, writer in self.writers.items()}
            self.link.send(HandshakeAccepted(self.source.room, offers))
            while True:
                self._take(self.link.receive(LONGEST, idle=True))
        finally:
            for number in list(self._numbers.values()):
                self.source.leave(number)
            self._answers.put(None)

    def _take(self, message: Message) -> None:
        match message:
            case PrefillRequest(number=number, prompt=prompt):
                with self._lock:  # it may be ready before its number is known
                    self._numbers[number] = self.source.begin(prompt, partial(self._ready, number))
            case CancelPrefill(number=number):
                with self._lock:
                    own = self._numbers.pop(number, None)
                if own is not None:
                    self.source.leave(own)
            case GetPage(number=number, key=key, transport=name):
                self._answers.put(self._page(number, key, self.writers.get(name)))
            case _:
                raise ValueError(f"{type(message).__name__} is no question")

    def _ready(self, number: int, keys: Sequence[Key]) -> None:
        self._answers.put((PrefillDone(number, tuple(keys)), None))
        with self._lock:
            self._numbers.pop(number, None)

    def _page(self, number: int, key: Key, writer: PageWriter | None) -> tuple[PageData, PageWriter | None]:
        content = self.source.fetch(key)
        if content is None or writer is None or len(content) > self.most:
            return PageData(number), None
        return PageData(number, len(content), sum_of(key, content), writer.write(content)), writer

    def _answer(self) -> None:
        while (answer := self._answers.get()) is not None:
            message, writer = answer
            try:
                self.link.send(message)
                if writer is not None:
                    writer.settle(SECONDS)
            except OSError:
                self.link.close()
                return
