"""Messages to the user, and standard streams that may be closed or whose reader may be gone."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from functools import cache


def fill_closed_streams() -> None:
    """Open the null device under the number of each standard stream that is closed. Call it at the start.

    Otherwise a file that is opened later gets the number, and receives a library's messages to standard
    error. Python's standard input and output stay closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (it stays open)


class SafeStderr:
    """Standard error that suppresses errors of writing to it."""

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


def print_stderr(text: str) -> None:
    """Write a line to standard error."""
    print(text, file=SafeStderr(), flush=True)


@cache
def warn_once(text: str) -> None:
    """Log a warning once per process; logging writes it to standard error if the user has no handler."""
    logging.getLogger("duetto").warning("duetto: %s", text)


def error_headline(error: Exception) -> str:
    """Return an error's type and the first line of its message; a compiler's message may have hundreds."""
    line, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {line}"


@contextlib.contextmanager
def silence_stdout() -> Iterator[None]:
    """Discard the text that libraries write to standard output by its number: it is no result of a
    command."""
    saved, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
        os.close(nowhere)
