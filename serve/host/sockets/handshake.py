"""The first messages of a connection, after the key is proved: the caller states facts, and the listener
accepts them or rejects the caller with a reason."""

import socket
from typing import TypeVar

import msgspec

from .message_link import Link
from .secret import HandshakeError, Secret

M = TypeVar("M")
A = TypeVar("A")
MAX_HANDSHAKE_BYTES = 1 << 16  # bytes of a message


class Handshake(msgspec.Struct, tag="Hello", frozen=True):
    """The caller's first message.

    facts: values that must be equal at both ends, by name; empty if the caller speaks another protocol.
    rank: rank of the caller in its group of processes; 0 without a group.
    """

    facts: dict[str, str] = {}
    rank: int = 0

    def differing_facts(self, facts: dict[str, str]) -> list[str]:
        """Return the names of facts that differ from the caller's."""
        names = sorted(facts.keys() | self.facts.keys())
        return [name for name in names if facts.get(name) != self.facts.get(name)]


class HandshakeRejected(msgspec.Struct, tag="Refused", frozen=True):
    """The listener's reason to reject a caller, or a process's reason to end its group."""

    why: str


def receive_handshake(
    connection: socket.socket, seconds: float, decoder: msgspec.msgpack.Decoder[M]
) -> tuple[Link[M], Handshake]:
    """Receive the first message of a caller; returns its link and the message.

    Raises ValueError for another message, and the errors of a link.
    """
    link = Link(connection, seconds, decoder)
    match link.receive(MAX_HANDSHAKE_BYTES):
        case Handshake() as hello:
            return link, hello
    raise ValueError("the first message is no Hello")


def connect_to_listener(
    address: tuple[str, int],
    secret: Secret,
    handshake: Handshake,
    accepted_type: type[A],
    decoder: msgspec.msgpack.Decoder[M],
    seconds: float,
    acceptance_seconds: float | None = None,
) -> tuple[Link[M], A]:
    """Connect to a listener; returns the link and the message by which the listener accepts.

    accepted_type: type of that message.
    seconds: time limit of each message.
    acceptance_seconds: time limit of that message in seconds; default: `seconds`.

    Raises HandshakeError if the listener rejects the key or the facts, and the errors of a link.
    """
    connection = socket.create_connection(address, seconds)
    try:
        secret.authenticate_to_listener(connection)
        link = Link(connection, acceptance_seconds or seconds, decoder)
        link.send(handshake)
        try:
            answer = link.receive(MAX_HANDSHAKE_BYTES)
        except EOFError:
            raise ConnectionError("it closed the connection unanswered, as another version may") from None
        if isinstance(answer, accepted_type):
            link.set_timeout(seconds)
            return link, answer
        if isinstance(answer, HandshakeRejected):
            raise HandshakeError(answer.why)
        raise ValueError(f"{type(answer).__name__} does not accept a caller")
    except BaseException:
        connection.close()
        raise
