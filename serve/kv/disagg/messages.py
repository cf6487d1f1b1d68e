"""Messages between a decode engine and a prefill engine, as msgpack in frames over TCP.

Engines of another PROTOCOL reject each other by name: it is a fact of their handshake.
"""

from collections.abc import Sequence
from zlib import crc32

import msgspec

from ...host.sockets.handshake import Handshake, HandshakeRejected
from ..offload.tier import Content, Key

SECONDS = 10.0  # in which a message that has begun must have come or gone
PROTOCOL = "2"  # a new number for each change of what follows; 1 had no facts


class HandshakeAccepted(msgspec.Struct, tag="Welcome", frozen=True):
    """The prefill engine has the pages that a decode engine wants.

    room: bytes of pages that it keeps until they are fetched.
    offers: what each transport's reader needs, by the transport's name.
    """

    room: int
    offers: dict[str, bytes]


class PrefillRequest(msgspec.Struct, tag="Compute", frozen=True):
    """Compute a prompt.

    number: the decode engine's, which comes back in `PrefillDone`.
    """

    number: int
    prompt: tuple[int, ...]


class PrefillDone(msgspec.Struct, tag="Computed", frozen=True):
    """A prompt's pages that can be fetched; none where it could not be computed."""

    number: int
    keys: tuple[Key, ...]


class CancelPrefill(msgspec.Struct, tag="Leave", frozen=True):
    """A prompt is not wanted any more."""

    number: int


class GetPage(msgspec.Struct, tag="Fetch", frozen=True):
    """Write a page for the reader of a transport."""

    number: int
    key: Key
    transport: str


class PageData(msgspec.Struct, tag="Page", frozen=True):
    """A page was written.

    size: bytes of the page; -1 where there is none.
    sum: checksum of its name and content.
    carried: what its transport passes to the reader in this message.
    """

    number: int
    size: int = -1
    sum: int = 0
    carried: bytes = b""


Message = (
    Handshake
    | HandshakeAccepted
    | HandshakeRejected
    | PrefillRequest
    | PrefillDone
    | CancelPrefill
    | GetPage
    | PageData
)
DECODER = msgspec.msgpack.Decoder(Message)


def facts_of(realm: bytes, page_bytes: Sequence[int]) -> dict[str, str]:
    """Return what must be equal in a prefill and a decode engine, by name: the protocol, the realm of their
    pages, and the bytes of a page of each window."""
    return {"protocol": PROTOCOL, "realm": realm.hex(), "page_bytes": repr(tuple(page_bytes))}


def sum_of(key: Key, content: Content | memoryview) -> int:
    """Return a page's checksum, which differs for another key."""
    return crc32(content, crc32(key))
