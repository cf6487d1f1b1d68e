"""Messages to the user, and standard streams that may be closed or whose reader may be gone."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from functools import cache


def keep_numbers() -> None:
    """Open the null device under the number of each standard stream that is closed, at a process's start.

    Otherwise a file that is opened later would get the number, and what a library writes to standard error
    would land in it. Python's standard input and output stay closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (it stays open)


class Messages:
    """Standard error, without errors of writing to it."""

    @property
    def encoding(self) -> str:
        return getattr(sys.stderr, "encoding", None) or "ascii"

    def write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no reader, closed, none at all
            sys.stderr.write(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.flush()

    def fileno(self) -> int:
        return sys.stderr.fileno()


def tell(text: str) -> None:
    """Write a line to standard error."""
    print(text, file=Messages(), flush=True)


@cache
def warn(text: str) -> None:
    """Log a warning once per process; logging writes it to standard error if the user has no handler."""
    logging.getLogger("duetto").warning("duetto: %s", text)


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message: a compiler's may have hundreds."""
    line, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {line}"


@contextlib.contextmanager
def silent_stdout() -> Iterator[None]:
    """Drop what libraries write to standard output by its number: it is not a command's result."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
