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

from ....user_folders import is_user_owned
from .message_link import Link

MESSAGE_SECONDS = 10.0  # time limit of each message of a handshake
NONCE_BYTES = 32  # bytes
MAX_AUTH_MESSAGE_BYTES = 256  # bytes of a message
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 1 << 16  # minimum and maximum bytes of a key
OTHERS_MODE = stat.S_IRWXG | stat.S_IRWXO
WRONG_KEY = "cluster_key_file: the other end has another key, or one end has none"
AuthSide = Literal["caller", "listener"]


class HandshakeError(Exception):
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


AuthMessage = Challenge | ChallengeResponse | Proof | Denied
DECODER = msgspec.msgpack.Decoder(AuthMessage)


@dataclass(frozen=True)
class Secret:
    """Shared key of one purpose. An empty key accepts every caller whose key is empty too.

    purpose: part of each HMAC, so that a proof for one kind of port is refused by another.
    """

    purpose: str
    key: bytes = field(default=b"", repr=False)

    def authenticate_caller(self, connection: socket.socket) -> None:
        """Authenticate a caller, as the listener. Raises HandshakeError for another key, and the errors of a
        link."""
        link, nonce = self._link(connection), secrets.token_bytes(NONCE_BYTES)
        link.send(Challenge(nonce))
        answer = link.receive(MAX_AUTH_MESSAGE_BYTES)
        if not isinstance(answer, ChallengeResponse) or len(answer.nonce) != NONCE_BYTES:
            raise ValueError(f"{type(answer).__name__} is no answer")
        if not hmac.compare_digest(answer.proof, self._proof("caller", nonce, answer.nonce)):
            link.send(Denied())
            raise HandshakeError(WRONG_KEY)
        link.send(Proof(self._proof("listener", nonce, answer.nonce)))

    def authenticate_to_listener(self, connection: socket.socket) -> None:
        """Prove the key to a listener, as the caller. Raises HandshakeError for another key, and the errors
        of a link."""
        link, nonce = self._link(connection), secrets.token_bytes(NONCE_BYTES)
        challenge = link.receive(MAX_AUTH_MESSAGE_BYTES)
        if not isinstance(challenge, Challenge) or len(challenge.nonce) != NONCE_BYTES:
            raise ValueError(f"{type(challenge).__name__} is no challenge")
        link.send(ChallengeResponse(nonce, self._proof("caller", challenge.nonce, nonce)))
        reply = link.receive(MAX_AUTH_MESSAGE_BYTES)
        theirs = reply.proof if isinstance(reply, Proof) else b""
        if not hmac.compare_digest(theirs, self._proof("listener", challenge.nonce, nonce)):
            raise HandshakeError(WRONG_KEY)

    def _link(self, connection: socket.socket) -> Link[AuthMessage]:
        return Link(connection, MESSAGE_SECONDS, DECODER)

    def _proof(self, side: AuthSide, listener_nonce: bytes, caller_nonce: bytes) -> bytes:
        """Return one side's HMAC over the nonces of the listener and of the caller."""
        message = f"duetto 1 {self.purpose} {side} ".encode() + listener_nonce + caller_nonce
        return hmac.digest(self.key, message, "sha256")


def read_key(path: str | None) -> bytes:
    """Read the key from a file, without white space around it; empty if no file is named.

    Raises ValueError for a file that is missing, too short, or readable by other users.
    """
    if path is None:
        return b""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            reason = find_exposure(os.fstat(file.fileno()))
            key = b"" if reason else file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        reason, key = error.strerror or str(error), b""
    if not reason and not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        expected = f"expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES}"
        reason = f"{len(key)} bytes, {expected}; make one with `openssl rand -hex 32`"
    if reason:
        raise ValueError(f"cluster_key_file {path!r} is not allowed: {reason}")
    return key


def find_exposure(status: os.stat_result) -> str:
    """Return the reason why other users may read or change a file; "" if they may not.

    A group may read a file that root owns: Kubernetes mounts secrets so.
    """
    if not stat.S_ISREG(status.st_mode):
        return "it is no file"
    allowed = stat.S_IRGRP if status.st_uid == 0 else 0
    if not is_user_owned(status) or stat.S_IMODE(status.st_mode) & OTHERS_MODE & ~allowed:
        return f"others own it or may read it (mode {stat.S_IMODE(status.st_mode):04o}): chmod 600"
    return ""
