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

from duetto.serve.llm.driver import Driver
from duetto.serve.llm.mailbox import Delivery
from duetto.serve.llm.session import Session
from duetto.serve.llm.subscription import Subscription

TOKENS = 5


class Counting:
    """An engine whose steps give each request a token, until it has `tokens`."""

    warmup, is_sleeping, fails, tokens = None, False, False, TOKENS

    def __init__(self):
        self.requests: list[Any] = []
        self.ended: list[Any] = []
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
                self.ended.append(request)
        self.requests = [request for request in self.requests if not request.is_finished]

    def take_ended(self) -> list[Any]:
        ended, self.ended = self.ended, []
        return ended

    def close(self) -> None:
        self.requests = []

    def abort(self, request: Any) -> None:
        if not request.is_finished:
            request.finish("abort")
            self.ended.append(request)
        self.requests = [other for other in self.requests if other is not request]


class Noting:
    """A reader in the engine's thread that keeps what it gets."""

    loop = None

    def __init__(self, put: Any = None):
        self.news: list[Delivery] = []
        self.put = put or self.news.append

    def collect(self, subscription: Subscription, is_wanted: bool = False) -> list[Any]:
        return subscription.take_outputs()


@pytest.fixture
def engine() -> Counting:
    return Counting()


@pytest.fixture
def session(engine) -> Session:
    return Session(cast(Any, engine))


def subscription_in(session: Session, id: str | None = None) -> Subscription:
    subscription = Subscription([ask([1], max_tokens=20)])
    session.assign_ids([subscription], id)
    return subscription


async def streamed(driver: Driver, session: Session) -> list[int]:
    outputs = driver.stream(lambda: subscription_in(session))
    return [token async for output in outputs for token in output.token_ids]


async def several(driver: Driver, session: Session) -> list[Any]:
    streams = [streamed(driver, session) for _ in range(3)]
    return await asyncio.gather(*streams, return_exceptions=True)


def test_a_driver_serves_several_event_loops(session):
    driver = Driver(session)
    for _ in range(2):
        assert asyncio.run(several(driver, session)) == [[7] * TOKENS] * 3
    assert not session.subscriptions
    driver.stop()


def test_an_error_reaches_every_stream_and_the_driver_goes_on(engine, session):
    driver, engine.fails = Driver(session), True
    found = asyncio.run(several(driver, session))
    assert [type(error) for error in found] == [ZeroDivisionError] * 3
    engine.fails = False
    assert asyncio.run(streamed(driver, session)) == [7] * TOKENS
    assert not session.subscriptions and not engine.requests
    driver.stop()


def test_a_request_that_is_dropped_before_it_begins_never_runs(engine, session):
    driver, subscription = Driver(session), subscription_in(session)
    session.drop([subscription])
    driver.submit(subscription, Noting())
    driver.stop()
    assert not engine.requests and not subscription.is_submitted


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


def test_requests_that_are_aborted_in_a_pause_end_at_once(engine, session):
    driver = Driver(session)
    driver.pause()

    async def aborted() -> Any:
        stream = asyncio.ensure_future(anext(driver.stream(lambda: subscription_in(session))))
        await asyncio.to_thread(until, lambda: bool(engine.requests))
        await asyncio.to_thread(session.abort_or_drain, "abort")
        return await asyncio.wait_for(stream, 60)

    assert asyncio.run(aborted()).finish_reason == "abort"
    driver.stop()


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
    driver, readers = Driver(session), [Noting(), Noting()]
    first = subscription_in(session, "x")
    driver.submit(first, readers[0])
    until(lambda: first.is_finished and "x" not in session.subscriptions)
    second = subscription_in(session, "x")
    driver.drop(first)
    driver.submit(second, readers[1])
    driver.drop(first)
    until(lambda: any(news.is_last for news in readers[1].news))
    assert second.requests[0].finish_reason == "length"
    driver.stop()


