"""What a router holds of a stream, and what it knows of the tokens behind it."""

import json
from functools import partial
from typing import Any

import pytest

from duetto.serve.server.router.http_client import PIECE_BYTES, AnswerTooLong, ConnectionLost
from duetto.serve.server.router.resumable import EventPieces, PassThroughStream, ResumableStream

GOOD = b'data: A\n\n: realm one\n\n: tokens {"0": [1]}\n\n'


def resume(stream: ResumableStream) -> dict[str, Any]:
    known = json.loads(stream.next_body)["resume"]
    return {name: known.get(name) for name in ("outputs", "events", "realm")}


@pytest.mark.parametrize("bad", [b": tokens x\n\n", b': tokens {"999": [1]}\n\n'])
def test_a_piece_that_is_not_passed_on_does_not_count(bad):
    """Else the next replica would continue after an event that the client never received."""
    stream = ResumableStream({"stream": True}, b"{}")
    stream.begin_answer()
    with pytest.raises(ConnectionLost):
        stream.feed(GOOD + b"data: B\n\n" + bad)
    assert resume(stream) == {"outputs": [], "events": 0, "realm": None} and not stream.realm
    stream.begin_answer()
    assert stream.feed(GOOD) == b"data: A\n\n"
    with pytest.raises(ConnectionLost):
        stream.feed(b'data: B\n\n: realm two\n\n: tokens {"0": [2]}\n\n' + bad)
    assert resume(stream) == {"outputs": [[1]], "events": 1, "realm": "one"}


@pytest.mark.parametrize("size", range(1, 20))
def test_events_are_whole_wherever_pieces_end(size):
    events = GOOD + b"data: B\n\n: ping\n\n: end\n\n"
    text = events + b"data: C\ndata"
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    plain, stream = PassThroughStream(), ResumableStream({"stream": True}, b"{}")
    passed = [plain.feed(piece) for piece in pieces]
    assert b"".join(passed) == events and plain.held_events == b"data: C\ndata"
    assert all(not one or one.endswith(b"\n\n") for one in passed)
    passed = [stream.feed(piece) for piece in pieces]
    assert b"".join(passed) == b"data: A\n\n: ping\n\ndata: B\n\n" and stream.is_whole
    assert resume(stream) == {"outputs": [[1]], "events": 2, "realm": "one"}


def test_a_long_event_is_not_copied_for_each_piece():
    pieces = EventPieces()
    rest = pieces.rest
    for _ in range(400):
        assert pieces.feed(b"a" * PIECE_BYTES) == [] and pieces.rest is rest
    assert len(rest) == 400 * PIECE_BYTES


@pytest.mark.parametrize("kind", [PassThroughStream, partial(ResumableStream, {}, b"{}")])
def test_what_a_stream_holds_is_bounded(kind, monkeypatch):
    monkeypatch.setattr("duetto.serve.server.router.http_client.MAX_ANSWER_BYTES", 1000)
    stream = kind()
    for _ in range(10):
        stream.feed(b"a" * 100)
    with pytest.raises(AnswerTooLong, match="more than 1000 bytes"):
        stream.feed(b"a")


def test_events_that_are_passed_on_are_not_held(monkeypatch):
    monkeypatch.setattr("duetto.serve.server.router.http_client.MAX_ANSWER_BYTES", 100)
    stream = ResumableStream({"stream": True}, b"{}")
    for _ in range(100):
        assert stream.feed(GOOD) == b"data: A\n\n"
    with pytest.raises(AnswerTooLong):
        for _ in range(100):
            stream.feed(b"data: A\n\n")
    stream.begin_answer()
    assert stream.feed(b"data: B\n\n" + b"a" * 80) == b""
    assert stream.held_events == b"data: B\n\n"


def test_a_restarted_answer_has_no_tokens_and_no_events():
    """Events of a whole answer count as they are read, and the client has none of them before its end."""
    stream = ResumableStream({}, b"{}")
    assert stream.feed(GOOD) == b"data: A\n\n"
    stream.discard_answer()
    stream.begin_answer()
    assert resume(stream) == {"outputs": [], "events": 0, "realm": None}
