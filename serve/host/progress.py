"""Progress of a start on standard error: one line that is rewritten on a terminal or in a notebook, a few
plain lines elsewhere.

`telling(False)` silences the block that it manages. A standard error that is closed is no error.
"""

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TypeVar

from .streams import Messages

T = TypeVar("T")
EVERY = 10.0  # seconds between two plain lines
PATIENCE = 2.0  # seconds for which reading shows nothing
SHOWN = ContextVar("shown", default=True)


@contextmanager
def telling(yes: bool) -> Iterator[None]:
    """Show, or do not show, the stages that begin in the block."""
    before = SHOWN.set(yes)
    try:
        yield
    finally:
        SHOWN.reset(before)


def say(text: str) -> None:
    """Write one line."""
    if SHOWN.get():
        write(f"duetto: {text}\n")


@contextmanager
def stage(what: str, total: int, patience: float = 0.0) -> Iterator[Callable[[T], T]]:
    """Show `what: done/total` during the block. It gets a function that counts one more as done and returns
    its argument; any thread may call it.

    Nothing is shown of a stage that ends within `patience` seconds, or that has nothing to do.
    """
    line = ProgressLine(what, total, patience, SHOWN.get() and total > 0)
    line.show()
    try:
        yield line.advance
    finally:
        line.end()


def over(items: Collection[T], what: str, patience: float = 0.0) -> Iterator[T]:
    """Yield the items, as a stage in which each is done when the next is taken."""
    with stage(what, len(items), patience) as done:
        for item in items:
            yield item
            done(item)


class ProgressLine:
    """The line of one stage."""

    def __init__(self, what: str, total: int, patience: float, shown: bool):
        self.what, self.total, self.done, self.shown = what, total, 0, shown
        self.due = time.monotonic() + patience  # when it is written next
        self.written = -1  # `done` when it was written last
        self.rewritten = is_rewritable()
        self.lock = threading.Lock()

    def advance(self, result: T) -> T:
        with self.lock:
            self.done += 1
        self.show()
        return result

    def show(self, last: bool = False) -> None:
        """Write the line if it is due."""
        with self.lock:
            now, due = time.monotonic(), last and self.written >= 0
            if not self.shown or self.written == self.done or not (due or now >= self.due):
                return
            self.written, self.due = self.done, now + (0 if self.rewritten else EVERY)
            text = f"duetto: {self.what}: {self.done}/{self.total}"
            write(f"\r{text}" if self.rewritten else f"{text}\n")

    def end(self) -> None:
        self.show(last=True)
        if self.written >= 0 and self.rewritten:
            write("\n")


def is_rewritable() -> bool:
    with suppress(AttributeError, ValueError):  # there is none, or it is closed
        return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
    return False


def write(text: str) -> None:
    messages = Messages()
    messages.write(text)
    messages.flush()
