"""A thread that steps an engine. Requests go in through a queue of orders. After each step, their new outputs
go to the readers that wait for some."""

import asyncio
import threading
import weakref
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from ..host.streams import warn_once
from ..host.threads import OrderQueue, run_in_thread_or_undo, run_orders
from .mailbox import Delivery, Mailbox, Reader, SlowReaderError
from .session import Session
from .subscription import Subscription


class Driver:
    """Steps a session's engine in a thread of its own. Only `stop` and `pause` wait.

    on_failure: called in the thread with an error of the engine, before the readers get it
    on_pause: called in the thread if there are running requests and the engine may not step
    start_thread: starts the thread and returns it

    The thread keeps no idle driver alive. It ends once the driver is garbage collected.
    """

    def __init__(
        self,
        session: Session,
        on_failure: Callable[[Exception], None] = lambda error: None,
        on_pause: Callable[[], None] = lambda: None,
        start_thread: "Callable[[weakref.ref[Driver], OrderQueue], DriverThread] | None" = None,
    ):
        self._session, self._on_failure, self._on_pause = session, on_failure, on_pause
        self._readers: dict[Subscription, Reader] = {}
        self._orders = OrderQueue()
        session.drivers.add(self)
        self._is_stopped = self.is_paused = self._is_wake_queued = False
        weakref.finalize(self, self._orders.put, None)
        self._thread = (start_thread or start_engine_thread)(weakref.ref(self), self._orders)

    def call_in_thread(self, work: Callable[[], Any]) -> None:
        """Run `work` in the driver's thread before the next step. If the driver has stopped, run it here."""
        self._orders.put(work)
        if self._is_stopped:
            run_orders(self._orders, wait=False)

    def submit(self, subscription: Subscription, reader: Reader) -> None:
        """Submit a subscription before the next step. Its outputs go to `reader`."""
        self.call_in_thread(lambda: self._submit(subscription, reader))

    def drop(self, subscription: Subscription) -> None:
        """Abort and drop a subscription before the next step."""
        self.call_in_thread(lambda: self._drop(subscription))

    def wake(self) -> None:
        """Make the thread look for work: a reader waits, the engine was paused or resumed, or requests have
        ended."""
        if not self._is_wake_queued:  # many readers may call between two steps
            self._is_wake_queued = True
            self.call_in_thread(self._on_wake)

    def _on_wake(self) -> None:
        self._is_wake_queued = False

    def pause(self) -> None:
        """Take no steps until `resume`. Waits for the running step."""
        self.is_paused = True
        with self._session.hold_engine():
            pass

    def resume(self) -> None:
        self.is_paused = False
        self.wake()

    def stop(self) -> None:
        """End the thread after the running step, and wait for it."""
        self._orders.put(None)
        self._thread.join()
        self._is_stopped = True
        run_orders(self._orders, wait=False)

    async def stream(
        self,
        subscribe: Callable[[], Subscription],
        take: Callable[[Subscription], list[Any]] = Subscription.take_outputs,
    ) -> AsyncGenerator[Any]:
        """Run a subscription, and yield its outputs in an event loop. Outputs of several steps come at once
        if the caller is slower than the steps. Closing or cancelling the generator aborts the requests.

        subscribe: makes the subscription; called in another thread
        take: takes its new outputs

        Raises the errors of `subscribe`, of `take` and of the engine.
        """
        drop = self._session.drop
        subscription = await run_in_thread_or_undo(subscribe, lambda made: drop([made]))
        mailbox = Mailbox(self.wake, take)
        mailbox.unfinished.append(subscription)
        self.submit(subscription, mailbox)
        try:
            while not mailbox.is_at_end:
                for output in await mailbox.get():
                    yield output
        finally:
            if not mailbox.is_at_end:
                self.drop(subscription)
                await asyncio.to_thread(drop, [subscription])

    # ------------------------------------------------------------ in the thread

    def _submit(self, subscription: Subscription, reader: Reader) -> None:
        with self._session.hold_engine():
            is_kept = not subscription.id or self._session.has(subscription)  # else it was dropped meanwhile
            if is_kept or self._session.is_closed:  # the next step fails those of a closed session
                self._readers[subscription] = reader
            if is_kept and not self._session.is_closed:
                self._session.submit([subscription])

    def _drop(self, subscription: Subscription) -> None:
        self._readers.pop(subscription, None)
        self._session.drop([subscription])

    def step_and_deliver(self) -> bool:
        """Take one step, and deliver the new outputs. Returns whether there is more work."""
        with self._session.hold_engine():
            engine = self._session.engine
            can_step = not self.is_paused and not (engine.is_sleeping or engine.sleep_state.discarded)
            if can_step:
                self._session.step_engine()
            news = [collect_news(reader, s) for s, reader in self._readers.items()]
            deliveries = [delivery for delivery in news if delivery.outputs or delivery.is_last]
            for delivery in deliveries:
                if delivery.is_last:
                    self._drop(delivery.subscription)
            deliver(deliveries)
            is_busy = bool(self._readers or engine.has_work)
        if not can_step and self._readers:
            self._on_pause()
        return can_step and is_busy

    def fail_requests(self, error: Exception) -> None:
        """Drop all subscriptions after an error of the engine."""
        readers, self._readers = self._readers, {}
        self._on_failure(error)
        deliver([make_error_delivery(reader, s, error) for s, reader in readers.items()])
        self._session.drop(list(readers))


