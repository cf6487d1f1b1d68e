"""What a session and a stream do on the host grows with what is new, not with what they have seen."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from fakes.engine import ask

from duetto.serve.llm.session import Session
from duetto.serve.llm.subscription import Subscription


class Ending:
    """An engine in which each step ends one request."""

    warmup = None

    def __init__(self):
        self.ended: list[Any] = []
        self.requests: list[Any] = []

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def submit(self, request: Any) -> None:
        self.requests.append(request)

    def step(self) -> None:
        request = self.requests.pop(0)
        request.finish("length")
        self.ended.append(request)

    def abort(self, request: Any) -> None:
        if not request.is_finished:
            self.requests.remove(request)
            request.finish("abort")
            self.ended.append(request)

    def take_ended(self) -> list[Any]:
        ended, self.ended = self.ended, []
        return ended


@pytest.fixture
def looked(monkeypatch) -> list[str]:
    """The ids of subscriptions whose `is_finished` was read, one for each time."""
    seen: list[str] = []
    plain = cast(property, Subscription.is_finished).fget
    assert plain is not None
    monkeypatch.setattr(Subscription, "is_finished", property(lambda t: seen.append(t.id) or plain(t)))
    return seen


def subscriptions(session: Session, count: int) -> list[Subscription]:
    made = [Subscription([ask([1], arrival=i)]) for i in range(count)]
    session.assign_ids(made)
    return made


def test_a_list_of_requests_is_scanned_only_once(looked):
    session = Session(cast(Any, Ending()))
    done: list[str] = []
    submitted = subscriptions(session, 300)
    session.submit(submitted)
    session.run(submitted, lambda ended: done.extend(t.id for t in ended))
    assert done == [str(i) for i in range(300)]
    assert len(looked) <= 4 * 300


def test_each_step_checks_only_its_ended_requests(looked):
    session = Session(cast(Any, Ending()))
    session.enqueue(subscriptions(session, 300))
    found = [t.id for _ in range(300) for t in session.step()]
    assert found == [str(i) for i in range(300)] and session.num_queued == 0
    assert len(looked) <= 4 * 300


def test_requests_ended_by_other_callers_are_still_reported():
    engine = Ending()
    session = Session(cast(Any, engine))
    mine, others = subscriptions(session, 3), subscriptions(session, 2)
    session.enqueue(mine)
    session.abort(mine[2].id)
    session.submit(others)
    session.run(others)
    session.drop(others)
    assert engine.requests == [] and [t.id for t in session.step()] == ["0", "1", "2"]
    assert not session.subscriptions


def test_requests_run_to_their_end_while_the_engine_is_held():
    """As for new weights, which wait for the requests that run."""
    session = Session(cast(Any, Ending()))
    queued = subscriptions(session, 3)
    session.submit(queued)
    with session.hold_engine():
        session.abort_or_drain("wait")
        assert all(subscription.is_finished for subscription in queued)


def test_ends_are_logged_before_the_next_call_of_the_turn():
    session = Session(cast(Any, Ending()))
    logged: list[str] = []
    session.audit_log = cast(
        Any, SimpleNamespace(on_request_end=lambda request, i: logged.append(request.id))
    )
    session.submit(subscriptions(session, 2))
    with session.hold_engine():
        session.abort_or_drain("abort")
        assert logged == ["0", "1"]


def test_an_empty_id_is_refused():
    session = Session(cast(Any, Ending()))
    with pytest.raises(ValueError, match="request_id '' is not allowed"):
        session.assign_ids([Subscription([ask([1])])], "")


def test_returned_outputs_are_not_kept():
    session = Session(cast(Any, Ending()))
    for _ in range(3):
        session.enqueue(subscriptions(session, 5))
        assert len(session.wait_queued(lambda ended: None)) == 5
    assert not session.subscriptions and not session.num_queued


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
    subscription, found = Subscription([request]), []
    while not subscription.is_at_end:
        request.append(7)
        found += [token for output in subscription.take_outputs() for token in output.token_ids]
    assert found == [7] * 400 and Sliced.copied == 400


def test_fully_returned_completions_are_not_scanned():
    asked: list[int] = []

    class Completion(SimpleNamespace):
        @property
        def is_finished(self) -> bool:
            asked.append(self.number)
            return self.number > 0

    fields = {"prompt": [1], "tokens": [1], "detokenizer": None, "finish_reason": None, "stop_reason": None}
    fields |= {"params": SimpleNamespace(logprobs=None), "scores": SimpleNamespace(logprob=[])}
    requests = [Completion(number=i, **fields) for i in range(50)]
    subscription = Subscription(cast(Any, requests))
    subscription.take_outputs()
    asked.clear()
    subscription.take_outputs()
    assert set(asked) == {0}
