"""The input of a batch: a file of lines that can be read twice, known by its hash."""

import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Self

from ...host.files import JobError, disk
from .lines import LineReader, RawLine, asks_for_grammar


@dataclass(frozen=True)
class JobInput:
    """A job's input as it was at the start: later additions are not read, later changes are refused."""

    file: BinaryIO
    size: int  # bytes
    limit: int  # most bytes of a line
    sha256: str
    count: int  # lines that are not blank
    origin: os.stat_result | None  # of the file that it was read from, if that is known
    has_grammars: bool = False  # a line constrains its output

    @classmethod
    def open(cls, name: str, limit: int) -> Self:
        """Read a file once, to hash it and to count its lines. `-` is standard input.

        Standard input and pipes, which cannot be read twice, are copied to a temporary file. Raises JobError.
        """
        with disk("standard input" if name == "-" else name):
            file, size, origin = rereadable(name)
            reader = LineReader(file, size, limit)
            count, has_grammars = 0, False
            for line in reader:
                count += 1
                has_grammars = has_grammars or asks_for_grammar(line.text)
        return cls(file, size, limit, reader.sha256.hexdigest(), count, origin, has_grammars)

    def lines(self) -> Iterator[RawLine]:
        """Yield the lines. Raises JobError at the end if the file has changed since it was opened."""
        self.file.seek(0)
        reader = LineReader(self.file, self.size, self.limit)
        yield from reader
        if reader.sha256.hexdigest() != self.sha256:
            raise JobError(
                "the input was changed while the job ran; run it again with the input as it is to be"
            )

    def is_file(self, other: os.stat_result) -> bool:
        """Return whether a regular file is the one that the input was read from."""
        return (
            stat.S_ISREG(other.st_mode) and self.origin is not None and os.path.samestat(self.origin, other)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def rereadable(name: str) -> tuple[BinaryIO, int, os.stat_result | None]:
    """Return a file open for reading, its size, and the status of the original."""
    if name == "-":
        if sys.stdin is None:
            raise JobError("standard input is closed")
        return *spooled(sys.stdin.buffer), status_of(sys.stdin.buffer)
    file = open(name, "rb")  # noqa: SIM115 (it belongs to the caller)
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode):
        return file, status.st_size, status
    with file:
        return *spooled(file), status


def status_of(stream: BinaryIO) -> os.stat_result | None:
    try:
        return os.fstat(stream.fileno())
    except OSError:
        return None


def spooled(stream: BinaryIO) -> tuple[BinaryIO, int]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 (it belongs to the caller)
    shutil.copyfileobj(stream, file, 1 << 20)
    size = file.tell()
    file.seek(0)
    return file, size


def file_hash(path: str | os.PathLike[str]) -> str:
    """SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