def collect_news(reader: Reader, subscription: Subscription) -> Delivery:
    """Return the news of a subscription. An error of its reader ends the subscription."""
    try:
        outputs = reader.collect(subscription)
        return Delivery(reader, subscription, outputs, subscription.is_finished)
    except SlowReaderError as error:
        return make_error_delivery(reader, subscription, error)
    except Exception as error:  # noqa: BLE001 - it must not reach the other requests
        return Delivery(reader, subscription, [], True, error)


def make_error_delivery(reader: Reader, subscription: Subscription, error: Exception) -> Delivery:
    """Return the end of a subscription with an error, and the outputs before it. They are made before it is
    aborted, which would be their finish reason."""
    outputs = []
    with suppress(Exception):
        outputs = reader.collect(subscription, is_wanted=True)
    return Delivery(reader, subscription, outputs, True, error)


def deliver(deliveries: Sequence[Delivery]) -> None:
    """Put deliveries into their readers' event loops, each loop's at once."""
    by_loop = defaultdict[asyncio.AbstractEventLoop | None, list[Delivery]](list)
    for delivery in deliveries:
        by_loop[delivery.reader.loop].append(delivery)
    for loop, group in by_loop.items():
        if loop is None:
            put_all(group)
        else:
            with suppress(RuntimeError):  # the loop is closed: no coroutine is left that could read it
                loop.call_soon_threadsafe(put_all, group)


def put_all(deliveries: Iterable[Delivery]) -> None:
    for delivery in deliveries:
        try:
            delivery.reader.put(delivery)
        except Exception as error:  # noqa: BLE001 - it must not reach the other requests
            warn_once(f"request {delivery.subscription.id}: its reader failed: {error!r}")


class DriverThread(Protocol):
    """Thread that runs a driver's orders and steps."""

    def join(self) -> None: ...


def start_engine_thread(driver_ref: "weakref.ref[Driver]", orders: OrderQueue) -> DriverThread:
    """Start the thread of a driver. The thread holds a weak reference to the driver."""

    def drive() -> None:
        is_busy: bool | None = False
        while is_busy is not None:
            is_busy = run_orders_and_step(driver_ref, orders, wait=not is_busy)

    thread = threading.Thread(target=drive, name="duetto-engine", daemon=True)
    thread.start()
    return thread


def run_orders_and_step(driver_ref: "weakref.ref[Driver]", orders: OrderQueue, wait: bool) -> bool | None:
    """Run a driver's orders and a step. With `wait`, wait for the first order. Returns whether there is more
    work; None if the driver has ended. Between calls the thread keeps neither driver nor engine alive."""
    try:
        if not run_orders(orders, wait) or (driver := driver_ref()) is None:
            return None
        return driver.step_and_deliver()
    except Exception as error:  # noqa: BLE001 - callers wait for answers, whatever it is
        if (driver := driver_ref()) is not None:
            driver.fail_requests(error)
        return False
