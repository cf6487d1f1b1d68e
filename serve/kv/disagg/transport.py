"""Transports of pages from a prefill engine to a decode engine (KV transfer), by name.

Messages about pages always go over TCP (`messages.py`). A transport decides where the bytes of a page are.
"""

from pkgutil import resolve_name
from typing import Protocol

from ...options.checks import KV_TRANSPORTS
from ..offload.tier import Content

ALWAYS = ("shared_memory", "tcp")  # tried in this order where the transport that was asked for is not reached


class PageWriter(Protocol):
    """The prefill engine's end, for one decode engine. That one reads a page before it asks for the next.

    offer: what a reader needs to open the other end.
    """

    offer: bytes

    def write(self, content: Content) -> bytes:
        """Make a page readable. Returns what the message about it carries to the reader."""
        ...

    def settle(self, seconds: float) -> None:
        """Wait until the page is read. Runs once for each `write`, in the same order, in another thread: the
        next `write` may come before this has returned, or begun. Raises TimeoutError or another OSError if
        the page is not read: the connection is then closed, as for an OSError of `write`."""
        ...

    def close(self) -> None: ...


class PageReader(Protocol):
    """The decode engine's end."""

    def read(self, size: int, carried: bytes, until: float) -> Content:
        """Return the page that was written last, of exactly `size` bytes; `write` has returned before.
        Raises TimeoutError if it has not come at the time `until` of the monotonic clock, ValueError if the
        reader is closed or the other end is lost."""
        ...

    def close(self) -> None: ...


class PageTransport(Protocol):
    """Makes both ends, for all connections of a process. Made without arguments; raises ValueError where it
    cannot be used, such as without its package."""

    def writer(self, size: int) -> PageWriter:
        """Make room for a page of at most `size` bytes. Raises OSError where this machine has none. After any
        error the next transport is offered."""
        ...

    def reader(self, offer: bytes, size: int) -> PageReader:
        """Open the other end of a writer. Raises any error where it is not reached from here."""
        ...


def transports(name: str | None) -> dict[str, PageTransport]:
    """Make the transport called `name` and those that are always there, in the order in which a decode engine
    tries them."""
    names = dict.fromkeys((name, *ALWAYS) if name else ALWAYS)
    return {name: resolve_name(f"{__package__}.{KV_TRANSPORTS[name]}")() for name in names}
