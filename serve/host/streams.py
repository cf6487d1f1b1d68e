"""Standard streams that may be closed, or whose reader may be gone."""

import contextlib
import os
import sys
from collections.abc import Iterator


def keep_numbers() -> None:
    """For the start of a process: no file that is opened later gets the number of a standard stream that is
    closed.

    Else what a library writes to number 2 would land in it. Messages then go nowhere; the other two stay
    closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest free number
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (it stays open)


class Messages:
    """Standard error; errors of writing to it are ignored."""

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
    """Tells the user on standard error."""
    print(text, file=Messages(), flush=True)


@contextlib.contextmanager
def silent_stdout() -> Iterator[None]:
    """What libraries write to standard output by its number is dropped: it is not what a command answers."""
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)
