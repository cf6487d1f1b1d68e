"""The mailbox of a reader in an event loop, which the engine's thread fills."""

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from .subscription import Subscription


class Delivery(NamedTuple):
    """News of a subscription after a step.

    reader: receives it
    subscription: subscription whose news it has
    outputs: new ones, for a reader that waits for some
    is_last: whether it has ended
    error: the error that ended it, if any
    """

    reader: "Reader"
    subscription: Subscription
    outputs: list[Any]
    is_last: bool
    error: Exception | None = None


class Reader(Protocol):
    """Reader of subscriptions that a driver runs.

    loop: event loop in which `put` is called; None: the driver's thread calls it right after the step
    """

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None: ...

    def collect(self, subscription: Subscription, is_wanted: bool = False) -> list[Any]:
        """Return the new outputs of a subscription, if they are read now or `is_wanted`. Called in the
        engine's thread after each step; an error ends the subscription."""
        ...

    def put(self, delivery: Delivery) -> None: ...


class SlowReaderError(RuntimeError):
    """A reader has left too many tokens unread."""


class Mailbox:
    """Outputs of subscriptions on their way from the engine's thread to one reader in an event loop.

    Outputs are made when the reader waits for them. Outputs of several steps are then made as one, so a slow
    reader costs no memory.

    wake_driver: makes the engine's thread look for outputs
    take: returns the outputs of a subscription since its last call; called in the engine's thread until the
        subscription has ended, then in the reader's
    max_unread_tokens: number of a subscription's tokens that may be unread; None is no limit
    unfinished: subscriptions that have not ended
    """

    def __init__(
        self,
        wake_driver: Callable[[], None],
        take: Callable[[Subscription], list[Any]] = Subscription.take_outputs,
        max_unread_tokens: int | None = None,
    ):
        self.loop = asyncio.get_running_loop()
        self._wake_driver, self._take, self._max_unread_tokens = wake_driver, take, max_unread_tokens
        self.unfinished: list[Subscription] = []
        self._ended: list[Subscription] = []  # whose last outputs were not taken
        self._outputs: list[Any] = []
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None  # set while the reader waits
        # whose next outputs the reader waits for: the event loop adds, the engine's thread removes
        self._wanted: set[Subscription] = set()
        self._is_silent = False

    # ------------------------------------------------------------ in the engine's thread

    def collect(self, subscription: Subscription, is_wanted: bool = False) -> list[Any]:
        """Return the new outputs of a subscription if the reader waits for some or `is_wanted`, else [].
        Raises SlowReaderError if too many tokens are unread."""
        if is_wanted or subscription in self._wanted:
            if outputs := self._take(subscription):
                self._wanted.discard(subscription)
            return outputs
        limit = self._max_unread_tokens
        if limit is not None and subscription.num_unread_tokens > limit:
            raise SlowReaderError(
                f"{subscription.num_unread_tokens} tokens wait to be read, at most {limit} may"
            )
        return []

    # ------------------------------------------------------------ in the event loop

    def put(self, delivery: Delivery) -> None:
        """Take a delivery, and wake the reader."""
        self._outputs += delivery.outputs
        if delivery.is_last and delivery.subscription in self.unfinished:
            self.unfinished.remove(delivery.subscription)
            if not delivery.subscription.is_at_end and delivery.error is None:
                self._ended.append(delivery.subscription)
        if delivery.error is not None:
            return self.fail(delivery.error)
        self._is_silent = False
        self._wake()

    def fail(self, error: Exception) -> None:
        """Let the reader get an error, after the outputs before it."""
        self._error = self._error or error
        self._wake()

    def ping(self) -> None:
        """Wake the reader if nothing has come since the last ping."""
        if self._is_silent:
            self._wake()
        self._is_silent = True

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    @property
    def is_at_end(self) -> bool:
        """True if the reader has all outputs, and there is no error."""
        return not (self.unfinished or self._ended or self._outputs) and self._error is None

    async def get(self) -> list[Any]:
        """Wait for outputs, and return new ones; [] after a ping without any, or at the end.

        Raises the error of a subscription or of the engine, after the outputs before it.
        """
        if not (self._outputs or self._ended or self._error):
            self._wanted.update(self.unfinished)
            await self._wait()
        outputs, self._outputs = self._outputs, []
        if not outputs:
            ended, self._ended = self._ended, []  # the engine's thread does not change them any more
            outputs = [output for subscription in ended for output in self._take(subscription)]
        if self._error is not None and not outputs:
            raise self._error
        return outputs

    async def wait_end(self) -> None:
        """Wait until all subscriptions have ended. Their outputs are not taken. Raises as `get` does."""
        self._max_unread_tokens = None
        while self.unfinished and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    async def _wait(self) -> None:
        self._waiter = self.loop.create_future()
        self._wake_driver()
        await self._waiter
