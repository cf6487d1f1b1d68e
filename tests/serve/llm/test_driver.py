"""A driver's thread over an engine without a device: streams of event loops, errors, pauses, and its end."""

import asyncio
import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cases.waiting import until
from fakes.engine import ask

from duetto.serve.host.streams import warn_once
from duetto.serve.llm.driver import DrivenRequest, Driver, StreamChunk
from duetto.serve.llm.request_group import RequestGroup, StreamCursor
from duetto.serve.llm.session import Session

TOKENS = 5


class Counting:
    """An engine whose steps give each request a token, until it has `tokens`."""

    warmup, is_sleeping, fails, tokens = None, False, False, TOKENS
    on_request_end: Any = None

    def __init__(self):
        self.requests: list[Any] = []
        self.sleep_state = SimpleNamespace(discarded=False)

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def submit(self, request: Any) -> None:
        self.requests.append(request)

    def step(self) -> None:
        if self.fails:
            raise ZeroDivisionError("as a test wants it")
        for request in self.requests:
            request.append(7)
            if request.num_output_tokens == self.tokens:
                request.finish("length")
                self.on_request_end(request)
        self.requests = [request for request in self.requests if not request.is_finished]

    def close(self) -> None:
        self.requests = []

    def abort(self, request: Any) -> None:
        if not request.is_finished:
            request.finish("abort")
            self.on_request_end(request)
        self.requests = [other for other in self.requests if other is not request]


@pytest.fixture
def engine() -> Counting:
    return Counting()


@pytest.fixture
def session(engine) -> Session:
    return Session(cast(Any, engine))


def group_in(session: Session) -> RequestGroup:
    (group,) = session.make_groups([lambda id: RequestGroup(id, None, [ask([1], max_tokens=20)])])
    return group


async def streamed(driver: Driver, session: Session) -> list[int]:
    pieces = driver.stream(lambda: group_in(session), lambda group: StreamCursor(group).take)
    return [token async for piece in pieces for token in piece.token_ids]


async def several(driver: Driver, session: Session) -> list[Any]:
    streams = [streamed(driver, session) for _ in range(3)]
    return await asyncio.gather(*streams, return_exceptions=True)


def test_a_driver_serves_several_event_loops(session):
    driver = Driver(session)
    for _ in range(2):
        assert asyncio.run(several(driver, session)) == [[7] * TOKENS] * 3
    assert not session.groups
    driver.stop()


def test_an_error_reaches_every_stream_and_the_driver_goes_on(engine, session):
    driver, engine.fails = Driver(session), True
    found = asyncio.run(several(driver, session))
    assert [type(error) for error in found] == [ZeroDivisionError] * 3
    engine.fails = False
    assert asyncio.run(streamed(driver, session)) == [7] * TOKENS
    assert not session.groups and not engine.requests
    driver.stop()


def test_a_request_that_is_dropped_before_it_begins_never_runs(engine, session):
    driver, group = Driver(session), group_in(session)
    session.drop_groups([group])
    driver.add_request(DrivenRequest(group, list, lambda news: None))
    driver.stop()
    assert not engine.requests and not group.is_submitted


def test_a_paused_driver_takes_no_steps(engine, session):
    driver = Driver(session)

    async def paused() -> list[int]:
        await asyncio.to_thread(driver.pause)
        coming = asyncio.create_task(streamed(driver, session))
        while not engine.requests:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        assert not coming.done() and not engine.requests[0].num_output_tokens
        driver.resume()
        return await coming

    assert asyncio.run(paused()) == [7] * TOKENS
    driver.stop()


def test_orders_after_stop_run_in_the_callers_thread(session):
    driver, done = Driver(session), []
    driver.stop()
    driver.call_in_thread(lambda: done.append(True))
    assert done == [True]


def test_an_idle_driver_ends_with_its_owner():
    session = Session(cast(Any, Counting()))
    driver, alive = Driver(session), weakref.ref(session)
    assert asyncio.run(streamed(driver, session)) == [7] * TOKENS
    thread = cast(threading.Thread, driver._thread)
    del driver, session
    gc.collect()
    thread.join(60)
    assert alive() is None and not thread.is_alive()


