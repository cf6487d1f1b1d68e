"""Ctrl-C ends the process at once while there is nothing to lose; later Ctrl-C and SIGTERM raise one
exception, which waits until a step is done."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The process was asked to end. `code` is its exit code by the shell's convention, `hint` what the user
    may do then."""

    hint = ""

    def __init__(self, signum: int):
        super().__init__(signal.Signals(signum).name)
        self.code = 128 + signum


def leave(signum: int, frame: FrameType | None) -> NoReturn:
    """A handler that ends the process without an exception, which a module that is being imported might
    swallow."""
    with contextlib.suppress(OSError):
        os.write(2, b"duetto: interrupted\n")
    os._exit(128 + signum)


def leave_on_interrupt() -> None:
    """From here on Ctrl-C ends the process with one line and 130, unless the caller has it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


def raise_on_interrupt() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt: what is begun now must be put away. Other handlers
    stay."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Interrupts:
    """While it is entered, the signals raise Interrupted: at once, or after `deferred` work; a second one at
    once.

    Outside the main thread, where Python allows no handlers, it does nothing.
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
    def deferred(self) -> Iterator[None]:
        """Work that a first signal lets finish. Raises Interrupted afterwards."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
        self.check()

    def check(self) -> None:
        """Raises Interrupted if a signal came and what it interrupted went on all the same."""
        if self._pending is not None:
            raise Interrupted(self._pending)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        at_once = not self._deferring or self._pending is not None
        self._pending = signum
        if at_once:
            raise Interrupted(signum)


@contextlib.contextmanager
def uninterrupted() -> Iterator[list[int]]:
    """Hold Ctrl-C back until the block is done, which is given what has been heard by then; a second one
    comes through at once.

    Only where Python itself would raise KeyboardInterrupt: in the main thread, unless the program handles the
    signal.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield []
        return
    heard: list[int] = []

    def hold(signum, frame):
        if heard:
            signal.default_int_handler(signum, frame)
        heard.append(signum)

    signal.signal(signal.SIGINT, hold)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if heard:
            raise KeyboardInterrupt
