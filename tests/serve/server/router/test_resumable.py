"""What a router holds of a stream, and what it knows of the tokens behind it."""

import json
from typing import Any

import pytest

from duetto.serve.server.router.http import ConnectionLost
from duetto.serve.server.router.resumable import ResumableStream

GOOD = b'data: A\n\n: realm one\n\n: tokens {"0": [1]}\n\n'


def resume(stream: ResumableStream) -> dict[str, Any]:
    known = json.loads(stream.body)["resume"]
    return {name: known.get(name) for name in ("outputs", "events", "realm")}


@pytest.mark.parametrize("bad", [b": tokens x\n\n", b': tokens {"999": [1]}\n\n'])
def test_a_piece_that_is_not_passed_on_does_not_count(bad):
    """Else the next replica would continue after an event that the client never received."""
    stream = ResumableStream({"stream": True})
    stream.begin()
    with pytest.raises(ConnectionLost):
        stream.take(GOOD + b"data: B\n\n" + bad)
    assert resume(stream) == {"outputs": [], "events": 0, "realm": None} and not stream.realm
    stream.begin()
    assert stream.take(GOOD) == b"data: A\n\n"
    with pytest.raises(ConnectionLost):
        stream.take(b'data: B\n\n: realm two\n\n: tokens {"0": [2]}\n\n' + bad)
    assert resume(stream) == {"outputs": [[1]], "events": 1, "realm": "one"}
