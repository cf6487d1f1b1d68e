"""What a session and a stream do on the host grows with what is new, not with what they have seen."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes.engine import ask

from duetto.serve.llm.request_group import RequestGroup, StreamCursor
from duetto.serve.llm.session import Session


class Ending:
    """An engine in which each step ends one request."""

    warmup = None

    def __init__(self):
        self.on_end: Any = None
        self.requests: list[Any] = []

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def submit(self, request: Any) -> None:
        self.requests.append(request)

    def step(self) -> None:
        request = self.requests.pop(0)
        request.finish("length")
        self.on_end(request)

    def abort(self, request: Any) -> None:
        if not request.finished:
            self.requests.remove(request)
            request.finish("abort")
            self.on_end(request)


@pytest.fixture
def looked(monkeypatch) -> list[str]:
    """The ids of groups whose `finished` was read, one for each time."""
    seen: list[str] = []
    plain = cast(property, RequestGroup.finished).fget
    assert plain is not None
    monkeypatch.setattr(RequestGroup, "finished", property(lambda t: seen.append(t.id) or plain(t)))
    return seen


def groups(session: Session, count: int) -> list[RequestGroup]:
    def make(id: str) -> RequestGroup:
        request = ask([1], arrival=int(id))
        return RequestGroup(id, None, [request])

    return session.groups_of([make] * count)


def test_a_list_is_looked_through_once_and_not_in_every_step(looked):
    session = Session(cast(Any, Ending()))
    done: list[str] = []
    submitted = groups(session, 300)
    session.submit(submitted)
    session.run(submitted, lambda ended: done.extend(t.id for t in ended))
    assert done == [str(i) for i in range(300)]
    assert len(looked) <= 4 * 300


def test_steps_look_at_what_has_ended_in_them(looked):
    session = Session(cast(Any, Ending()))
    session.queue(groups(session, 300))
    found = [t.id for _ in range(300) for t in session.step()]
    assert found == [str(i) for i in range(300)] and session.count_queued == 0
    assert len(looked) <= 4 * 300


def test_whoever_ends_a_ticket_those_who_wait_for_it_are_told():
    engine = Ending()
    session = Session(cast(Any, engine))
    mine, others = groups(session, 3), groups(session, 2)
    session.queue(mine)
    session.abort(mine[2].id)
    session.submit(others)
    session.run(others)
    session.drop(others)
    assert engine.requests == [] and [t.id for t in session.step()] == ["0", "1", "2"]
    assert not session.groups


def test_what_was_given_is_not_kept():
    session = Session(cast(Any, Ending()))
    for _ in range(3):
        session.queue(groups(session, 5))
        assert len(session.wait(lambda ended: None)) == 5
    assert not session.groups and not session.count_queued


class Sliced(list):
    """A list that counts what is copied of it."""

    copied = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        Sliced.copied += len(found) if isinstance(key, slice) else 0
        return found


def test_a_stream_copies_each_token_once():
    request = ask([1, 2, 3], max_tokens=400)
    request.tokens = Sliced(request.tokens)
    cursor, found = StreamCursor(RequestGroup("0", None, [request])), []
    while not cursor.at_end:
        request.append(7)
        found += [token for piece in cursor.take() for token in piece.token_ids]
    assert found == [7] * 400 and Sliced.copied == 400


def test_completions_that_were_given_to_their_end_cost_nothing():
    asked: list[int] = []

    class Completion(SimpleNamespace):
        @property
        def finished(self) -> bool:
            asked.append(self.number)
            return self.number > 0

    requests = [
        Completion(number=i, prompt=[1], tokens=[1], text=None, finish_reason=None) for i in range(50)
    ]
    cursor = StreamCursor(RequestGroup("0", None, cast(Any, requests)))
    cursor.take()
    asked.clear()
    cursor.take()
    assert set(asked) == {0}
