"""Lines of JSON each of which has the hash of the one before it, so that a line which was changed, moved or
removed is found.

A line counts once it has its end. The next start ends what a killed process has left of one, and notes how
many bytes that is: it is no line of the chain.
"""

import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from ...host.append_log import AppendLog
from ...host.files import JobError
from ...host.streams import warn

HEAD = b'{"prev":"'  # of every line
FIRST = "0" * 64  # the hash before the first line
START = "start"  # the kind of a process's first line


@dataclass(frozen=True)
class ChainLine:
    """A line of a chain; one that a killed process has left has no hash and an empty record."""

    number: int  # in the file, from 1
    hash: str  # SHA-256
    record: Mapping[str, Any]
    wrong: str = ""  # error of its place in the chain


class ChainWriter:
    """Appends records to a file. `hash` is the SHA-256 of the last line, `cut_off` the bytes that a killed
    process has left behind it."""

    def __init__(self, path: Path):
        """Raises ValueError if another process writes to the file, if it cannot be opened, or if it is no
        chain, OSError if it cannot be read."""
        try:
            self._log = AppendLog(path)
        except (JobError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"audit_log {str(path)!r} is not allowed: {reason}") from None
        self.cut_off, self.hash = 0, FIRST
        try:
            self._check_mode(path)
            self._take_up(path)
        except BaseException:
            self.close()
            raise

    def _check_mode(self, path: Path) -> None:
        if (mode := self._log.mode) & stat.S_IROTH:
            warn(f"audit_log {path}: others may read it (mode {mode:04o}), and prompts are in it: chmod 600")

    def _take_up(self, path: Path) -> None:
        line = b"\n"
        with self._log.reader() as file:
            if not HEAD.startswith(file.read(len(HEAD))):
                raise ValueError(f"audit_log {str(path)!r} is a file of something else: choose another")
            file.seek(0)
            for line in file:
                content = line.removesuffix(b"\n")
                if record_of(content):
                    self.cut_off, self.hash = 0, hash_of(content)
                else:
                    self.cut_off += len(content)
        if not line.endswith(b"\n"):
            self._log.append(b"\n")

    def append(self, record: Mapping[str, Any]) -> str:
        """Write a record as a line; return its hash. Raises OSError."""
        line = msgspec.json.encode({"prev": self.hash, **record})
        self._log.append(line + b"\n")
        self.hash = hash_of(line)
        return self.hash

    def close(self) -> None:
        self._log.close()


def read(path: Path) -> Iterator[ChainLine]:
    """Yield the lines of a file in their order. Raises OSError."""
    before, unread = FIRST, 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.removesuffix(b"\n")
            record = record_of(line) if line != raw else None
            if record is None:
                unread += len(line)
                yield ChainLine(number, "", {})
                continue
            known = record.get("cut_off", 0) if record.get("kind") == START else 0
            wrong = "" if record["prev"] == before else "what stood before it was changed, moved or taken out"
            if unread != known:
                wrong = wrong or "what stands before it cannot be read"
            before, unread = hash_of(line), 0
            yield ChainLine(number, before, record, wrong)


def record_of(line: bytes) -> dict[str, Any] | None:
    """Return the content of a chain's line; None for anything else."""
    try:
        found = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("prev"), str) else None


def hash_of(line: bytes) -> str:
    return sha256(line).hexdigest()
