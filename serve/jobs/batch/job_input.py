"""The input of a batch: a file of lines that can be read twice, identified by its hash."""

import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Self

from ...host.files import JobError, wrap_os_errors
from .lines import LineReader, RawLine, has_grammar_field


@dataclass(frozen=True)
class JobInput:
    """A job's input as it was at the start. Bytes that are appended later are not read; later changes are
    refused."""

    file: BinaryIO
    size: int  # bytes
    max_line_bytes: int  # maximum bytes of a line
    sha256: str
    num_lines: int  # lines that are not blank
    origin: os.stat_result | None  # status of the file that it was read from; None if unknown
    has_grammars: bool = False  # a line constrains its output

    @classmethod
    def open(cls, name: str, max_line_bytes: int) -> Self:
        """Open the file `name` and read it once, to hash it and to count its lines. `-` is standard input.

        Standard input and pipes cannot be read twice: they are copied to a temporary file. Raises JobError.
        """
        with wrap_os_errors("standard input" if name == "-" else name):
            file, size, origin = open_rereadable(name)
            reader = LineReader(file, size, max_line_bytes)
            num_lines, has_grammars = 0, False
            for line in reader:
                num_lines += 1
                has_grammars = has_grammars or has_grammar_field(line.text)
        return cls(file, size, max_line_bytes, reader.sha256.hexdigest(), num_lines, origin, has_grammars)

    def read_lines(self) -> Iterator[RawLine]:
        """Yield the lines. Raises JobError at the end if the file has changed since it was opened."""
        self.file.seek(0)
        reader = LineReader(self.file, self.size, self.max_line_bytes)
        yield from reader
        if reader.sha256.hexdigest() != self.sha256:
            raise JobError(
                "the input was changed while the job ran; run it again with the input as it is to be"
            )

    def is_same_file(self, other: os.stat_result) -> bool:
        """Return whether `other` is the status of the regular file that the input was read from."""
        return (
            stat.S_ISREG(other.st_mode) and self.origin is not None and os.path.samestat(self.origin, other)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()


def open_rereadable(name: str) -> tuple[BinaryIO, int, os.stat_result | None]:
    """Open `name` as a file that can be read twice. Returns it, its size in bytes, and the status of the
    original."""
    if name == "-":
        if sys.stdin is None:
            raise JobError("standard input is closed")
        return *spool_to_file(sys.stdin.buffer), stream_status(sys.stdin.buffer)
    file = open(name, "rb")  # noqa: SIM115 (it belongs to the caller)
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode):
        return file, status.st_size, status
    with file:
        return *spool_to_file(file), status


def stream_status(stream: BinaryIO) -> os.stat_result | None:
    try:
        return os.fstat(stream.fileno())
    except OSError:
        return None


def spool_to_file(stream: BinaryIO) -> tuple[BinaryIO, int]:
    file = tempfile.TemporaryFile()  # noqa: SIM115 (it belongs to the caller)
    shutil.copyfileobj(stream, file, 1 << 20)
    size = file.tell()
    file.seek(0)
    return file, size


def hash_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
