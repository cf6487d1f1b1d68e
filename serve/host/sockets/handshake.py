"""The first messages of a connection, after the key is proved: the caller states facts, and the listener
accepts them or rejects the caller with a reason."""

import socket
from typing import TypeVar

import msgspec

from .link import Link
from .secret import Refusal, Secret

M = TypeVar("M")
A = TypeVar("A")
LONGEST = 1 << 16  # bytes of a message


class Handshake(msgspec.Struct, tag="Hello", frozen=True):
    """The caller's first message.

    facts: what must be equal at both ends, by name; empty of a caller that speaks another protocol.
    rank: the caller's number in its group of processes; 0 without a group.
    """

    facts: dict[str, str] = {}
    rank: int = 0

    def differing(self, facts: dict[str, str]) -> list[str]:
        """Return the names of the facts that are not equal."""
        names = sorted(facts.keys() | self.facts.keys())
        return [name for name in names if facts.get(name) != self.facts.get(name)]


class HandshakeRejected(msgspec.Struct, tag="Refused", frozen=True):
    """The listener's reason to reject a caller, or a process's reason to end its group."""

    why: str


def greet(
    connection: socket.socket, seconds: float, decoder: msgspec.msgpack.Decoder[M]
) -> tuple[Link[M], Handshake]:
    """Return the link of a caller, and its facts. Raises ValueError for another message, and what a link
    raises."""
    link = Link(connection, seconds, decoder)
    match link.receive(LONGEST):
        case Handshake() as hello:
            return link, hello
    raise ValueError("the first message is no Hello")


def meet(
    address: tuple[str, int],
    secret: Secret,
    hello: Handshake,
    accepted: type[A],
    decoder: msgspec.msgpack.Decoder[M],
    seconds: float,
    patience: float | None = None,
) -> tuple[Link[M], A]:
    """Connect to a listener; return the link and the message by which it accepts the caller. Each message
    has `seconds`, the acceptance `patience` seconds (default: the same). Raises Refusal where the listener
    rejects the key or the facts, and what a link raises."""
    connection = socket.create_connection(address, seconds)
    try:
        secret.prove(connection)
        link = Link(connection, patience or seconds, decoder)
        link.send(hello)
        try:
            answer = link.receive(LONGEST)
        except EOFError:
            raise ConnectionError("it closed the connection unanswered, as another version may") from None
        if isinstance(answer, accepted):
            link.wait_for(seconds)
            return link, answer
        if isinstance(answer, HandshakeRejected):
            raise Refusal(answer.why)
        raise ValueError(f"{type(answer).__name__} does not accept a caller")
    except BaseException:
        connection.close()
        raise
