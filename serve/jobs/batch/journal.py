"""The journal of a batch job: answers on disk as they come, from which the finished file is made.

A journal is text: a header line that identifies the job, then a line for each answer, `checksum {about} TAB
answer`. A line counts if it is whole and its checksum is right, so that a process may be killed at any
instant: the next start cuts off a torn last line, and skips and counts damaged ones.
"""

import itertools
import re
import secrets
import zlib
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Self

import msgspec

from ...host.append_log import AppendLog
from ...host.files import PRIVATE, JobError, disk, sync_folder

MAGIC = b"duetto-journal-1 "
BUFFER = 1 << 20  # bytes of answers that may wait for the disk between two steps
MISSING = -1
TOKEN = re.compile("[0-9a-f]{16}")
REMEDY = "remove it to begin anew, or choose another output"

Record = tuple[dict[str, Any], bytes]


@dataclass(frozen=True)
class Header:
    """Identity of a journal's job; no other job has its `token`."""

    fingerprint: dict[str, str]  # all that decides its answers
    started: str  # time of its first start, ISO 8601
    token: str = field(default_factory=lambda: secrets.token_hex(8))


class Journal:
    """The answers of one job that are on disk; one process at a time may have it open.

    `count` lines are answered, by engines with these `products`, at 16 bytes of memory each. The lines of
    `damaged` records are not answered.
    """

    def __init__(self, path: Path, header: Header, lines: int = 1 << 24, mode: int = PRIVATE):
        """Open the journal, or create it with `mode`, and read its answers to a job of `lines` lines.

        Raises JobError, and leaves the file as it is, if another process has it, it is of another job, it is
        no journal, or it cannot be read.
        """
        self._lines = lines
        self._offsets, self._digests = array("q"), array("Q")
        self._waiting: list[tuple[int, int, bytes]] = []
        self._waiting_bytes = 0
        self.count = self.damaged = 0
        self.products: set[str] = set()
        with disk(path):
            self._log = AppendLog(path, mode)
        try:
            with disk(path):
                self.header = self._take_up(header)
        except BaseException:
            self._log.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()

    def has(self, index: int, digest: int) -> bool:
        """Return whether the line with this index and this `digest` of its text is answered."""
        known = index < len(self._offsets) and self._offsets[index] != MISSING
        return known and self._digests[index] == digest

    def has_room(self) -> bool:
        """Return True: answers do not stay in memory."""
        return True

    def append(self, index: int, digest: int, answer: bytes, about: Mapping[str, Any]) -> None:
        """Add an answer, a line without its end; it is on the disk after the next `sync`."""
        record = record_of({"index": index, "digest": digest, **about}, answer)
        self._waiting.append((index, digest, record))
        self._waiting_bytes += len(record)
        if self._waiting_bytes > BUFFER:
            self.sync()

    def sync(self) -> None:
        """Write the added answers to the disk. Raises JobError; the journal then ends with its last whole
        record."""
        if not self._waiting:
            return
        offset = self._log.end
        with disk(self._log.path):
            self._log.append(b"".join(record for _, _, record in self._waiting), durable=True)
        for index, digest, record in self._waiting:
            self._note(index, digest, offset)
            offset += len(record)
        self._waiting, self._waiting_bytes = [], 0

    def answers(self, count: int) -> Iterator[Record]:
        """Yield the facts about each of `count` lines, and its answer, in their order. Raises JobError."""
        assert self.count == count and not self._waiting, "the job is not finished"
        path = self._log.path
        with disk(path), self._log.reader() as file:
            for index in range(count):
                file.seek(self._offsets[index])
                found = self._record(file.readline())
                if found is None or found[0]["index"] != index:
                    raise JobError(f"{path} was damaged while the job ran; run the same command again")
                yield found

    def remove(self) -> None:
        """Delete the journal: its answers are elsewhere now, or it has none."""
        self._log.remove()

    def _take_up(self, header: Header) -> Header:
        with self._log.reader() as file:
            begin = file.read(len(MAGIC))
            first = begin + (file.readline() if begin == MAGIC else b"")
            found = header_of(first)
            if found is None:
                self._check_torn(first, file)
                return self._begin(header)
            end = self._take_up_answers(file, len(first))
        differences = differing(found.fingerprint, header.fingerprint)
        if differences and (self.count or self.damaged):
            raise JobError(f"{self._log.path} holds answers of another job:\n{differences}\n{REMEDY}")
        if differences:
            return self._begin(header)
        self._log.cut(end)
        return found

    def _take_up_answers(self, lines: Iterator[bytes], end: int) -> int:
        """Index the whole records, and count the others but a torn last one; return where the last whole one
        ends."""
        bad, line, offset = 0, b"\n", end
        for line in lines:
            record = self._record(line)
            if record is None:
                bad += 1
            else:
                self._note(record[0]["index"], record[0]["digest"], offset)
                if "products" in record[0]:
                    self.products.add(str(record[0]["products"]))
                end, self.damaged, bad = offset + len(line), self.damaged + bad, 0
            offset += len(line)
        self.damaged += bad - (not line.endswith(b"\n"))
        return end

    def _record(self, line: bytes) -> Record | None:
        """Return a record of this job; None if it is damaged, or no journal of the job can hold it."""
        found = about_and_answer(line)
        if found is None or not isinstance(found[0], dict):
            return None
        index, digest = found[0].get("index"), found[0].get("digest")
        if type(index) is not int or type(digest) is not int:
            return None
        return found if 0 <= digest < 1 << 64 and 0 <= index < self._lines else None

    def _check_torn(self, first: bytes, rest: BinaryIO) -> None:
        """Raise JobError unless the file is empty or the beginning of a header, as a kill at the first
        instant leaves it."""
        torn = MAGIC.startswith(first) or (first.startswith(MAGIC) and b"\n" not in first)
        content = itertools.chain([first], iter(lambda: rest.read(BUFFER), b""))
        if torn or all(not piece.strip(b"\0") for piece in content):
            return
        if not first.startswith(MAGIC):
            raise JobError(f"{self._log.path} exists and is not a journal; {REMEDY}")
        whole = sum(self._record(line) is not None for line in rest)
        raise JobError(
            f"{self._log.path}: the first line, which says whose answers these are ({whole} whole ones), "
            f"is damaged; {REMEDY}"
        )

    def _begin(self, header: Header) -> Header:
        self._log.cut(0)
        self._log.append(MAGIC + record_of(msgspec.to_builtins(header), b""), durable=True)
        sync_folder(self._log.path.parent)
        return header

    def _note(self, index: int, digest: int, offset: int) -> None:
        missing = index + 1 - len(self._offsets)
        if missing > 0:
            self._offsets.extend([MISSING] * missing)
            self._digests.extend([0] * missing)
        self.count += self._offsets[index] == MISSING
        self._offsets[index], self._digests[index] = offset, digest


def record_of(about: Any, answer: bytes) -> bytes:
    content = msgspec.json.encode(about) + b"\t" + answer
    assert b"\n" not in content
    return b"%08x %s\n" % (zlib.crc32(content), content)


def about_and_answer(line: bytes) -> Record | None:
    """Return a record's two parts; None if it is torn or damaged."""
    checksum, _, content = line[:-1].partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(content):
        return None
    about, _, answer = content.partition(b"\t")
    try:
        return msgspec.json.decode(about), answer
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested without end
        return None


def header_of(line: bytes) -> Header | None:
    found = about_and_answer(line.removeprefix(MAGIC)) if line.startswith(MAGIC) else None
    try:
        header = None if found is None else msgspec.convert(found[0], Header)
        if header is not None:
            datetime.fromisoformat(header.started)
    except ValueError:  # msgspec's are too
        return None
    return header if header and TOKEN.fullmatch(header.token) else None


def differing(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a line for each field in which two fingerprints differ; "" if they are equal."""
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return "\n".join(f"  {n}: was {was.get(n, 'not set')}, is {now.get(n, 'not set')}" for n in names)
