"""State of an answer that another replica can resume: its tokens, and the number of events passed on."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

import msgspec

from .http_client import ConnectionLost, check_answer_size
from .prompts import MAX_REQUEST_CHOICES

TOKENS_PREFIX, REALM_PREFIX = b": tokens ", b": realm "
COMMENT_PREFIX, END_COMMENT, DATA_PREFIX = b":", b": end", b"data: "


class EventPieces:
    """Splits a stream into its events. Pieces may end anywhere."""

    def __init__(self):
        self.rest = bytearray()  # of an incomplete event

    def feed(self, data: bytes) -> list[bytes]:
        """Add a piece of the stream. Returns the events that are complete, without their empty lines."""
        unread = max(0, len(self.rest) - 1)  # an end may have begun in the last piece
        self.rest += data
        if self.rest.find(b"\n\n", unread) < 0:
            return []
        *events, rest = bytes(self.rest).split(b"\n\n")
        self.rest = bytearray(rest)
        return events


class PassThroughStream:
    """Stream that cannot be resumed: complete events are passed on until its replica ends it."""

    is_whole = False  # known only once the replica has ended it

    def __init__(self):
        self._pieces = EventPieces()

    def feed(self, data: bytes) -> bytes:
        """Add a piece of the stream. Returns the events that can be passed on. Raises AnswerTooLong."""
        check_answer_size(len(self._pieces.rest) + len(data))
        return b"".join(block + b"\n\n" for block in self._pieces.feed(data))

    @property
    def held_events(self) -> bytes:
        """The bytes of an incomplete event."""
        return bytes(self._pieces.rest)


class ResumableStream:
    """Stream that another replica can resume; or a whole answer, which arrives as the last event of a stream.

    Events are passed on once their tokens are known. If the replica is lost, the next one writes the other
    events again.

    is_stream: whether the client asked for a stream
    is_whole: whether the answer has arrived completely
    realm: realm of the tokens; only a replica of this realm may continue
    """

    def __init__(self, fields: Mapping[str, Any], body: bytes):
        self.is_stream = fields.get("stream") is True  # else a whole answer, the last event of a stream
        self.id, self._raw_fields = uuid.uuid4().hex, msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        self._created = int(time.time())
        self._outputs: list[list[int]] = []
        self.realm = ""
        self._num_events = 0  # passed on
        self.begin_answer()
        self.is_whole = False

    @property
    def has_begun(self) -> bool:
        return any(self._outputs)

    @property
    def next_body(self) -> bytes:
        """Body for the next replica: the client's fields, with values as they were written, and `resume` with
        the tokens and events so far."""
        known: dict[str, Any] = {"outputs": self._outputs, "events": self._num_events}
        if self.has_begun:
            known["realm"] = self.realm
        resume = {"id": self.id, "created": self._created} | known
        return msgspec.json.encode({**self._raw_fields, "resume": resume})

    def discard_answer(self) -> None:
        """Discard all tokens and events: the next replica begins the answer again. The client must have
        received nothing."""
        self._outputs, self._num_events, self.realm = [], 0, ""

    def begin_answer(self) -> None:
        """Prepare to read the answer, or its continuation, from a replica."""
        self._pieces = EventPieces()
        self._held: list[bytes] = []  # events whose tokens are not known
        self._held_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """Add a piece of the answer. Returns the events that can be passed on. Raises ConnectionLost for
        tokens that cannot be read, and AnswerTooLong."""
        check_answer_size(len(self._pieces.rest) + self._held_bytes + len(data))
        blocks = self._pieces.feed(data)
        new_tokens = [parse_tokens_comment(block) for block in blocks if block.startswith(TOKENS_PREFIX)]
        for tokens in new_tokens:  # nothing raises from here on: what counts is passed on
            self._append_tokens(tokens)
        return b"".join(map(self._pass_block, blocks))

    @property
    def held_events(self) -> bytes:
        """Events that were not passed on, since their tokens are not known. One may be an error."""
        return b"".join(self._held)

    def _pass_block(self, block: bytes) -> bytes:
        if not block.startswith(COMMENT_PREFIX):
            self._held.append(block + b"\n\n")
            self._held_bytes += len(self._held[-1])
            return b""
        if block.startswith(REALM_PREFIX):
            self.realm = block[len(REALM_PREFIX) :].decode("latin-1")
            return b""
        if not block.startswith(TOKENS_PREFIX) and block != END_COMMENT:
            return block + b"\n\n"  # a comment that keeps the connection open
        self.is_whole = self.is_whole or block == END_COMMENT
        events, self._held, self._held_bytes = self._held, [], 0
        self._num_events += len(events)
        return b"".join(events)

    def _append_tokens(self, tokens: Mapping[int, list[int]]) -> None:
        for choice, ids in tokens.items():
            self._outputs += [[] for _ in range(choice + 1 - len(self._outputs))]
            self._outputs[choice] += ids


def parse_tokens_comment(block: bytes) -> dict[int, list[int]]:
    """Parse a comment with token ids of choices. Raises ConnectionLost if it cannot be read."""
    try:
        tokens = msgspec.json.decode(block[len(TOKENS_PREFIX) :], type=dict[int, list[int]])
    except msgspec.DecodeError as error:
        raise ConnectionLost(f"tokens cannot be read: {error}") from None
    if not all(0 <= choice < MAX_REQUEST_CHOICES for choice in tokens):
        raise ConnectionLost(f"an answer has at most {MAX_REQUEST_CHOICES} choices")
    return tokens


def first_event_data(events: bytes) -> bytes:
    """Return the data of the first event that is no comment; b"" without one."""
    data = (block[len(DATA_PREFIX) :] for block in events.split(b"\n\n") if block.startswith(DATA_PREFIX))
    return next(data, b"")
