"""The journal of a batch: answers on disk as they come, and the finished file made of them.

A journal is text: a header line that says which job it is of, then a line for each answer, `checksum {about}
TAB answer`. A line counts once it is whole and its checksum is right, so a process may be killed at any
instant: what was torn is cut off at the next start, what was damaged is skipped and counted. The finished
file appears by renaming, never half written.
"""

import itertools
import os
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

from ...host.files import PRIVATE, JobError, disk, is_named, lock, sync_folder, write_all

MAGIC = b"duetto-journal-1 "
BUFFER = 1 << 20  # bytes of answers that may wait for the disk between two steps
MISSING = -1
TOKEN = re.compile("[0-9a-f]{16}")
REMEDY = "remove it to begin anew, or choose another output"

Record = tuple[dict[str, Any], bytes]


@dataclass(frozen=True)
class Header:
    """Which job a journal is of: what decides its answers, when it was begun (ISO 8601), and a word that no
    other job has."""

    fingerprint: dict[str, str]
    started: str
    token: str = field(default_factory=lambda: secrets.token_hex(8))


class Journal:
    """The answers of one job that are on disk; one process at a time may have it open.

    Memory is 16 bytes for each line answered. Attributes: header (the one on disk), count (lines answered),
    damaged (records that cannot be read; their lines are not answered), products (of the engines that
    answered).
    """

    def __init__(self, path: Path, header: Header, lines: int = 1 << 24, mode: int = PRIVATE):
        """Opens the journal, or creates it with `mode`, and takes up what it holds of a job of `lines` lines.

        Raises JobError if another process has it, it is of another job, it is no journal, or the disk
        refuses; it is left as it is then.
        """
        self.path, self._lines = path, lines
        self._offsets, self._digests = array("q"), array("Q")
        self._waiting: list[tuple[int, int, bytes]] = []
        self._waiting_bytes = 0
        self.count = self.damaged = 0
        self.products: set[str] = set()
        with disk(path):
            self._descriptor = lock(path, mode)
        try:
            with disk(path):
                self.header, self._end = self._take_up(header)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def has(self, index: int, digest: int) -> bool:
        """Whether the line with this index is answered; `digest` tells whether it is still the line that was
        answered."""
        known = index < len(self._offsets) and self._offsets[index] != MISSING
        return known and self._digests[index] == digest

    def has_room(self) -> bool:
        """Whether another line may be begun: always, since answers do not stay in memory."""
        return True

    def append(self, index: int, digest: int, answer: bytes, about: Mapping[str, Any]) -> None:
        """Takes an answer, a line without its end; it is safe after the next `sync`."""
        record = record_of({"index": index, "digest": digest, **about}, answer)
        self._waiting.append((index, digest, record))
        self._waiting_bytes += len(record)
        if self._waiting_bytes > BUFFER:
            self.sync()

    def sync(self) -> None:
        """Puts what was appended on the disk. Raises JobError; the journal then ends with its last whole
        record."""
        if not self._waiting:
            return
        with disk(self.path):
            self._write(b"".join(record for _, _, record in self._waiting))
        for index, digest, record in self._waiting:
            self._note(index, digest, self._end)
            self._end += len(record)
        self._waiting, self._waiting_bytes = [], 0

    def answers(self, count: int) -> Iterator[Record]:
        """What is known about each of the `count` lines, and its answer, in their order."""
        assert self.count == count and not self._waiting, "the job is not finished"
        with disk(self.path), self._reader() as file:
            for index in range(count):
                file.seek(self._offsets[index])
                found = self._record(file.readline())
                if found is None or found[0]["index"] != index:
                    raise JobError(f"{self.path} was damaged while the job ran; run the same command again")
                yield found

    def remove(self) -> None:
        """Deletes the journal: its answers are elsewhere now, or it has none. What else has its name
        meanwhile stays."""
        if is_named(self._descriptor, self.path):
            self.path.unlink()
            sync_folder(self.path.parent)

    def _reader(self) -> BinaryIO:
        """The file itself, whatever has its name by now; one reader at a time."""
        file = open(os.dup(self._descriptor), "rb")  # noqa: SIM115 (it belongs to the caller)
        file.seek(0)
        return file

    def _take_up(self, header: Header) -> tuple[Header, int]:
        with self._reader() as file:
            begin = file.read(len(MAGIC))
            first = begin + (file.readline() if begin == MAGIC else b"")
            found = header_of(first)
            if found is None:
                self._check_torn(first, file)
                return header, self._begin(header)
            end = self._take_up_answers(file, len(first))
        differences = differing(found.fingerprint, header.fingerprint)
        if differences and (self.count or self.damaged):
            raise JobError(f"{self.path} holds answers of another job:\n{differences}\n{REMEDY}")
        if differences:
            return header, self._begin(header)
        os.ftruncate(self._descriptor, end)
        return found, end

    def _take_up_answers(self, lines: Iterator[bytes], end: int) -> int:
        """Notes the whole records, counts the others but a torn last one; returns where the last whole one
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
        """A record of this job; None if it is damaged, or says what no journal of it says."""
        found = about_and_answer(line)
        if found is None or not isinstance(found[0], dict):
            return None
        index, digest = found[0].get("index"), found[0].get("digest")
        if type(index) is not int or type(digest) is not int:
            return None
        return found if 0 <= digest < 1 << 64 and 0 <= index < self._lines else None

    def _check_torn(self, first: bytes, rest: BinaryIO) -> None:
        """Only the beginning of a header may be overwritten: it is what a kill at the first instant
        leaves."""
        torn = MAGIC.startswith(first) or (first.startswith(MAGIC) and b"\n" not in first)
        content = itertools.chain([first], iter(lambda: rest.read(BUFFER), b""))
        if torn or all(not piece.strip(b"\0") for piece in content):
            return
        if not first.startswith(MAGIC):
            raise JobError(f"{self.path} exists and is not a journal; {REMEDY}")
        whole = sum(self._record(line) is not None for line in rest)
        raise JobError(
            f"{self.path}: the first line, which says whose answers these are ({whole} whole ones), "
            f"is damaged; {REMEDY}"
        )

    def _begin(self, header: Header) -> int:
        os.ftruncate(self._descriptor, 0)
        self._end = 0
        line = MAGIC + record_of(msgspec.to_builtins(header), b"")
        self._write(line)
        sync_folder(self.path.parent)
        return len(line)

    def _write(self, data: bytes) -> None:
        try:
            os.lseek(self._descriptor, self._end, os.SEEK_SET)
            write_all(self._descriptor, data)
            os.fsync(self._descriptor)
        except BaseException:
            os.ftruncate(self._descriptor, self._end)
            raise

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
    """A record's two parts; None if it is torn or damaged."""
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
    """A line for each field in which two fingerprints differ; empty if they are equal."""
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return "\n".join(f"  {n}: was {was.get(n, 'not set')}, is {now.get(n, 'not set')}" for n in names)
