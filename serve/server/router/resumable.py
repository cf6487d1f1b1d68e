"""Answers that can go on in another replica: what of them has been passed on, and from which tokens."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

TOKENS, REALM, COMMENT, END, DATA = b": tokens ", b": realm ", b":", b": end", b"data: "


class Plain:
    """A stream that ends where its replica does: whole events are passed on."""

    def __init__(self):
        self.held = b""  # of an event that is not whole

    def take(self, data: bytes) -> bytes:
        whole, end, self.held = (self.held + data).rpartition(b"\n\n")
        return whole + end


class Resumable:
    """What a client has of a stream, or will have of a whole answer, which is the last event of one. Events
    are passed on once the tokens that they came from are known; so whatever a lost replica has told without
    them is told again by the next. `realm` names what its tokens follow from: another replica may go on with
    them only under the same name."""

    def __init__(self, body: Mapping[str, Any]):
        self.is_stream = body.get("stream") is True  # or a whole answer, which is told as the last event
        self.id, self._body = uuid.uuid4().hex, dict(body)
        self._created = int(time.time())
        self._outputs: list[list[int]] = []
        self.realm = ""
        self._events = 0  # passed on
        self._rest = b""  # of an event that is not whole
        self._held: list[bytes] = []  # events whose tokens are not known
        self.is_whole = False

    @property
    def has_begun(self) -> bool:
        return any(self._outputs)

    @property
    def body(self) -> bytes:
        """What a replica is asked for: the stream, from where the client has it."""
        known: dict[str, Any] = {"outputs": self._outputs, "events": self._events}
        if self.has_begun:
            known["realm"] = self.realm
        return msgspec.json.encode(self._body | {"resume": {"id": self.id, "created": self._created} | known})

    def forget(self) -> None:
        """Nothing of it is kept: the next replica begins it."""
        assert not self._events, "the client has events of it"
        self._outputs, self.realm = [], ""

    def begin(self) -> None:
        """A replica's answer begins."""
        self._rest, self._held = b"", []

    def take(self, data: bytes) -> bytes:
        """A piece of an answer; gives what can be passed on."""
        *blocks, self._rest = (self._rest + data).split(b"\n\n")
        return b"".join(self._passed(block) for block in blocks)

    @property
    def held(self) -> bytes:
        """What an answer that has ended too early has left: an error, perhaps."""
        return b"".join(self._held)

    def _passed(self, block: bytes) -> bytes:
        if not block.startswith(COMMENT):
            self._held.append(block + b"\n\n")
            return b""
        if block.startswith(TOKENS):
            self._count(msgspec.json.decode(block[len(TOKENS) :], type=dict[int, list[int]]))
        elif block.startswith(REALM):
            self.realm = block[len(REALM) :].decode("latin-1")
            return b""
        elif block == END:
            self.is_whole = True
        else:
            return block + b"\n\n"  # a comment that keeps the connection open
        found, self._held = self._held, []
        self._events += len(found)
        return b"".join(found)

    def _count(self, tokens: Mapping[int, list[int]]) -> None:
        for choice, ids in tokens.items():
            self._outputs += [[] for _ in range(choice + 1 - len(self._outputs))]
            self._outputs[choice] += ids


def first_data(events: bytes) -> bytes:
    """What the first of some events says; nothing where all are comments."""
    data = (block[len(DATA) :] for block in events.split(b"\n\n") if block.startswith(DATA))
    return next(data, b"")
