"""Client of a prefill engine in another process (disaggregated prefill)."""

import itertools
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ...host.sockets.handshake import Handshake, meet
from ...host.sockets.link import Link
from ...host.sockets.secret import Refusal, Secret, key_in
from ...host.streams import warn
from ..offload.tier import Content, Key
from .messages import (
    DECODER,
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
from .service import Ready
from .transport import ALWAYS, PageReader, PageTransport

PAUSE = 0.2  # seconds until the next attempt to connect
LONGER = 5.0  # the same after a rejection


class RemotePrefillClient:
    """PrefillService at an address. It reconnects after a failure; outstanding prefills are then reported as
    failed. One thread receives and one sends, so `begin` does not block. Pages come by the first of the
    transports that reaches the other engine; a transport whose read times out is not used again."""

    room = 0

    def __init__(
        self,
        address: tuple[str, int],
        transports: Mapping[str, PageTransport],
        seconds: float = SECONDS,
        key_file: str | None = None,
    ):
        self.address, self.seconds, self.damaged = address, seconds, 0
        self._transports, self._secret = dict(transports), Secret("pages", key_in(key_file))
        self._facts: dict[str, str] | None = None
        self._most = 0  # bytes of a page
        self._link: Link[Message] | None = None
        self._reader: tuple[str, PageReader] | None = None  # and its transport's name
        self._numbers = itertools.count()
        self._waiting: dict[int, Ready] = {}
        self._pages: dict[int, queue.SimpleQueue[PageData | None]] = {}
        self._words: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._lock, self._renewed, self._closed = threading.Lock(), threading.Event(), False
        for work in (self._hear, self._say):
            threading.Thread(target=work, name="duetto-prefill-client", daemon=True).start()

    @property
    def _place(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    @property
    def is_here(self) -> bool:
        return self._link is not None

    @property
    def transport(self) -> str | None:
        """Name of the transport of its pages; None while there is no connection."""
        return self._reader[0] if self._reader else None

    def begin(self, prompt: Sequence[int], ready: Ready) -> int:
        number = next(self._numbers)
        with self._lock:
            if here := self._link is not None:
                self._waiting[number] = ready
                self._words.put(PrefillRequest(number, tuple(prompt)))
        if not here:
            ready([])
        return number

    def leave(self, number: int) -> None:
        with self._lock:
            if self._waiting.pop(number, None) is not None:
                self._words.put(CancelPrefill(number))

    def fetch(self, key: Key) -> Content | None:
        """Return a page if it comes in time and undamaged. After a page that is late the connection is closed
        and made again."""
        number, answer = next(self._numbers), queue.SimpleQueue[PageData | None]()
        until = time.monotonic() + self.seconds
        with self._lock:
            if self._link is None or self._reader is None:
                return None
            link, (name, reader) = self._link, self._reader
            self._pages[number] = answer
            self._words.put(GetPage(number, key, name))
        try:
            page = answer.get(timeout=self.seconds)
        except queue.Empty:
            link.close()
            return None
        finally:
            self._pages.pop(number, None)
        if page is None or page.size < 0:
            return None
        try:
            content = reader.read(page.size, page.carried, until)
        except TimeoutError:  # messages get through, and this transport does not
            self._transports.pop(name, None)
            warn(f"nothing was read of {self._place} through {name} in {self.seconds:g} s")
        except ValueError:  # closed meanwhile, or lost
            pass
        else:
            return self._checked(key, page, content)
        link.close()
        return None

    def _checked(self, key: Key, page: PageData, content: Content) -> Content | None:
        if len(content) == page.size and sum_of(key, content) == page.sum:
            return content
        self.damaged += 1
        return None

    def renew(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        with self._lock:
            self._facts = None if realm is None else facts_of(realm, page_bytes)
            self._most = max(page_bytes, default=0)
        self._lose()
        self._renewed.set()

    def close(self) -> None:
        self._closed = True
        self.renew(None, ())
        self._words.put(None)

    # ------------------------------------------------------------ threads

    def _say(self) -> None:
        """Send what is queued. A connection that takes nothing for `seconds` is closed."""
        while (word := self._words.get()) is not None:
            link = self._link
            if link is not None:
                try:
                    link.send(word)
                except (OSError, ValueError):
                    link.close()

    def _hear(self) -> None:
        while not self._closed:
            pause = PAUSE
            try:
                if (link := self._met()) is not None:
                    self._follow(link)
            except Refusal as why:
                warn(f"{self._place} computes no prompts for this engine: {why}")
                pause = LONGER
            except EOFError:
                pass
            except (OSError, ValueError) as error:
                warn(f"{self._place} is not reached, prompts are computed here until it is: {error}")
            self._lose()
            self._renewed.wait(pause if self._facts is not None else None)
            self._renewed.clear()

    def _follow(self, link: Link[Message]) -> None:
        """Handle messages until the connection ends."""
        with suppress(OSError, EOFError, ValueError):
            while True:
                self._take(link.receive(idle=True))

    def _met(self) -> Link[Message] | None:
        """Connect; None while no pages are wanted. Raises Refusal where the other engine has other pages."""
        with self._lock:
            facts, most = self._facts, self._most
        if facts is None:
            return None
        link, welcome = meet(
            self.address, self._secret, Handshake(facts), HandshakeAccepted, DECODER, self.seconds
        )
        try:
            self._enter(facts, link, welcome.room, self._reader_of(welcome.offers, most))
        except BaseException:
            link.close()
            raise
        return link

    def _reader_of(self, offers: Mapping[str, bytes], most: int) -> tuple[str, PageReader]:
        """Open the first transport that reaches the other engine. Raises Refusal where none does."""
        for name, transport in self._transports.items():
            try:
                if name in offers:
                    return name, transport.reader(offers[name], most)
                why = "it has none"
            except Exception as error:  # noqa: BLE001 - those of a transport's package have no name in common
                why = type(error).__name__
            if name not in ALWAYS:
                warn(f"pages of {self._place} do not come through {name}: {why}")
        raise Refusal(f"it offers pages through no transport of {', '.join(self._transports)}")

    def _enter(
        self, facts: dict[str, str], link: Link[Message], room: int, reader: tuple[str, PageReader]
    ) -> None:
        with self._lock:
            if fits := self._facts is facts:
                self._link, self._reader, self.room = link, reader, room
        if not fits:
            reader[1].close()
            raise EOFError("other pages are wanted by now")

    def _take(self, message: Message) -> None:
        match message:
            case PrefillDone(number=number, keys=keys):
                with self._lock:
                    ready = self._waiting.pop(number, None)
                if ready is not None:
                    ready(keys)
            case PageData(number=number):
                answer = self._pages.get(number)
                if answer is not None:
                    answer.put(message)
            case _:
                raise ValueError(f"{type(message).__name__} is no answer")

    def _lose(self) -> None:
        """Drop the connection: pages and prefills that are waited for have failed."""
        with self._lock:
            link, reader, self._link, self._reader = self._link, self._reader, None, None
            waiting, self._waiting = self._waiting, {}
            answers = list(self._pages.values())
        if link is not None:
            link.close()
        for answer in answers:
            answer.put(None)
        if reader is not None:
            reader[1].close()
        for ready in waiting.values():
            with suppress(Exception):
                ready([])
