"""What an engine that decodes and one that prefills tell each other, as msgpack in frames over TCP."""

import socket
from typing import Literal
from zlib import crc32

import msgspec

from ...host.sockets.link import Link
from ...host.sockets.secret import Secret, key_in
from ..offload.tier import Content, Key

SECONDS = 10.0  # in which a message that has begun must have come or gone
Place = Literal["answer", "shared", "registered"]
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}  # seconds, seconds, tries


class Handshake(msgspec.Struct, tag="Hello", frozen=True):
    """Which pages are wanted, and the bytes of one of each window."""

    realm: bytes
    page_bytes: tuple[int, ...]


class Region(msgspec.Struct, frozen=True):
    """Registered memory: what an agent of NIXL has to know of its owner's, where it is, and the note that the
    owner gets with each read."""

    agent: bytes
    address: int
    note: bytes


class HandshakeAccepted(msgspec.Struct, tag="Welcome", frozen=True):
    """These pages are computed here, and kept in so many bytes; where memory can be shared, and a proof that
    it is this one; and what can be read through NIXL."""

    room: int
    memory: str = ""
    proof: bytes = b""
    region: Region | None = None


class HandshakeRejected(msgspec.Struct, tag="Refused", frozen=True):
    """Why a prefill engine has nothing to hand over."""

    why: str


class PrefillRequest(msgspec.Struct, tag="Compute", frozen=True):
    """A prompt, under a number of the asker's."""

    number: int
    prompt: tuple[int, ...]


class PrefillDone(msgspec.Struct, tag="Computed", frozen=True):
    """A prompt's pages that can be fetched; none where it could not be computed."""

    number: int
    keys: tuple[Key, ...]


class CancelPrefill(msgspec.Struct, tag="Leave", frozen=True):
    """Nobody wants a prompt any more."""

    number: int


class GetPage(msgspec.Struct, tag="Fetch", frozen=True):
    """A page is wanted, in the answer or in one of the memories."""

    number: int
    key: Key
    place: Place


class PageData(msgspec.Struct, tag="Page", frozen=True):
    """A page of so many bytes and its sum, in the answer or in the memory that was named; of none there is
    neither."""

    number: int
    size: int = -1
    sum: int = 0
    content: Content = b""


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


def secret_of(path: str | None) -> Secret:
    """The secret between engines, of a file with its key. Raises ValueError for a file that has no key."""
    return Secret("pages", key_in(path))


def link_over(connection: socket.socket) -> Link[Message]:
    """One end of a connection; a machine that is gone is noticed by the system's probes."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return Link(connection, SECONDS, DECODER)


def sum_of(key: Key, content: Content | memoryview) -> int:
    """A page's sum, which is another one under another name."""
    return crc32(content, crc32(key))
