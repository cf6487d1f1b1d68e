"""What a start is doing, on standard error: one line that is rewritten on a terminal or in a notebook, a few
plain lines elsewhere.

`telling(False)` silences it for whatever runs inside. A standard error that is closed is no error.
"""

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
EVERY = 10.0  # seconds between two plain lines
PATIENCE = 2.0  # seconds that reading may take without a word
TOLD = ContextVar("told", default=True)


@contextmanager
def telling(yes: bool) -> Iterator[None]:
    """Whether stages that begin inside are told of."""
    before = TOLD.set(yes)
    try:
        yield
    finally:
        TOLD.reset(before)


def say(text: str) -> None:
    """Tell one line."""
    if TOLD.get():
        write(f"duetto: {text}\n")


@contextmanager
def stage(what: str, total: int, patience: float = 0.0) -> Iterator[Callable[[T], T]]:
    """Tells `what: done/total` while something is done: each call of what is yielded, from any thread, counts
    one more as done, and returns what it is given.

    Nothing is told of a stage that is over within `patience` seconds, or that has nothing to do.
    """
    line = ProgressLine(what, total, patience, TOLD.get() and total > 0)
    line.tell()
    try:
        yield line.advance
    finally:
        line.end()


def over(items: Collection[T], what: str, patience: float = 0.0) -> Iterator[T]:
    """The items, as a stage in which each counts as done when the next is asked for."""
    with stage(what, len(items), patience) as done:
        for item in items:
            yield item
            done(item)


class ProgressLine:
    """One stage's line."""

    def __init__(self, what: str, total: int, patience: float, shown: bool):
        self.what, self.total, self.done, self.shown = what, total, 0, shown
        self.due = time.monotonic() + patience  # when to tell next
        self.told = -1  # how many were done then
        self.rewritten = is_rewritable()
        self.lock = threading.Lock()

    def advance(self, result: T) -> T:
        with self.lock:
            self.done += 1
        self.tell()
        return result

    def tell(self, last: bool = False) -> None:
        """Write the line where that is due."""
        with self.lock:
            now, due = time.monotonic(), last and self.told >= 0
            if not self.shown or self.told == self.done or not (due or now >= self.due):
                return
            self.told, self.due = self.done, now + (0 if self.rewritten else EVERY)
            text = f"duetto: {self.what}: {self.done}/{self.total}"
            write(f"\r{text}" if self.rewritten else f"{text}\n")

    def end(self) -> None:
        self.tell(last=True)
        if self.told >= 0 and self.rewritten:
            write("\n")


def is_rewritable() -> bool:
    with suppress(AttributeError, ValueError):  # there is none, or it is closed
        return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
    return False


def write(text: str) -> None:
    with suppress(AttributeError, ValueError, OSError):
        sys.stderr.write(text)
        sys.stderr.flush()
