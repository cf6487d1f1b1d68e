"""Where a prefill engine is reached: other processes have prompts computed and fetch pages."""

import queue
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from msgspec.structs import replace

from ...host.sockets.link import Link
from ...host.sockets.port import Port
from ..offload.tier import Key
from .messages import (
    SECONDS,
    CancelPrefill,
    GetPage,
    Handshake,
    HandshakeAccepted,
    HandshakeRejected,
    Message,
    PageData,
    Place,
    PrefillDone,
    PrefillRequest,
    link_over,
    secret_of,
    sum_of,
)
from .nixl import NixlAgent, NixlWriter
from .service import PrefillService
from .shared_memory import SharedMemoryWriter

HELLO = 1 << 16  # bytes of a first message, at most
LONGEST = 1 << 26  # and of another
Ends = dict[Place, SharedMemoryWriter | NixlWriter]
OTHERS = "its model, weights, layout, canonical shapes, versions, machine or options are others"


class PrefillServer:
    """Listens at an address, and passes to a source the requests of engines that know the secret. Each engine
    has two threads, one that receives and one that answers: one that reads nothing for a while is lost, and
    delays no other. With an agent pages can be read through NIXL too.

    Raises what `Port` does, and ValueError for a file that has no key.
    """

    def __init__(self, address: tuple[str, int], agent: NixlAgent | None = None, key_file: str | None = None):
        self._port: Port[tuple[Link[Message], PrefillService]] = Port(
            address, secret_of(key_file), "duetto-prefill-server"
        )
        self.address = self._port.address
        self._agent = agent
        self._source: PrefillService | None = None
        self._hello: Handshake | None = None
        self._links: set[Link[Message]] = set()
        self._lock = threading.Lock()

    def renew(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """Pages of this realm are handed over from now on; who is here has to come again."""
        with self._lock:
            self._hello = None if realm is None else Handshake(realm, tuple(page_bytes))
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
        """A visitor's link and the source, where the source has the pages that the visitor wants."""
        link = link_over(connection)
        hello = link.receive(HELLO)
        with self._lock:
            fits = self._hello is not None and hello == self._hello
            if fits:
                self._links.add(link)
        if not fits:
            link.send(HandshakeRejected(OTHERS))
        return (link, self._source) if fits and self._source is not None else None

    def _host(self, visitor: tuple[Link[Message], PrefillService]) -> None:
        """Serve a visitor until it leaves."""
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
        most = max(self._hello.page_bytes, default=0) if self._hello else 0
        ends, welcome = Ends(), HandshakeAccepted(source.room)
        with suppress(OSError):
            ends["shared"] = shared = SharedMemoryWriter(most)
            welcome = replace(welcome, memory=shared.path, proof=shared.proof)
        if self._agent is not None:
            ends["registered"] = registered = NixlWriter(self._agent, most)
            welcome = replace(welcome, region=registered.region)
        PrefillConnection(link, source, ends, most).run(welcome)


class PrefillConnection:
    """What one who has come asks for, one after the other."""

    def __init__(self, link: Link[Message], source: PrefillService, ends: Ends, most: int):
        self.link, self.source, self.ends, self.most = link, source, ends, most
        self._numbers: dict[int, int] = {}  # of the source, by the asker's
        self._lock = threading.RLock()  # a source may answer at once
        self._answers: queue.SimpleQueue[tuple[Message, Place] | None] = queue.SimpleQueue()

    def run(self, welcome: HandshakeAccepted) -> None:
        """Raises what the link does."""
        threading.Thread(target=self._answer, name="duetto-prefill-server", daemon=True).start()
        try:
            self.link.send(welcome)
            while True:
                self._take(self.link.receive(LONGEST, idle=True))
        finally:
            for number in list(self._numbers.values()):
                self.source.leave(number)
            self._answers.put(None)
            for end in self.ends.values():
                end.close()

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
            case GetPage(number=number, key=key, place=place):
                self._answers.put(self._page(number, key, place))
            case _:
                raise ValueError(f"{type(message).__name__} is no question")

    def _ready(self, number: int, keys: Sequence[Key]) -> None:
        self._answers.put((PrefillDone(number, tuple(keys)), "answer"))
        with self._lock:
            self._numbers.pop(number, None)

    def _page(self, number: int, key: Key, place: Place) -> tuple[PageData, Place]:
        content = self.source.fetch(key)
        if content is None:
            return PageData(number), "answer"
        page, end = PageData(number, len(content), sum_of(key, content)), self.ends.get(place)
        if end is None or page.size > self.most:
            return replace(page, content=content), "answer"
        end.write(content)
        return page, place

    def _answer(self) -> None:
        while (answer := self._answers.get()) is not None:
            message, place = answer
            try:
                self.link.send(message)
                if (end := self.ends.get(place)) is not None:
                    end.settle(SECONDS)
            except OSError:
                self.link.close()
                return
