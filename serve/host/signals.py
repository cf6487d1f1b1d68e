"""Ctrl-C ends the process at once while there is nothing to lose; later Ctrl-C and SIGTERM raise one
exception at the end of a step."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """A signal to end the process.

    code: exit code, 128 plus the signal's number.
    hint: advice for the user, or "".
    """

    hint = ""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.code = 128 + signum


def exit_on_signal(signum: int, frame: FrameType | None) -> NoReturn:
    """End the process without an exception, which a module that is being imported might swallow."""
    with contextlib.suppress(OSError):
        os.write(2, b"duetto: interrupted\n")
    os._exit(128 + signum)


def install_exit_handler() -> None:
    """Let Ctrl-C end the process with one line and exit code 130, unless the caller ignores it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_on_signal)


def restore_interrupt_handler() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, so that what begins now can be cleaned up. Other handlers
    stay."""
    if signal.getsignal(signal.SIGINT) is exit_on_signal:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Interrupts:
    """Context in which SIGNALS raise Interrupted: at once, or after a block of `defer_signals`; a second
    one at once.

    It does nothing outside the main thread, where Python allows no handlers.
    """

    def __init__(self):
        self._deferring = False
        self._pending: int | None = None
        self._previous: list = []

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = [(s, signal.signal(s, self._on_signal)) for s in SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous:
            signal.signal(signum, handler)

    @contextlib.contextmanager
    def defer_signals(self) -> Iterator[None]:
        """Let the block finish after a first signal. Raises Interrupted afterwards."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        self.raise_pending()

    def raise_pending(self) -> None:
        """Raise Interrupted if a signal came and the interrupted work continued regardless."""
        if self._pending is not None:
            raise Interrupted(self._pending)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        at_once = not self._deferring or self._pending is not None
        self._pending = signum
        if at_once:
            raise Interrupted(signum)


@contextlib.contextmanager
def defer_interrupt() -> Iterator[list[int]]:
    """Defer a first Ctrl-C to the end of the block, which gets the list of deferred signals; a second one is
    raised at once.

    It does so only if Python would raise KeyboardInterrupt: in the main thread, without a handler of the
    program's.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield []
        return
    pending: list[int] = []

    def on_interrupt(signum, frame):
        if pending:
            signal.default_int_handler(signum, frame)
        pending.append(signum)

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield pending
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if pending:
            raise KeyboardInterrupt