def test_a_request_on_a_closed_session_gets_an_error(session):
    driver, reader = Driver(session), Noting()
    subscription = subscription_in(session)
    session.close()
    driver.submit(subscription, reader)
    until(lambda: bool(reader.news))
    assert isinstance(reader.news[0].error, RuntimeError)
    driver.stop()


def test_a_stalled_reader_holds_no_outputs_and_loses_no_token(engine, session):
    driver, engine.tokens, built = Driver(session), 19, []

    def take(subscription: Subscription) -> list[Any]:
        built.append(subscription.take_outputs())
        return built[-1]

    async def stalled() -> list[list[int]]:
        await asyncio.to_thread(driver.pause)
        pieces = driver.stream(lambda: subscription_in(session), take)
        first = asyncio.ensure_future(anext(pieces))
        await asyncio.to_thread(until, lambda: bool(engine.requests))
        driver.resume()
        found = [(await first).token_ids]
        await asyncio.to_thread(until, lambda: not session.subscriptions)
        assert sum(map(len, built)) == 1, "outputs were built that the reader had not asked for"
        return found + [piece.token_ids async for piece in pieces]

    assert asyncio.run(stalled()) == [[7], [7] * 18]
    assert [len(outputs) for outputs in built if outputs] == [1, 1] and built[-1][0].finish_reason == "length"
    driver.stop()


def failing(news: Any = None) -> Any:
    raise ZeroDivisionError("as a test wants it")


def test_an_error_in_building_an_output_ends_that_request_alone(engine, session):
    driver = Driver(session)

    async def both() -> list[Any]:
        wrong = driver.stream(lambda: subscription_in(session), failing)
        both = asyncio.gather(streamed(driver, session), anext(wrong), return_exceptions=True)
        return list(await both)

    whole, error = asyncio.run(both())
    assert whole == [7] * TOKENS and isinstance(error, ZeroDivisionError)
    assert not session.subscriptions and not engine.requests
    driver.stop()


@pytest.mark.parametrize("order", [1, -1])
def test_a_reader_that_fails_costs_no_other(engine, session, caplog, order):
    driver, reader = Driver(session), Noting()
    driver.pause()
    for one in [Noting(failing), reader][::order]:
        driver.submit(subscription_in(session), one)
    driver.resume()
    until(lambda: not session.subscriptions)
    assert [token for news in reader.news for o in news.outputs for token in o.token_ids] == [7] * TOKENS
    assert "its reader failed: ZeroDivisionError" in caplog.text
    driver.stop()


def test_engine_errors_reach_readers_after_one_that_fails(engine, session):
    driver, reader, engine.fails = Driver(session), Noting(), True
    driver.pause()
    for one in (Noting(failing), reader):
        driver.submit(subscription_in(session), one)
    driver.resume()
    until(lambda: not session.subscriptions)
    assert [type(news.error) for news in reader.news] == [ZeroDivisionError]
    driver.stop()


def test_many_calls_to_wake_are_one_order(engine, session):
    driver, engine.is_sleeping = Driver(session), True
    begun, goes_on = threading.Event(), threading.Event()
    driver.call_in_thread(lambda: begun.set() or goes_on.wait())
    begun.wait()
    for _ in range(100):
        driver.wake()
    assert driver._orders.qsize() == 1
    goes_on.set()
    driver.stop()


def test_readers_get_their_tokens_before_a_reported_error(engine, session):
    reported: list[Exception] = []
    driver, reader = Driver(session, on_failure=reported.append), Noting()
    reader.collect = lambda subscription, is_wanted=False: subscription.take_outputs() if is_wanted else []
    driver.pause()
    subscription = subscription_in(session)
    driver.submit(subscription, reader)
    until(lambda: bool(engine.requests))
    subscription.requests[0].append(7)
    engine.fails = True
    driver.resume()
    until(lambda: not session.subscriptions)
    (news,) = reader.news
    assert [o.token_ids for o in news.outputs] == [[7]] and [news.error] == reported
    driver.stop()
