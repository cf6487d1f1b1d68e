"""Progress of a start on standard error: one line that is rewritten on a terminal or in a notebook, a few
plain lines elsewhere.

`progress_enabled(False)` silences the block that it manages. A standard error that is closed is no error.
"""

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import TypeVar

from .streams import SafeStderr

T = TypeVar("T")
LINE_SECONDS = 10.0  # seconds between two plain lines
PATIENCE_SECONDS = 2.0  # seconds until the progress of reading is shown
IS_SHOWN = ContextVar("shown", default=True)


@contextmanager
def progress_enabled(is_enabled: bool) -> Iterator[None]:
    """Show the progress of stages that begin in the block, if `is_enabled`; else hide it."""
    before = IS_SHOWN.set(is_enabled)
    try:
        yield
    finally:
        IS_SHOWN.reset(before)


def write_progress_line(text: str) -> None:
    """Write one line of progress to standard error."""
    if IS_SHOWN.get():
        write_stderr(f"duetto: {text}\n")


@contextmanager
def show_stage(what: str, total: int, patience: float = 0.0) -> Iterator[Callable[[T], T]]:
    """Show `what: done/total` during the block, which gets a function that counts one more as done.

    The function returns its argument, and any thread may call it. Nothing is shown if the stage ends within
    `patience` seconds, or if `total` is 0.
    """
    line = ProgressLine(what, total, patience, IS_SHOWN.get() and total > 0)
    line.write_if_due()
    try:
        yield line.advance
    finally:
        line.end()


def track_items(items: Collection[T], what: str, patience: float = 0.0) -> Iterator[T]:
    """Yield the items, and show how many are done; an item is done when the next is taken."""
    with show_stage(what, len(items), patience) as done:
        for item in items:
            yield item
            done(item)


class ProgressLine:
    """Progress line of one stage.

    next_time: time at which the line is written next.
    last_written: count that was written last; -1 before the first.
    is_rewritten: True if the line is overwritten in place, False for a line each time.
    """

    def __init__(self, what: str, total: int, patience: float, is_shown: bool):
        self.what, self.total, self.done, self.is_shown = what, total, 0, is_shown
        self.next_time = time.monotonic() + patience
        self.last_written = -1
        self.is_rewritten = is_rewritable()
        self.lock = threading.Lock()

    def advance(self, result: T) -> T:
        with self.lock:
            self.done += 1
        self.write_if_due()
        return result

    def write_if_due(self, is_last: bool = False) -> None:
        """Write the line if it is due."""
        with self.lock:
            now, is_due = time.monotonic(), is_last and self.last_written >= 0
            if not self.is_shown or self.last_written == self.done or not (is_due or now >= self.next_time):
                return
            self.last_written, self.next_time = self.done, now + (0 if self.is_rewritten else LINE_SECONDS)
            text = f"duetto: {self.what}: {self.done}/{self.total}"
            write_stderr(f"\r{text}" if self.is_rewritten else f"{text}\n")

    def end(self) -> None:
        self.write_if_due(is_last=True)
        if self.last_written >= 0 and self.is_rewritten:
            write_stderr("\n")


def is_rewritable() -> bool:
    """Return True if standard error is a terminal or a notebook, where a line can be overwritten."""
    with suppress(AttributeError, ValueError):  # no standard error, or a closed one
        return sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.")
    return False


def write_stderr(text: str) -> None:
    """Write text to standard error, without errors."""
    messages = SafeStderr()
    messages.write(text)
    messages.flush()
