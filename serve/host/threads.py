"""Work in threads for event loops, and orders to a thread that owns an engine."""

import asyncio
import queue
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
OrderQueue = queue.SimpleQueue[Callable[[], None] | None]


def run_orders(orders: OrderQueue, wait: bool) -> bool:
    """Run the orders in the queue; returns False after the last of all orders, which is None.

    wait: wait for an order if there is none.

    An order that an order puts into the queue is run by the next call.
    """
    if wait:
        if (first := orders.get()) is None:
            return False
        first()
    with suppress(queue.Empty):
        for _ in range(orders.qsize()):
            if (order := orders.get_nowait()) is None:
                return False
            order()
    return True


async def run_in_thread_or_undo(work: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Run `work` in a thread and return its result; if cancelled meanwhile, pass the result to `undo`.

    `undo` is called also after the event loop has ended.
    """
    done = Future[T]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            done.set_exception(error)

    asyncio.get_running_loop().run_in_executor(None, run)
    try:
        return await asyncio.shield(asyncio.wrap_future(done))
    except asyncio.CancelledError:  # the end of a loop cancels its tasks, but not the thread
        done.add_done_callback(lambda done: done.exception() or undo(done.result()))
        raise
