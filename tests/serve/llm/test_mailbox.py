"""What the engine's thread brings, for a reader who is quick, slow, or has several subscriptions."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from fakes.engine import ask

from duetto.serve.llm.driver import make_error_delivery
from duetto.serve.llm.mailbox import Delivery, Mailbox, SlowReaderError
from duetto.serve.llm.subscription import Subscription


class Side:
    """The engine's side of a mailbox: what it collects after a step, it puts."""

    def __init__(self, count: int = 1, **options: Any):
        self.woken = 0
        self.box = Mailbox(self.wake, **options)
        self.subscriptions = [Subscription([ask([1], max_tokens=90)], first_choice=i) for i in range(count)]
        self.box.unfinished += self.subscriptions

    def wake(self) -> None:
        self.woken += 1

    def step(self, *tokens: int, number: int = 0, is_last: bool = False) -> None:
        subscription = self.subscriptions[number]
        for token in tokens:
            subscription.requests[0].append(token)
        if is_last:
            subscription.requests[0].finish("length")
        outputs = self.box.collect(subscription)
        if outputs or is_last:
            self.box.put(Delivery(self.box, subscription, outputs, is_last))


def run(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), 60))


def soon(call: Callable[..., Any], *given: Any, **named: Any) -> None:
    asyncio.get_running_loop().call_later(0.01, lambda: call(*given, **named))


def test_tokens_come_in_their_order_and_to_their_end():
    async def read() -> None:
        side, found = Side(), []
        side.step(1)  # nobody waits: nothing is made
        soon(side.step, 2)
        found += await side.box.get()
        side.step(3)
        side.step(4, is_last=True)
        assert not side.box.is_at_end
        found += await side.box.get()
        assert side.box.is_at_end and side.woken == 1
        assert [(o.token_ids, o.finish_reason) for o in found] == [([1, 2], None), ([3, 4], "length")]

    run(read)


def test_a_reader_of_several_gets_what_each_brings():
    async def read() -> None:
        side = Side(2)
        soon(lambda: (side.step(5, number=0), side.step(6, number=1)))
        assert [(o.index, o.token_ids) for o in await side.box.get()] == [(0, [5]), (1, [6])]
        side.step(9, number=1)
        side.step(7, number=0, is_last=True)
        assert [(o.index, o.token_ids) for o in await side.box.get()] == [(0, [7])]
        side.step(8, number=1, is_last=True)
        assert [(o.index, o.token_ids) for o in await side.box.get()] == [(1, [9, 8])]
        assert side.box.is_at_end

    run(read)


def test_tokens_before_an_error_are_read_before_it():
    async def read() -> None:
        side = Side()
        side.step(1)
        soon(side.step, 2)
        first = await side.box.get()
        side.step(3)
        error = ZeroDivisionError("as a test wants it")
        (subscription,) = side.subscriptions
        side.box.put(make_error_delivery(side.box, subscription, error))
        subscription.requests[0].finish("abort")  # after the delivery, whose reader must not see it
        found = [*first, *await side.box.get()]
        assert [(o.token_ids, o.finish_reason) for o in found] == [([1, 2], None), ([3], None)]
        assert not side.box.is_at_end
        with pytest.raises(ZeroDivisionError):
            await side.box.get()

    run(read)


def test_too_many_unread_tokens_are_an_error():
    async def read() -> None:
        side = Side(max_unread_tokens=2)
        side.step(1, 2)
        with pytest.raises(SlowReaderError, match="3 tokens wait to be read, at most 2 may"):
            side.step(3)
        waiting = asyncio.ensure_future(side.box.wait_end())  # who wants the whole has no limit
        await asyncio.sleep(0)
        side.step(4)
        side.step(5, is_last=True)
        await waiting

    run(read)


def test_a_reader_of_the_whole_makes_no_outputs_before():
    async def read() -> None:
        side, made = Side(take=lambda subscription: made.append(subscription)), []
        waiting = asyncio.ensure_future(side.box.wait_end())
        await asyncio.sleep(0)
        side.step(1)
        side.step(2, is_last=True)
        await waiting
        assert not made

    run(read)


def test_pings_wake_who_has_heard_nothing():
    async def read() -> None:
        side = Side()
        soon(lambda: (side.box.ping(), side.box.ping()))  # the first begins the silence
        assert await side.box.get() == []
        soon(side.step, 1)
        assert [o.token_ids for o in await side.box.get()] == [[1]]
        soon(side.box.ping)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(side.box.get(), 0.05)

    run(read)
