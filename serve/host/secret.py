"""A key that both ends of a connection know, and the words by which each proves it to the other.

The listener sends a random number, the caller answers with another one and a proof over both, the listener
sends its own. The proofs are HMACs that name the side they come from, so that neither a proof that was
recorded nor one's own proof sent back is worth anything. What follows is neither signed nor encrypted.
"""

import hmac
import os
import secrets
import socket
import stat
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from .link import Link
from .store import owned

SECONDS = 10.0  # for each word
NONCE = 32  # bytes of a random number
LONGEST = 256  # bytes of a word
SHORTEST, MOST = 16, 1 << 16  # bytes of a key
OTHERS = stat.S_IRWXG | stat.S_IRWXO
OTHER_KEY = "cluster_key_file: the other end has another key, or one end has none"
Side = Literal["caller", "listener"]


class Refusal(Exception):
    """The other end has said, or shown, that the two do not belong together."""


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """The listener's random number."""

    nonce: bytes


class Answer(msgspec.Struct, tag=True, frozen=True):
    """The caller's random number and proof."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, tag=True, frozen=True):
    """The listener's proof."""

    proof: bytes


class Denied(msgspec.Struct, tag=True, frozen=True):
    """The caller's proof is of another key."""


Word = Challenge | Answer | Proof | Denied
DECODER = msgspec.msgpack.Decoder(Word)


@dataclass(frozen=True)
class Secret:
    """A key, empty where everybody on the machine may come, and the purpose of the ports that it opens."""

    purpose: str
    key: bytes = field(default=b"", repr=False)

    def check(self, connection: socket.socket) -> None:
        """Of a listener. Raises Refusal for a caller with another key, and what a link does."""
        link, own = self._link(connection), secrets.token_bytes(NONCE)
        link.send(Challenge(own))
        answer = link.receive(LONGEST)
        if not isinstance(answer, Answer) or len(answer.nonce) != NONCE:
            raise ValueError(f"{type(answer).__name__} is no answer")
        if not hmac.compare_digest(answer.proof, self._proof("caller", own, answer.nonce)):
            link.send(Denied())
            raise Refusal(OTHER_KEY)
        link.send(Proof(self._proof("listener", own, answer.nonce)))

    def prove(self, connection: socket.socket) -> None:
        """Of a caller. Raises Refusal for a listener with another key, and what a link does."""
        link, own = self._link(connection), secrets.token_bytes(NONCE)
        challenge = link.receive(LONGEST)
        if not isinstance(challenge, Challenge) or len(challenge.nonce) != NONCE:
            raise ValueError(f"{type(challenge).__name__} is no challenge")
        link.send(Answer(own, self._proof("caller", challenge.nonce, own)))
        word = link.receive(LONGEST)
        theirs = word.proof if isinstance(word, Proof) else b""
        if not hmac.compare_digest(theirs, self._proof("listener", challenge.nonce, own)):
            raise Refusal(OTHER_KEY)

    def _link(self, connection: socket.socket) -> Link[Word]:
        return Link(connection, SECONDS, DECODER)

    def _proof(self, side: Side, listeners: bytes, callers: bytes) -> bytes:
        said = f"duetto 1 {self.purpose} {side} ".encode() + listeners + callers
        return hmac.digest(self.key, said, "sha256")


def key_in(path: str | None) -> bytes:
    """The key in a file, without white space around it; an empty one without a file. Raises ValueError for a
    file that is too short or that others may read, and where there is none."""
    if path is None:
        return b""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            why = exposure(os.fstat(file.fileno()))
            key = b"" if why else file.read(MOST + 1).strip()
    except OSError as error:
        why, key = error.strerror or str(error), b""
    if not why and not SHORTEST <= len(key) <= MOST:
        why = f"{len(key)} bytes, expected {SHORTEST} to {MOST}; make one with `openssl rand -hex 32`"
    if why:
        raise ValueError(f"cluster_key_file {path!r} is not allowed: {why}")
    return key


def exposure(found: os.stat_result) -> str:
    """Why a file keeps no secret; empty where it does. A group may read what root owns, as where a cluster
    mounts its secrets."""
    if not stat.S_ISREG(found.st_mode):
        return "it is no file"
    allowed = stat.S_IRGRP if found.st_uid == 0 else 0
    if not owned(found) or stat.S_IMODE(found.st_mode) & OTHERS & ~allowed:
        return f"others own it or may read it (mode {stat.S_IMODE(found.st_mode):04o}): chmod 600"
    return ""
