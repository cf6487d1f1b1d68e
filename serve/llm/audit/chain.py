"""Lines of JSON each of which has the hash of the one before it, so that a line which was changed, moved or
taken out is found.

A line counts once it has its end. What a killed process has left of one is ended by the next start, which
says so: it is no line then, and not in the chain.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from ...host.files import JobError, lock, write_all
from ...host.store import warn

HEAD = b'{"prev":"'  # of every line
FIRST = "0" * 64  # the hash before the first line
START = "start"  # the kind of a process's first line


@dataclass(frozen=True)
class ChainLine:
    """A line by its number from 1 on: its hash, its record, and what is wrong with its place in the chain.

    Of what a killed process has left the record is empty.
    """

    number: int
    hash: str
    record: Mapping[str, Any]
    wrong: str = ""


class ChainWriter:
    """Appends records to a file. Raises ValueError where another process writes to it, where it is no file
    that can be opened, or no such chain, OSError where the disk refuses."""

    def __init__(self, path: Path):
        try:
            self._descriptor = lock(path)
        except (JobError, OSError) as error:
            told = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"audit_log {str(path)!r} is not allowed: {told}") from None
        if (mode := stat.S_IMODE(os.fstat(self._descriptor).st_mode)) & stat.S_IROTH:
            warn(f"audit_log {path}: others may read it (mode {mode:04o}), and prompts are in it: chmod 600")
        try:
            self.cut_off, self.hash = self._taken_up(path)
        except BaseException:
            self.close()
            raise

    def _taken_up(self, path: Path) -> tuple[int, str]:
        """Bytes that a killed process has left behind the last line, and that one's hash."""
        content = path.read_bytes()
        if not HEAD.startswith(content[: len(HEAD)]):
            raise ValueError(f"audit_log {str(path)!r} is a file of something else: choose another")
        os.lseek(self._descriptor, 0, os.SEEK_END)
        if content and not content.endswith(b"\n"):
            write_all(self._descriptor, b"\n")
        cut_off, last = 0, FIRST
        for line in content.splitlines():
            cut_off, last = (0, hash_of(line)) if record_of(line) else (cut_off + len(line), last)
        return cut_off, last

    def append(self, record: Mapping[str, Any]) -> str:
        """Write a record as a line; its hash."""
        line = msgspec.json.encode({"prev": self.hash, **record})
        write_all(self._descriptor, line + b"\n")
        self.hash = hash_of(line)
        return self.hash

    def close(self) -> None:
        os.close(self._descriptor)


def read(path: Path) -> Iterator[ChainLine]:
    """The lines of a file in their order. Raises OSError."""
    before, left = FIRST, 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.removesuffix(b"\n")
            record = record_of(line) if line != raw else None
            if record is None:
                left += len(line)
                yield ChainLine(number, "", {})
                continue
            told = record.get("cut_off", 0) if record.get("kind") == START else 0
            wrong = "" if record["prev"] == before else "what stood before it was changed, moved or taken out"
            if left != told:
                wrong = wrong or "what stands before it cannot be read"
            before, left = hash_of(line), 0
            yield ChainLine(number, before, record, wrong)


def record_of(line: bytes) -> dict[str, Any] | None:
    """What a line of a chain holds; None for anything else."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("prev"), str) else None


def hash_of(line: bytes) -> str:
    return sha256(line).hexdigest()
