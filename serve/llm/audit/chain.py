"""Hash chain of JSON lines: each line has the hash of the line before it. So a change, a move or a removal of
a line is found.

A line counts once it has its newline. A killed process may leave an incomplete line, which is no line of the
chain. The next start ends it with a newline, and records its number of bytes.
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
from ...host.streams import warn_once

LINE_PREFIX = b'{"prev":"'  # first bytes of every line
FIRST_HASH = "0" * 64  # hash that the first line has in place of a line before it
START_KIND = "start"  # kind of a process's first line


@dataclass(frozen=True)
class ChainLine:
    """A line of a chain. An incomplete line, left by a killed process, has no hash and an empty record."""

    number: int  # in the file, from 1
    hash: str  # SHA-256
    record: Mapping[str, Any]
    error: str = ""  # error of its position in the chain; empty if it has none


class ChainWriter:
    """Appends records to a file.

    hash: SHA-256 of the last line
    cut_off_bytes: bytes of incomplete lines behind it, left by killed processes
    """

    def __init__(self, path: Path):
        """Open or create the file. Raises ValueError if another process writes to it, if it cannot be opened,
        or if it is no chain; OSError if it cannot be read."""
        try:
            self._log = AppendLog(path)
        except (JobError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"audit_log {str(path)!r} is not allowed: {reason}") from None
        self.cut_off_bytes, self.hash = 0, FIRST_HASH
        try:
            self._warn_if_world_readable(path)
            self._resume_chain(path)
        except BaseException:
            self.close()
            raise

    def _warn_if_world_readable(self, path: Path) -> None:
        if (mode := self._log.mode) & stat.S_IROTH:
            warn_once(
                f"audit_log {path}: others may read it (mode {mode:04o}), and prompts are in it: chmod 600"
            )

    def _resume_chain(self, path: Path) -> None:
        line = b"\n"
        with self._log.open_reader() as file:
            if not LINE_PREFIX.startswith(file.read(len(LINE_PREFIX))):
                raise ValueError(f"audit_log {str(path)!r} is a file of something else: choose another")
            file.seek(0)
            for line in file:
                content = line.removesuffix(b"\n")
                if parse_chain_record(content):
                    self.cut_off_bytes, self.hash = 0, hash_line(content)
                else:
                    self.cut_off_bytes += len(content)
        if not line.endswith(b"\n"):
            self._log.append(b"\n")

    def append(self, record: Mapping[str, Any]) -> str:
        """Write a record as a line. Returns the line's hash. Raises OSError."""
        line = msgspec.json.encode({"prev": self.hash, **record})
        self._log.append(line + b"\n")
        self.hash = hash_line(line)
        return self.hash

    def close(self) -> None:
        self._log.close()


def verify_chain_lines(path: Path) -> Iterator[ChainLine]:
    """Yield the lines of a chain in order, each with its error if it has one. Raises OSError."""
    previous_hash, unread_bytes = FIRST_HASH, 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            line = raw.removesuffix(b"\n")
            record = parse_chain_record(line) if line != raw else None
            if record is None:
                unread_bytes += len(line)
                yield ChainLine(number, "", {})
                continue
            reported_bytes = record.get("cut_off", 0) if record.get("kind") == START_KIND else 0
            wrong = (
                ""
                if record["prev"] == previous_hash
                else "what stood before it was changed, moved or taken out"
            )
            if unread_bytes != reported_bytes:
                wrong = wrong or "what stands before it cannot be read"
            previous_hash, unread_bytes = hash_line(line), 0
            yield ChainLine(number, previous_hash, record, wrong)


def parse_chain_record(line: bytes) -> dict[str, Any] | None:
    """Parse a line of a chain. Returns None for any other line."""
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("prev"), str) else None


def hash_line(line: bytes) -> str:
    return sha256(line).hexdigest()
