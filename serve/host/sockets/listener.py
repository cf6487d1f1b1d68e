"""TCP server for processes that know a secret."""

import errno
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Generic, TypeVar

from ..streams import warn_once
from .secret import HandshakeError, Secret

ACCEPT_RETRY_SECONDS = 0.1  # seconds to wait after a connection that could not be accepted
MAX_PENDING_CONNECTIONS = 64  # connections at once that have not been greeted yet

G = TypeVar("G")


class AuthenticatedListener(Generic[G]):
    """Accepts connections until it is closed, and serves each in a thread.

    After the proof of the key `greet` reads the first message. If it returns a guest, `serve_peer` serves
    the guest and closes the connection. At most MAX_PENDING_CONNECTIONS connections have not been greeted: a
    new one closes the oldest. Links limit their time.

    Raises OSError for an address that cannot be bound. Raises ValueError for an address that other machines
    reach if the secret has no key.
    """

    def __init__(self, address: tuple[str, int], secret: Secret, name: str):
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._listener = socket.create_server(address, family=family)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        self._secret, self._name = secret, name
        self.pending_connections: OrderedDict[socket.socket, None] = OrderedDict()
        self._lock, self._closing = threading.Lock(), threading.Event()
        if not secret.key and not ip_address(self.address[0].partition("%")[0]).is_loopback:
            self._listener.close()
            raise ValueError(f"{self} is not allowed without cluster_key_file: other machines reach it")

    def __str__(self) -> str:
        return f"address {self.address[0]} port {self.address[1]}"

    def start(
        self, receive_handshake: Callable[[socket.socket], G | None], serve_peer: Callable[[G], None]
    ) -> None:
        """Accept connections in a thread from now on."""
        self._start_thread(self._accept_loop, receive_handshake, serve_peer)

    def close(self) -> None:
        """Accept no more connections, and end the connections that have not been greeted."""
        self._closing.set()
        shut_down(self._listener)
        self._listener.close()
        with self._lock:
            for connection in self.pending_connections:
                shut_down(connection)

    # ------------------------------------------------------------ threads

    def _start_thread(self, work: Callable[..., None], *args: object) -> None:
        threading.Thread(target=work, args=args, name=self._name, daemon=True).start()

    def _accept_loop(
        self, receive_handshake: Callable[[socket.socket], G | None], serve_peer: Callable[[G], None]
    ) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if not self._closing.is_set() and error.errno != errno.ECONNABORTED:
                    warn_once(f"{self}: connections cannot be accepted for now: {error.strerror or error}")
                    self._end_oldest(0)
                    self._closing.wait(ACCEPT_RETRY_SECONDS)
                continue
            self._add_pending(connection)
            try:
                self._start_thread(self._serve_connection, connection, receive_handshake, serve_peer)
            except RuntimeError as error:  # the system has no thread left
                warn_once(f"{self}: connections cannot be served for now: {error}")
                self._remove_pending(connection)
                connection.close()

    def _add_pending(self, connection: socket.socket) -> None:
        with self._lock:
            self.pending_connections[connection] = None
        if self._end_oldest(MAX_PENDING_CONNECTIONS):
            warn_once(
                f"{self}: more than {MAX_PENDING_CONNECTIONS} connections at once before their greeting; "
                "the oldest ends"
            )

    def _end_oldest(self, max_pending: int) -> bool:
        """Shut down the oldest connection that has not been greeted, if there are more than `max_pending`.

        Its thread closes it. Returns True if one was shut down.
        """
        with self._lock:
            if is_over := len(self.pending_connections) > max_pending:
                shut_down(self.pending_connections.popitem(last=False)[0])
        return is_over

    def _remove_pending(self, connection: socket.socket) -> None:
        with self._lock:
            self.pending_connections.pop(connection, None)

    def _serve_connection(
        self,
        connection: socket.socket,
        receive_handshake: Callable[[socket.socket], G | None],
        serve_peer: Callable[[G], None],
    ) -> None:
        peer = None
        try:
            self._secret.authenticate_caller(connection)
            peer = receive_handshake(connection)
        except HandshakeError as refusal:
            warn_once(f"{self}: a connection is refused: {refusal}")
        except (OSError, EOFError, ValueError, RecursionError):  # a scanner, or a client of another protocol
            pass
        finally:
            self._remove_pending(connection)
            if peer is None:
                shut_down(connection)
                connection.close()
        if peer is not None:
            serve_peer(peer)


def shut_down(connection: socket.socket) -> None:
    """Shut down a connection, which wakes the thread that waits for it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
