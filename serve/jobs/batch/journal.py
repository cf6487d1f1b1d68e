"""The journal of a batch job: answers on disk in order of completion. The finished file is made from it.

A journal is text: a header line that identifies the job, then a line for each answer, `checksum {about} TAB
answer`. A line counts if it is complete and its checksum is right. So a process may be killed at any instant:
the next start cuts off a torn last line, and skips and counts damaged lines.
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
from ...host.files import PRIVATE_MODE, JobError, sync_folder, wrap_os_errors
from .fingerprint import fingerprint_differences

MAGIC = b"duetto-journal-1 "
MAX_BUFFER_BYTES = 1 << 20  # bytes of answers that may wait for the disk between two steps
MISSING_OFFSET = -1
TOKEN_PATTERN = re.compile("[0-9a-f]{16}")
REMEDY = "remove it to begin anew, or choose another output"

JournalRecord = tuple[dict[str, Any], bytes]


@dataclass(frozen=True)
class Header:
    """Identity of a journal's job. `token` is random, so no other job has it."""

    fingerprint: dict[str, str]  # facts that decide the job's answers
    started: str  # time of its first start, ISO 8601
    token: str = field(default_factory=lambda: secrets.token_hex(8))


class Journal:
    """The answers of one job on disk, open in one process at a time. Each line takes 16 bytes of memory.

    num_answered: lines that have an answer
    num_damaged: damaged records, whose lines count as not answered
    products: `products` of the engines that answered
    """

    def __init__(self, path: Path, header: Header, num_lines: int = 1 << 24, mode: int = PRIVATE_MODE):
        """Open the journal, or create it with the file mode `mode`. Index its answers to a job of `num_lines`
        lines.

        Raises JobError if another process has the file, it belongs to another job, it is no journal, or it
        cannot be read. The file is then unchanged.
        """
        self._num_lines = num_lines
        self._offsets, self._digests = array("q"), array("Q")
        self._pending: list[tuple[int, int, bytes]] = []
        self._pending_bytes = 0
        self.num_answered = self.num_damaged = 0
        self.products: set[str] = set()
        with wrap_os_errors(path):
            self._log = AppendLog(path, mode)
        try:
            with wrap_os_errors(path):
                self.header = self._resume_or_begin(header)
        except BaseException:
            self._log.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()

    def has_answer(self, index: int, digest: int) -> bool:
        """Return whether the line with this index and this digest of its text has an answer."""
        known = index < len(self._offsets) and self._offsets[index] != MISSING_OFFSET
        return known and self._digests[index] == digest

    def has_room(self) -> bool:
        """Return True: answers do not stay in memory."""
        return True

    def append(self, index: int, digest: int, answer: bytes, report_entry: Mapping[str, Any]) -> None:
        """Add an answer (a line without its newline). It is on the disk after the next `sync`."""
        record = encode_journal_record({"index": index, "digest": digest, **report_entry}, answer)
        self._pending.append((index, digest, record))
        self._pending_bytes += len(record)
        if self._pending_bytes > MAX_BUFFER_BYTES:
            self.sync()

    def sync(self) -> None:
        """Write the added answers to the disk. Raises JobError; the journal then ends with its last complete
        record."""
        if not self._pending:
            return
        offset = self._log.end
        with wrap_os_errors(self._log.path):
            self._log.append(b"".join(record for _, _, record in self._pending), durable=True)
        for index, digest, record in self._pending:
            self._index_answer(index, digest, offset)
            offset += len(record)
        self._pending, self._pending_bytes = [], 0

    def read_answers(self, count: int) -> Iterator[JournalRecord]:
        """Yield the report entry and the answer of each of `count` lines, in order. Raises JobError."""
        assert self.num_answered == count and not self._pending, "the job is not finished"
        path = self._log.path
        with wrap_os_errors(path), self._log.open_reader() as file:
            for index in range(count):
                file.seek(self._offsets[index])
                record = self._parse_record(file.readline())
                if record is None or record[0]["index"] != index:
                    raise JobError(f"{path} was damaged while the job ran; run the same command again")
                yield record

    def remove(self) -> None:
        """Delete the journal, once its answers are in the output or if it has none."""
        self._log.remove()

    def _resume_or_begin(self, header: Header) -> Header:
        with self._log.open_reader() as file:
            begin = file.read(len(MAGIC))
            first = begin + (file.readline() if begin == MAGIC else b"")
            old_header = parse_journal_header(first)
            if old_header is None:
                self._require_torn_header(first, file)
                return self._write_header(header)
            end = self._index_answers(file, len(first))
        differences = fingerprint_differences(old_header.fingerprint, header.fingerprint)
        if differences and (self.num_answered or self.num_damaged):
            raise JobError(f"{self._log.path} holds answers of another job:\n{differences}\n{REMEDY}")
        if differences:
            return self._write_header(header)
        self._log.truncate(end)
        return old_header

    def _index_answers(self, lines: Iterator[bytes], end: int) -> int:
        """Index the complete records, and count the damaged ones except a torn last one. Returns the offset
        behind the last complete record, in bytes."""
        num_bad, line, offset = 0, b"\n", end
        for line in lines:
            record = self._parse_record(line)
            if record is None:
                num_bad += 1
            else:
                self._index_answer(record[0]["index"], record[0]["digest"], offset)
                if "products" in record[0]:
                    self.products.add(str(record[0]["products"]))
                end, self.num_damaged, num_bad = offset + len(line), self.num_damaged + num_bad, 0
            offset += len(line)
        self.num_damaged += num_bad - (not line.endswith(b"\n"))
        return end

    def _parse_record(self, line: bytes) -> JournalRecord | None:
        """Parse a record of this job. Returns None if it is damaged, or if its index or digest is
        impossible."""
        record = decode_journal_record(line)
        if record is None or not isinstance(record[0], dict):
            return None
        index, digest = record[0].get("index"), record[0].get("digest")
        if type(index) is not int or type(digest) is not int:
            return None
        return record if 0 <= digest < 1 << 64 and 0 <= index < self._num_lines else None

    def _require_torn_header(self, first: bytes, rest: BinaryIO) -> None:
        """Raise JobError unless the file is empty or the beginning of a header (left by an early kill)."""
        is_torn = MAGIC.startswith(first) or (first.startswith(MAGIC) and b"\n" not in first)
        content = itertools.chain([first], iter(lambda: rest.read(MAX_BUFFER_BYTES), b""))
        if is_torn or all(not piece.strip(b"\0") for piece in content):
            return
        if not first.startswith(MAGIC):
            raise JobError(f"{self._log.path} exists and is not a journal; {REMEDY}")
        num_whole = sum(self._parse_record(line) is not None for line in rest)
        raise JobError(
            f"{self._log.path}: the first line, which says whose answers these are ({num_whole} whole ones), "
            f"is damaged; {REMEDY}"
        )

    def _write_header(self, header: Header) -> Header:
        self._log.truncate(0)
        self._log.append(MAGIC + encode_journal_record(msgspec.to_builtins(header), b""), durable=True)
        sync_folder(self._log.path.parent)
        return header

    def _index_answer(self, index: int, digest: int, offset: int) -> None:
        missing = index + 1 - len(self._offsets)
        if missing > 0:
            self._offsets.extend([MISSING_OFFSET] * missing)
            self._digests.extend([0] * missing)
        self.num_answered += self._offsets[index] == MISSING_OFFSET
        self._offsets[index], self._digests[index] = offset, digest


def encode_journal_record(about: Any, answer: bytes) -> bytes:
    content = msgspec.json.encode(about) + b"\t" + answer
    assert b"\n" not in content
    return b"%08x %s\n" % (zlib.crc32(content), content)


def decode_journal_record(line: bytes) -> JournalRecord | None:
    """Return a record's report entry and answer; None if the record is torn or damaged."""
    checksum, _, content = line[:-1].partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(content):
        return None
    about, _, answer = content.partition(b"\t")
    try:
        return msgspec.json.decode(about), answer
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested without end
        return None


def parse_journal_header(line: bytes) -> Header | None:
    record = decode_journal_record(line.removeprefix(MAGIC)) if line.startswith(MAGIC) else None
    try:
        header = None if record is None else msgspec.convert(record[0], Header)
        if header is not None:
            datetime.fromisoformat(header.started)
    except ValueError:  # msgspec's are too
        return None
    return header if header and TOKEN_PATTERN.fullmatch(header.token) else None
