"""Messages between a decode engine and a prefill engine, as msgpack in frames over TCP.

Engines of another `PREFILL_PROTOCOL` reject each other by name: it is a fact of their handshake.
"""

from collections.abc import Sequence
from zlib import crc32

import msgspec

from ...host.sockets.handshake import Handshake, HandshakeRejected
from ..offload.tier import PageContent, PageKey

PREFILL_MESSAGE_SECONDS = 10.0  # seconds within which a message that has begun is received or sent
PREFILL_PROTOCOL = "3"  # a new number for each change of the messages; 1 had no facts, 2 no salts


class HandshakeAccepted(msgspec.Struct, tag="Welcome", frozen=True):
    """Answer to a decode engine whose facts are the prefill engine's.

    room: bytes of pages that the prefill engine keeps until they are fetched.
    offers: bytes that each transport's reader needs, by the transport's name.
    """

    room: int
    offers: dict[str, bytes]


class PrefillRequest(msgspec.Struct, tag="Compute", frozen=True):
    """Request to compute a prompt.

    number: chosen by the decode engine; it comes back in `PrefillDone`.
    prompt: token ids.
    salt: cache salt, a part of the page hashes.
    """

    number: int
    prompt: tuple[int, ...]
    salt: bytes


class PrefillDone(msgspec.Struct, tag="Computed", frozen=True):
    """Keys of a prompt's pages that can be fetched; none if the prompt was not computed."""

    number: int
    keys: tuple[PageKey, ...]


class CancelPrefill(msgspec.Struct, tag="Leave", frozen=True):
    """Request to stop computing a prompt."""

    number: int


class GetPage(msgspec.Struct, tag="Fetch", frozen=True):
    """Request to write a page for the reader of a transport.

    number: chosen by the decode engine; it comes back in `PageData`.
    transport: the transport's name.
    """

    number: int
    key: PageKey
    transport: str


class PageData(msgspec.Struct, tag="Page", frozen=True):
    """Answer to `GetPage`: the page is written, or there is none.

    size: bytes of the page; -1 if there is none.
    sum: checksum of its key and content.
    carried: bytes that the transport passes to its reader in this message.
    """

    number: int
    size: int = -1
    sum: int = 0
    carried: bytes = b""


PrefillMessage = (
    Handshake
    | HandshakeAccepted
    | HandshakeRejected
    | PrefillRequest
    | PrefillDone
    | CancelPrefill
    | GetPage
    | PageData
)
PREFILL_DECODER = msgspec.msgpack.Decoder(PrefillMessage)


def handshake_facts(realm: bytes, page_bytes: Sequence[int]) -> dict[str, str]:
    """Return the facts that must be equal in a prefill and a decode engine, by name: the protocol, the realm
    of their pages, and the bytes of a page of each window."""
    return {"protocol": PREFILL_PROTOCOL, "realm": realm.hex(), "page_bytes": repr(tuple(page_bytes))}


def page_checksum(key: PageKey, content: PageContent | memoryview) -> int:
    """Return the CRC-32 of a page's key and content."""
    return crc32(content, crc32(key))
