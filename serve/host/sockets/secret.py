"""Mutual authentication of a connection by a shared key.

The listener sends a nonce. The caller answers with its own nonce and an HMAC over both. The listener checks
it and sends an HMAC too. Each HMAC names its side, so a replayed or reflected one is refused. Messages after
the handshake are neither signed nor encrypted.
"""

import hmac
import os
import secrets
import socket
import stat
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from ....user_folders import owned
from .link import Link

SECONDS = 10.0  # for each message of a handshake
NONCE = 32  # bytes
LONGEST = 256  # bytes of a message
SHORTEST, MOST = 16, 1 << 16  # bytes of a key
OTHERS = stat.S_IRWXG | stat.S_IRWXO
OTHER_KEY = "cluster_key_file: the other end has another key, or one end has none"
Side = Literal["caller", "listener"]


class Refusal(Exception):
    """The other end has another key, or serves something else."""


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """The listener's nonce."""

    nonce: bytes


class ChallengeResponse(msgspec.Struct, tag="Answer", frozen=True):
    """The caller's nonce and proof."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, tag=True, frozen=True):
    """The listener's proof."""

    proof: bytes


class Denied(msgspec.Struct, tag=True, frozen=True):
    """The caller's proof is of another key."""


Message = Challenge | ChallengeResponse | Proof | Denied
DECODER = msgspec.msgpack.Decoder(Message)


@dataclass(frozen=True)
class Secret:
    """Shared key of one purpose. An empty key accepts every caller whose key is empty too.

    purpose: part of each HMAC, so that a proof for one kind of port is refused by another.
    """

    purpose: str
    key: bytes = field(default=b"", repr=False)

    def check(self, connection: socket.socket) -> None:
        """The listener's side. Raises Refusal for a caller with another key, and what a link raises."""
        link, own = self._link(connection), secrets.token_bytes(NONCE)
        link.send(Challenge(own))
        answer = link.receive(LONGEST)
        if not isinstance(answer, ChallengeResponse) or len(answer.nonce) != NONCE:
            raise ValueError(f"{type(answer).__name__} is no answer")
        if not hmac.compare_digest(answer.proof, self._proof("caller", own, answer.nonce)):
            link.send(Denied())
            raise Refusal(OTHER_KEY)
        link.send(Proof(self._proof("listener", own, answer.nonce)))

    def prove(self, connection: socket.socket) -> None:
        """The caller's side. Raises Refusal for a listener with another key, and what a link raises."""
        link, own = self._link(connection), secrets.token_bytes(NONCE)
        challenge = link.receive(LONGEST)
        if not isinstance(challenge, Challenge) or len(challenge.nonce) != NONCE:
            raise ValueError(f"{type(challenge).__name__} is no challenge")
        link.send(ChallengeResponse(own, self._proof("caller", challenge.nonce, own)))
        reply = link.receive(LONGEST)
        theirs = reply.proof if isinstance(reply, Proof) else b""
        if not hmac.compare_digest(theirs, self._proof("listener", challenge.nonce, own)):
            raise Refusal(OTHER_KEY)

    def _link(self, connection: socket.socket) -> Link[Message]:
        return Link(connection, SECONDS, DECODER)

    def _proof(self, side: Side, listeners: bytes, callers: bytes) -> bytes:
        message = f"duetto 1 {self.purpose} {side} ".encode() + listeners + callers
        return hmac.digest(self.key, message, "sha256")


def key_in(path: str | None) -> bytes:
    """Read the key from a file, without white space around it; empty where no file is named. Raises
    ValueError for a file that is missing, too short, or readable by other users."""
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
    """Return the reason why other users may read or change a file; empty where none may. A group may read a
    file that root owns: Kubernetes mounts secrets so."""
    if not stat.S_ISREG(found.st_mode):
        return "it is no file"
    allowed = stat.S_IRGRP if found.st_uid == 0 else 0
    if not owned(found) or stat.S_IMODE(found.st_mode) & OTHERS & ~allowed:
        return f"others own it or may read it (mode {stat.S_IMODE(found.st_mode):04o}): chmod 600"
    return ""