def test_requests_of_a_sleeping_engine_go_on_when_it_wakes(engine, session):
    driver, engine.is_sleeping = Driver(session), True

    async def slept() -> list[int]:
        stream = asyncio.create_task(streamed(driver, session))
        await asyncio.to_thread(until, lambda: bool(engine.requests))
        engine.is_sleeping = False
        session.wake()
        return await asyncio.wait_for(stream, 60)

    assert asyncio.run(slept()) == [7] * TOKENS
    driver.stop()


def test_a_late_cancellation_does_not_end_the_next_request(session):
    driver, news = Driver(session), []
    first, second = (RequestGroup("x", None, [ask([1], max_tokens=20)]) for _ in range(2))
    flows = [DrivenRequest(group, StreamCursor(group).take, news.append) for group in (first, second)]
    session.make_groups([lambda id: first], "x")
    driver.add_request(flows[0])
    until(lambda: first.is_finished and "x" not in session.groups)
    session.make_groups([lambda id: second], "x")
    driver.drop_request(flows[0])
    driver.add_request(flows[1])
    driver.drop_request(flows[0])
    until(
        lambda: any(isinstance(new, StreamChunk) and new.handle is flows[1] and new.is_last for new in news)
    )
    driver.stop()


def test_a_request_on_a_closed_session_gets_an_error(session):
    driver, news = Driver(session), []
    group = group_in(session)
    session.close()
    driver.add_request(DrivenRequest(group, StreamCursor(group).take, news.append))
    until(lambda: bool(news))
    assert isinstance(news[0], RuntimeError)
    driver.stop()


def test_a_stalled_reader_holds_no_outputs_and_loses_no_token(engine, session):
    driver, engine.tokens, built = Driver(session), 19, []

    def take_of(group: RequestGroup) -> Any:
        cursor = StreamCursor(group)

        def take() -> list[Any]:
            built.append(cursor.take())
            return built[-1]

        return take

    async def stalled() -> list[list[int]]:
        await asyncio.to_thread(driver.pause)
        pieces = driver.stream(lambda: group_in(session), take_of)
        first = asyncio.ensure_future(anext(pieces))
        await asyncio.to_thread(until, lambda: bool(engine.requests))
        driver.resume()
        found = [(await first).token_ids]
        await asyncio.to_thread(until, lambda: not session.groups)
        assert sum(map(len, built)) == 1, "outputs were built that the reader had not asked for"
        return found + [piece.token_ids async for piece in pieces]

    assert asyncio.run(stalled()) == [[7], [7] * 18]
    assert [len(deltas) for deltas in built if deltas] == [1, 1] and built[-1][0].finish_reason == "length"
    driver.stop()


def failing(news: Any = None) -> Any:
    raise ZeroDivisionError("as a test wants it")


def test_an_error_in_building_an_output_ends_that_request_alone(engine, session):
    driver = Driver(session)

    async def both() -> list[Any]:
        wrong = driver.stream(lambda: group_in(session), lambda group: failing)
        both = asyncio.gather(streamed(driver, session), anext(wrong), return_exceptions=True)
        return list(await both)

    whole, error = asyncio.run(both())
    assert whole == [7] * TOKENS and isinstance(error, ZeroDivisionError)
    assert not session.groups and not engine.requests
    driver.stop()


@pytest.mark.parametrize("order", [1, -1])
def test_a_request_whose_reader_fails_is_dropped_alone(engine, session, caplog, order):
    warn_once.cache_clear()
    driver, news = Driver(session), []
    groups = [group_in(session) for _ in range(2)]
    puts = dict(zip(groups, [failing, news.append][::order], strict=True))
    driver.pause()
    for group in groups:
        driver.add_request(DrivenRequest(group, StreamCursor(group).take, puts[group]))
    driver.resume()
    until(lambda: not session.groups)
    assert [token for new in news for delta in new.outputs for token in delta.token_ids] == [7] * TOKENS
    assert sorted(group.requests[0].finish_reason for group in groups) == ["abort", "length"]
    assert "is dropped, its reader failed: ZeroDivisionError" in caplog.text
    driver.stop()


def test_engine_errors_reach_requests_after_one_whose_callback_fails(engine, session):
    driver, news, engine.fails = Driver(session), [], True
    driver.pause()
    for put in (failing, news.append):
        group = group_in(session)
        driver.add_request(DrivenRequest(group, StreamCursor(group).take, put))
    driver.resume()
    until(lambda: not session.groups)
    assert [type(error) for error in news] == [ZeroDivisionError]
    driver.stop()
