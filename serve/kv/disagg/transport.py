"""Transports of pages from a prefill engine to a decode engine (KV transfer), by name.

Messages about pages always go over TCP (`messages.py`). A transport carries the bytes of a page.
"""

from pkgutil import resolve_name
from typing import Protocol

from ...options.checks import KV_TRANSPORTS
from ..offload.tier import PageContent

# Tried in this order if the requested transport does not reach the engine.
FALLBACK_TRANSPORTS = ("shared_memory", "tcp")


class PageWriter(Protocol):
    """Prefill engine's end of a transport, for one decode engine. That engine reads a page before it requests
    the next.

    offer: bytes with which a reader opens the other end.
    """

    offer: bytes

    def write(self, content: PageContent) -> bytes:
        """Make a page readable. Returns the bytes that the message about it carries to the reader."""
        ...

    def wait_until_read(self, seconds: float) -> None:
        """Wait until the page is read.

        Runs in another thread, once for each `write` and in the same order. The next `write` may come before
        this call has returned, or begun. Raises TimeoutError or another OSError if the page is not read: the
        connection is then closed, as for an OSError of `write`.
        """
        ...

    def close(self) -> None: ...


class PageReader(Protocol):
    """Decode engine's end of a transport."""

    def read(self, size: int, carried: bytes, deadline: float) -> PageContent:
        """Return the page that was written last, of exactly `size` bytes.

        `write` has returned before. Raises TimeoutError if the page has not arrived at the time `deadline` of
        the monotonic clock, ValueError if the reader is closed or the other end is lost.
        """
        ...

    def close(self) -> None: ...


class PageTransport(Protocol):
    """Maker of both ends, for all connections of a process. It is made without arguments. Raises ValueError
    if it cannot be used, for example if its package is missing."""

    def open_writer(self, size: int) -> PageWriter:
        """Make room for a page of at most `size` bytes. Raises OSError if this machine has none. After any
        error the transport is not offered."""
        ...

    def open_reader(self, offer: bytes, size: int) -> PageReader:
        """Open the other end of a writer. Raises any error if the writer is not reached from here."""
        ...


def make_transports(name: str | None) -> dict[str, PageTransport]:
    """Make the transport called `name` and the fallbacks, in the order in which a decode engine tries
    them."""
    names = dict.fromkeys((name, *FALLBACK_TRANSPORTS) if name else FALLBACK_TRANSPORTS)
    return {name: resolve_name(f"{__package__}.{KV_TRANSPORTS[name]}")() for name in names}
