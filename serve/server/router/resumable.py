"""State of an answer that another replica can resume: the tokens, and the events that were passed on."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from .http import ConnectionLost, check_size
from .prompts import CHOICES

TOKENS, REALM, COMMENT, END, DATA = b": tokens ", b": realm ", b":", b": end", b"data: "


class EventPieces:
    """Cuts a stream at the ends of its events, wherever its pieces end."""

    def __init__(self):
        self.rest = bytearray()  # of an incomplete event

    def take(self, data: bytes) -> list[bytes]:
        """Take a piece, and return the events that are whole, without their empty lines."""
        unread = max(0, len(self.rest) - 1)  # an end may have begun in the last piece
        self.rest += data
        if self.rest.find(b"\n\n", unread) < 0:
            return []
        *whole, rest = bytes(self.rest).split(b"\n\n")
        self.rest = bytearray(rest)
        return whole


class PassThroughStream:
    """Passes whole events on; the stream ends where its replica's does."""

    is_whole = False  # known only once the replica has ended it

    def __init__(self):
        self._pieces = EventPieces()

    def take(self, data: bytes) -> bytes:
        """Take a piece of a stream, and return what can be passed on. Raises AnswerTooLong."""
        check_size(len(self._pieces.rest) + len(data))
        return b"".join(block + b"\n\n" for block in self._pieces.take(data))

    @property
    def held(self) -> bytes:
        """The bytes of an incomplete event."""
        return bytes(self._pieces.rest)


class ResumableStream:
    """Follows a stream, or a whole answer that arrives as the last event of one. Events are passed on once
    the tokens behind them are known; the next replica writes the other events of a lost one again. `realm`
    names the weights that the tokens follow from: only a replica of this realm may continue."""

    def __init__(self, body: Mapping[str, Any]):
        self.is_stream = body.get("stream") is True  # else a whole answer, the last event of a stream
        self.id, self._body = uuid.uuid4().hex, dict(body)
        self._created = int(time.time())
        self._outputs: list[list[int]] = []
        self.realm = ""
        self._events = 0  # passed on
        self.begin()
        self.is_whole = False

    @property
    def has_begun(self) -> bool:
        return any(self._outputs)

    @property
    def body(self) -> bytes:
        """The body for the next replica: continue after the tokens and events so far."""
        known: dict[str, Any] = {"outputs": self._outputs, "events": self._events}
        if self.has_begun:
            known["realm"] = self.realm
        return msgspec.json.encode(self._body | {"resume": {"id": self.id, "created": self._created} | known})

    def forget(self) -> None:
        """Drop tokens and events, of which the client has received none: the next replica begins the answer
        anew."""
        self._outputs, self._events, self.realm = [], 0, ""

    def begin(self) -> None:
        """Begin to read a replica's answer, or its continuation."""
        self._pieces = EventPieces()
        self._held: list[bytes] = []  # events whose tokens are not known
        self._held_bytes = 0

    def take(self, data: bytes) -> bytes:
        """Take a piece of an answer, and return what can be passed on. Raises ConnectionLost for tokens that
        cannot be read, and AnswerTooLong."""
        check_size(len(self._pieces.rest) + self._held_bytes + len(data))
        blocks = self._pieces.take(data)
        found = [tokens_in(block) for block in blocks if block.startswith(TOKENS)]
        for tokens in found:  # nothing raises from here on: what counts is passed on
            self._count(tokens)
        return b"".join(map(self._passed, blocks))

    @property
    def held(self) -> bytes:
        """The events of an answer that ended too early and were not passed on: an error, perhaps."""
        return b"".join(self._held)

    def _passed(self, block: bytes) -> bytes:
        if not block.startswith(COMMENT):
            self._held.append(block + b"\n\n")
            self._held_bytes += len(self._held[-1])
            return b""
        if block.startswith(REALM):
            self.realm = block[len(REALM) :].decode("latin-1")
            return b""
        if not block.startswith(TOKENS) and block != END:
            return block + b"\n\n"  # a comment that keeps the connection open
        self.is_whole = self.is_whole or block == END
        found, self._held, self._held_bytes = self._held, [], 0
        self._events += len(found)
        return b"".join(found)

    def _count(self, tokens: Mapping[int, list[int]]) -> None:
        for choice, ids in tokens.items():
            self._outputs += [[] for _ in range(choice + 1 - len(self._outputs))]
            self._outputs[choice] += ids


def tokens_in(block: bytes) -> dict[int, list[int]]:
    """Return the token ids of each choice in a comment. Raises ConnectionLost for no such comment."""
    try:
        found = msgspec.json.decode(block[len(TOKENS) :], type=dict[int, list[int]])
    except msgspec.DecodeError as error:
        raise ConnectionLost(f"tokens cannot be read: {error}") from None
    if not all(0 <= choice < CHOICES for choice in found):
        raise ConnectionLost(f"an answer has at most {CHOICES} choices")
    return found


def first_data(events: bytes) -> bytes:
    """Return the data of the first event that is no comment; empty if all are."""
    data = (block[len(DATA) :] for block in events.split(b"\n\n") if block.startswith(DATA))
    return next(data, b"")
