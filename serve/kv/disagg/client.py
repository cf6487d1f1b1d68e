"""Client of a prefill engine in another process (disaggregated prefill)."""

import itertools
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ...host.sockets.handshake import Handshake, connect_to_listener
from ...host.sockets.message_link import Link
from ...host.sockets.secret import HandshakeError, Secret, read_key
from ...host.streams import warn_once
from ..offload.tier import PageContent, PageKey
from .messages import (
    PREFILL_DECODER,
    PREFILL_MESSAGE_SECONDS,
    CancelPrefill,
    GetPage,
    HandshakeAccepted,
    PageData,
    PrefillDone,
    PrefillMessage,
    PrefillRequest,
    handshake_facts,
    page_checksum,
)
from .service import OnReady
from .transport import FALLBACK_TRANSPORTS, PageReader, PageTransport

CONNECT_RETRY_SECONDS = 0.2  # seconds until the next attempt to connect
REFUSED_RETRY_SECONDS = 5.0  # seconds until the next attempt after a rejection


class RemotePrefillClient:
    """PrefillService in another process, at an address.

    After a failure it reconnects, and reports outstanding prefills as failed. One thread receives and one
    sends, so `begin_prefill` does not block. Pages come by the first transport that reaches the other engine.
    A transport whose read times out is not used again.

    room_bytes: bytes of pages that the prefill engine keeps until they are fetched.
    damaged: number of pages whose checksum or size was wrong.
    """

    room_bytes = 0

    def __init__(
        self,
        address: tuple[str, int],
        transports: Mapping[str, PageTransport],
        timeout_seconds: float = PREFILL_MESSAGE_SECONDS,
        key_file: str | None = None,
    ):
        self.address, self.timeout_seconds, self.damaged = address, timeout_seconds, 0
        self._transports, self._secret = dict(transports), Secret("pages", read_key(key_file))
        self._facts: dict[str, str] | None = None
        self._max_page_bytes = 0  # bytes of a page
        self._link: Link[PrefillMessage] | None = None
        self._reader: tuple[str, PageReader] | None = None  # and its transport's name
        self._numbers = itertools.count()
        self._prefill_callbacks: dict[int, OnReady] = {}
        self._page_answers: dict[int, queue.SimpleQueue[PageData | None]] = {}
        self._outbox: queue.SimpleQueue[PrefillMessage | None] = queue.SimpleQueue()
        self._lock, self._realm_changed, self._closed = threading.Lock(), threading.Event(), False
        for name, loop in (("receiver", self._receive_loop), ("sender", self._send_loop)):
            threading.Thread(target=loop, name=f"duetto-prefill-client-{name}", daemon=True).start()

    @property
    def _address_text(self) -> str:
        return f"{self.address[0]}:{self.address[1]}"

    @property
    def is_connected(self) -> bool:
        return self._link is not None

    @property
    def transport(self) -> str | None:
        """Name of the transport that pages come by; None while there is no connection."""
        return self._reader[0] if self._reader else None

    def begin_prefill(self, prompt: Sequence[int], on_ready: OnReady, salt: bytes = b"") -> int:
        number = next(self._numbers)
        with self._lock:
            if is_connected := self._link is not None:
                self._prefill_callbacks[number] = on_ready
                self._outbox.put(PrefillRequest(number, tuple(prompt), salt))
        if not is_connected:
            on_ready([])
        return number

    def cancel_prefill(self, number: int) -> None:
        with self._lock:
            if self._prefill_callbacks.pop(number, None) is not None:
                self._outbox.put(CancelPrefill(number))

    def fetch(self, key: PageKey) -> PageContent | None:
        """Return a page if it arrives undamaged within `timeout_seconds`, else None. A late page closes the
        connection, which is then made again."""
        number, answer = next(self._numbers), queue.SimpleQueue[PageData | None]()
        deadline = time.monotonic() + self.timeout_seconds
        with self._lock:
            if self._link is None or self._reader is None:
                return None
            link, (name, reader) = self._link, self._reader
            self._page_answers[number] = answer
            self._outbox.put(GetPage(number, key, name))
        try:
            page = answer.get(timeout=self.timeout_seconds)
        except queue.Empty:
            link.close()
            return None
        finally:
            self._page_answers.pop(number, None)
        if page is None or page.size < 0:
            return None
        try:
            content = reader.read(page.size, page.carried, deadline)
        except TimeoutError:  # messages get through, and this transport does not
            self._transports.pop(name, None)
            warn_once(
                f"nothing was read of {self._address_text} through {name} in {self.timeout_seconds:g} s"
            )
        except ValueError:  # closed meanwhile, or lost
            pass
        else:
            return self._verify_page(key, page, content)
        link.close()
        return None

    def _verify_page(self, key: PageKey, page: PageData, content: PageContent) -> PageContent | None:
        """Return the content if its size and checksum are right; count it as damaged otherwise."""
        if len(content) == page.size and page_checksum(key, content) == page.sum:
            return content
        self.damaged += 1
        return None

    def expect_realm(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        with self._lock:
            self._facts = None if realm is None else handshake_facts(realm, page_bytes)
            self._max_page_bytes = max(page_bytes, default=0)
        self._drop_connection()
        self._realm_changed.set()

    def close(self) -> None:
        self._closed = True
        self.expect_realm(None, ())
        self._outbox.put(None)

    # ------------------------------------------------------------ threads

    def _send_loop(self) -> None:
        """Send queued messages until None is queued. Close a connection that accepts no bytes for
        `timeout_seconds`."""
        while (message := self._outbox.get()) is not None:
            link = self._link
            if link is not None:
                try:
                    link.send(message)
                except (OSError, ValueError):
                    link.close()

    def _receive_loop(self) -> None:
        """Connect and handle messages, again and again until `close`."""
        while not self._closed:
            retry_seconds = CONNECT_RETRY_SECONDS
            try:
                if (link := self._connect()) is not None:
                    self._receive_messages(link)
            except HandshakeError as why:
                warn_once(f"{self._address_text} computes no prompts for this engine: {why}")
                retry_seconds = REFUSED_RETRY_SECONDS
            except EOFError:
                pass
            except (OSError, ValueError) as error:
                warn_once(
                    f"{self._address_text} is not reached, prompts are computed here until it is: {error}"
                )
            self._drop_connection()
            self._realm_changed.wait(retry_seconds if self._facts is not None else None)
            self._realm_changed.clear()

    def _receive_messages(self, link: Link[PrefillMessage]) -> None:
        """Handle messages until the connection ends."""
        with suppress(OSError, EOFError, ValueError):
            while True:
                self._handle_message(link.receive(may_idle=True))

    def _connect(self) -> Link[PrefillMessage] | None:
        """Connect to the prefill engine. Returns None while no realm is set. Raises HandshakeError if the
        other engine's pages differ."""
        with self._lock:
            facts, max_page_bytes = self._facts, self._max_page_bytes
        if facts is None:
            return None
        link, accepted = connect_to_listener(
            self.address,
            self._secret,
            Handshake(facts),
            HandshakeAccepted,
            PREFILL_DECODER,
            self.timeout_seconds,
        )
        try:
            self._use_connection_if_current(
                facts, link, accepted.room, self._open_reader(accepted.offers, max_page_bytes)
            )
        except BaseException:
            link.close()
            raise
        return link

    def _open_reader(self, offers: Mapping[str, bytes], max_page_bytes: int) -> tuple[str, PageReader]:
        """Open the first transport that reaches the other engine; returns its name and its reader. Raises
        HandshakeError if none does."""
        for name, transport in self._transports.items():
            try:
                if name in offers:
                    return name, transport.open_reader(offers[name], max_page_bytes)
                why = "it has none"
            except Exception as error:  # noqa: BLE001 - errors of packages have no common base class
                why = type(error).__name__
            if name not in FALLBACK_TRANSPORTS:
                warn_once(f"pages of {self._address_text} do not come through {name}: {why}")
        raise HandshakeError(f"it offers pages through no transport of {', '.join(self._transports)}")

    def _use_connection_if_current(
        self,
        facts: dict[str, str],
        link: Link[PrefillMessage],
        room_bytes: int,
        reader: tuple[str, PageReader],
    ) -> None:
        """Use a connection, unless the realm has changed meanwhile. Raises EOFError if it has."""
        with self._lock:
            if is_current := self._facts is facts:
                self._link, self._reader, self.room_bytes = link, reader, room_bytes
        if not is_current:
            reader[1].close()
            raise EOFError("other pages are wanted by now")

    def _handle_message(self, message: PrefillMessage) -> None:
        match message:
            case PrefillDone(number=number, keys=keys):
                with self._lock:
                    on_ready = self._prefill_callbacks.pop(number, None)
                if on_ready is not None:
                    on_ready(keys)
            case PageData(number=number):
                answer = self._page_answers.get(number)
                if answer is not None:
                    answer.put(message)
            case _:
                raise ValueError(f"{type(message).__name__} is no answer")

    def _drop_connection(self) -> None:
        """Close the connection, and report all outstanding pages and prefills as failed."""
        with self._lock:
            link, reader, self._link, self._reader = self._link, self._reader, None, None
            callbacks, self._prefill_callbacks = self._prefill_callbacks, {}
            answers = list(self._page_answers.values())
        if link is not None:
            link.close()
        for answer in answers:
            answer.put(None)
        if reader is not None:
            reader[1].close()
        for on_ready in callbacks.values():
            with suppress(Exception):
                on_ready([])
