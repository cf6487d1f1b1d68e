"""TCP server for processes that know a secret."""

import errno
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import Generic, TypeVar

from ..streams import warn
from .secret import Refusal, Secret

PAUSE = 0.1  # seconds after a connection that could not be accepted
STRANGERS = 64  # connections at once that have not been greeted yet

G = TypeVar("G")


class Port(Generic[G]):
    """Accepts connections until it is closed, and serves each in a thread. After the proof of the key `greet`
    reads the first message; where it returns a guest, `host` serves that one and closes the connection.

    At most STRANGERS connections have not been greeted: a new one closes the oldest. Links bound their time.
    Raises OSError for an address that cannot be bound, and ValueError for an address that other machines
    reach where the secret has no key.
    """

    def __init__(self, address: tuple[str, int], secret: Secret, name: str):
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._own = socket.create_server(address, family=family)
        self.address: tuple[str, int] = self._own.getsockname()[:2]
        self._secret, self._name = secret, name
        self._strangers: OrderedDict[socket.socket, None] = OrderedDict()
        self._lock, self._closing = threading.Lock(), threading.Event()
        if not secret.key and not ip_address(self.address[0].partition("%")[0]).is_loopback:
            self._own.close()
            raise ValueError(f"{self} is not allowed without cluster_key_file: other machines reach it")

    def __str__(self) -> str:
        return f"address {self.address[0]} port {self.address[1]}"

    def begin(self, greet: Callable[[socket.socket], G | None], host: Callable[[G], None]) -> None:
        self._start(self._accept, greet, host)

    def close(self) -> None:
        """Accept no more connections, and close those that have not been greeted."""
        self._closing.set()
        end(self._own)
        self._own.close()
        with self._lock:
            for connection in self._strangers:
                end(connection)

    # ------------------------------------------------------------ threads

    def _start(self, work: Callable[..., None], *given: object) -> None:
        threading.Thread(target=work, args=given, name=self._name, daemon=True).start()

    def _accept(self, greet: Callable[[socket.socket], G | None], host: Callable[[G], None]) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._own.accept()
            except OSError as error:
                if not self._closing.is_set() and error.errno != errno.ECONNABORTED:
                    warn(f"{self}: connections cannot be accepted for now: {error.strerror or error}")
                    self._end_oldest(0)
                    self._closing.wait(PAUSE)
                continue
            self._enter(connection)
            try:
                self._start(self._serve, connection, greet, host)
            except RuntimeError as error:  # the system has no thread left
                warn(f"{self}: connections cannot be served for now: {error}")
                self._leave(connection)
                connection.close()

    def _enter(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers[connection] = None
        if self._end_oldest(STRANGERS):
            warn(f"{self}: more than {STRANGERS} connections at once before their greeting; the oldest ends")

    def _end_oldest(self, most: int) -> bool:
        """Shut down the oldest connection that has not been greeted, where there are more than `most`; its
        thread closes it. Returns whether there was one."""
        with self._lock:
            if found := len(self._strangers) > most:
                end(self._strangers.popitem(last=False)[0])
        return found

    def _leave(self, connection: socket.socket) -> None:
        with self._lock:
            self._strangers.pop(connection, None)

    def _serve(
        self,
        connection: socket.socket,
        greet: Callable[[socket.socket], G | None],
        host: Callable[[G], None],
    ) -> None:
        guest = None
        try:
            self._secret.check(connection)
            guest = greet(connection)
        except Refusal as refusal:
            warn(f"{self}: a connection is refused: {refusal}")
        except (OSError, EOFError, ValueError, RecursionError):  # a scanner, or a client of another protocol
            pass
        finally:
            self._leave(connection)
            if guest is None:
                end(connection)
                connection.close()
        if guest is not None:
            host(guest)


def end(connection: socket.socket) -> None:
    """Wake the thread that waits for this connection."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
