"""TCP server of a prefill engine (disaggregated prefill): decode engines have prompts computed and fetch
pages."""

import queue
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from ...host.sockets.handshake import Handshake, HandshakeRejected, receive_handshake
from ...host.sockets.listener import AuthenticatedListener
from ...host.sockets.message_link import Link
from ...host.sockets.secret import Secret, read_key
from ...host.streams import warn_once
from ..offload.tier import PageKey
from .messages import (
    PREFILL_DECODER,
    PREFILL_MESSAGE_SECONDS,
    PREFILL_PROTOCOL,
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
from .service import PrefillService
from .transport import PageTransport, PageWriter

MAX_PREFILL_MESSAGE_BYTES = 1 << 26  # bytes of a message, at most
MISMATCH_REASON = "its model, weights, layout, canonical shapes, versions, machine or options are others"


class PrefillServer:
    """Listens at an address, and passes the requests of engines that know the secret to a PrefillService.

    Each connection has a receiver and a sender thread: a client that stops reading is disconnected after a
    timeout, and blocks no other client. Each client chooses one of the transports for its pages.

    Raises the errors of `AuthenticatedListener`, and ValueError for a file that has no key.
    """

    def __init__(
        self, address: tuple[str, int], transports: Mapping[str, PageTransport], key_file: str | None = None
    ):
        self._port: AuthenticatedListener[tuple[Link[PrefillMessage], PrefillService]] = (
            AuthenticatedListener(address, Secret("pages", read_key(key_file)), "duetto-prefill-server")
        )
        self.address = self._port.address
        self._transports = transports
        self._service: PrefillService | None = None
        self._facts: dict[str, str] | None = None
        self._max_page_bytes = 0  # bytes of a page
        self._links: set[Link[PrefillMessage]] = set()
        self._lock = threading.Lock()

    def set_realm(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """Offer pages of this realm from now on, none if it is None. Clients are disconnected, and connect
        again."""
        with self._lock:
            self._facts = None if realm is None else handshake_facts(realm, page_bytes)
            self._max_page_bytes = max(page_bytes, default=0)
            links, self._links = self._links, set()
        for link in links:
            link.close()

    def serve(self, service: PrefillService) -> None:
        """Accept connections from now on, and pass their requests to a service."""
        self._service = service
        self._port.start(self._accept_client, self._serve_connection)

    def close(self) -> None:
        self._port.close()
        self.set_realm(None, ())

    # ------------------------------------------------------------ threads

    def _accept_client(self, connection: socket.socket) -> tuple[Link[PrefillMessage], PrefillService] | None:
        """Return a client's link and the service; None if the client is rejected because its facts differ."""
        link, handshake = receive_handshake(connection, PREFILL_MESSAGE_SECONDS, PREFILL_DECODER)
        with self._lock:
            refusal = self._refusal(handshake)
            if not refusal:
                self._links.add(link)
        if refusal:
            link.send(HandshakeRejected(refusal))
        return None if refusal or self._service is None else (link, self._service)

    def _refusal(self, handshake: Handshake) -> str:
        """Return the reason to reject a client; empty if its facts are this engine's."""
        protocol = handshake.facts.get("protocol", "1")
        if protocol != PREFILL_PROTOCOL:
            spoken = f"it speaks protocol {protocol} of pages"
            return f"{spoken}, the prefill engine {PREFILL_PROTOCOL}: use one version"
        return MISMATCH_REASON if self._facts is None or handshake.differing_facts(self._facts) else ""

    def _serve_connection(self, connection: tuple[Link[PrefillMessage], PrefillService]) -> None:
        """Serve one connection until it closes."""
        link, service = connection
        try:
            self._serve_with_writers(link, service)
        except (OSError, EOFError, ValueError):
            pass
        finally:
            with self._lock:
                self._links.discard(link)
            link.close()

    def _serve_with_writers(self, link: Link[PrefillMessage], service: PrefillService) -> None:
        """Make a writer of each transport, and serve a client with them."""
        writers, max_page_bytes = dict[str, PageWriter](), self._max_page_bytes
        with ExitStack() as stack:
            for name, transport in self._transports.items():
                try:
                    writers[name] = transport.open_writer(max_page_bytes)
                except OSError:  # this machine has no such memory
                    continue
                except Exception as error:  # noqa: BLE001 - packages have errors of their own
                    warn_once(f"pages are not offered through {name}: {type(error).__name__}: {error}")
                else:
                    stack.callback(writers[name].close)
            PrefillConnection(link, service, writers, max_page_bytes).run()


class PrefillConnection:
    """Connection of a decode engine, whose requests are served one after the other. The caller closes the
    writers.

    writers: by the names of their transports.
    max_page_bytes: bytes of a page, at most.
    """

    def __init__(
        self,
        link: Link[PrefillMessage],
        service: PrefillService,
        writers: Mapping[str, PageWriter],
        max_page_bytes: int,
    ):
        self.link, self.service, self.writers, self.max_page_bytes = link, service, writers, max_page_bytes
        self._service_numbers: dict[int, int] = {}  # of the service, by the client's
        self._lock = threading.RLock()  # the service may answer within `begin_prefill`
        self._answers: queue.SimpleQueue[tuple[PrefillMessage, PageWriter | None] | None] = (
            queue.SimpleQueue()
        )

    def run(self) -> None:
        """Handle messages until the connection ends. Raises the link's errors."""
        threading.Thread(target=self._send_answers, name="duetto-prefill-server-sender", daemon=True).start()
        try:
            offers = {name: writer.offer for name, writer in self.writers.items()}
            self.link.send(HandshakeAccepted(self.service.room_bytes, offers))
            while True:
                self._handle_message(self.link.receive(MAX_PREFILL_MESSAGE_BYTES, may_idle=True))
        finally:
            for number in list(self._service_numbers.values()):
                self.service.cancel_prefill(number)
            self._answers.put(None)

    def _handle_message(self, message: PrefillMessage) -> None:
        match message:
            case PrefillRequest(number=number, prompt=prompt, salt=salt):
                with self._lock:  # it may be ready before its number is known
                    self._service_numbers[number] = self.service.begin_prefill(
                        prompt, partial(self._on_ready, number), salt
                    )
            case CancelPrefill(number=number):
                with self._lock:
                    service_number = self._service_numbers.pop(number, None)
                if service_number is not None:
                    self.service.cancel_prefill(service_number)
            case GetPage(number=number, key=key, transport=name):
                self._answers.put(self._write_page(number, key, self.writers.get(name)))
            case _:
                raise ValueError(f"{type(message).__name__} is no question")

    def _on_ready(self, number: int, keys: Sequence[PageKey]) -> None:
        """Queue the answer to a prompt, by the client's number."""
        self._answers.put((PrefillDone(number, tuple(keys)), None))
        with self._lock:
            self._service_numbers.pop(number, None)

    def _write_page(
        self, number: int, key: PageKey, writer: PageWriter | None
    ) -> tuple[PageData, PageWriter | None]:
        """Fetch and write a page; returns the answer, and the writer if there is a page."""
        content = self.service.fetch(key)
        if content is None or writer is None or len(content) > self.max_page_bytes:
            return PageData(number), None
        return PageData(number, len(content), page_checksum(key, content), writer.write(content)), writer

    def _send_answers(self) -> None:
        """Send queued answers until None is queued, and wait until each page is read."""
        while (answer := self._answers.get()) is not None:
            message, writer = answer
            try:
                self.link.send(message)
                if writer is not None:
                    writer.wait_until_read(PREFILL_MESSAGE_SECONDS)
            except OSError:
                self.link.close()
                return
