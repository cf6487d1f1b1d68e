"""The journal of a batch: answers on disk as they come, and the finished file made of them.

A journal is text: a header line that says which job it is of, then a line for each answer, `checksum {about} TAB answer`. A
line counts once it is whole and its checksum is right, so a process may be killed at any instant: what was torn is cut off
at the next start. The finished file appears by renaming, never half written.
"""

import contextlib
import fcntl
import os
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

MAGIC = b"duetto-journal-1 "
BUFFER = 1 << 20  # bytes of answers that may wait for the disk between two steps
MISSING = -1


class JobError(Exception):
    """A job that cannot run or go on: a sentence for the user, and perhaps a hint what to do."""

    hint = ""


@dataclass(frozen=True)
class Header:
    """Which job a journal is of: what decides its answers, and when it was begun (ISO 8601)."""

    fingerprint: dict[str, str]
    started: str


class Journal:
    """The answers of one job that are on disk; one process at a time may have it open.

    Memory is 16 bytes for each line answered. Attributes: header (the one on disk), count (lines answered).
    """

    def __init__(self, path: Path, header: Header):
        """Opens or creates the journal and takes up what it holds.

        Raises JobError if another process has it, it is of another job, it is no journal, or the disk refuses.
        """
        self.path = path
        self._offsets, self._digests = array("q"), array("Q")
        self._waiting: list[tuple[int, int, bytes]] = []
        self._waiting_bytes = 0
        self.count = 0
        with disk(path):
            self._descriptor = lock(path)
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
        """Whether the line with this index is answered; `digest` tells whether it is still the line that was answered."""
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
        """Puts what was appended on the disk. Raises JobError; the journal then ends with its last whole record."""
        if not self._waiting:
            return
        with disk(self.path):
            self._write(b"".join(record for _, _, record in self._waiting))
        for index, digest, record in self._waiting:
            self._note(index, digest, self._end)
            self._end += len(record)
        self._waiting, self._waiting_bytes = [], 0

    def answers(self, count: int) -> Iterator[tuple[dict[str, Any], bytes]]:
        """What is known about each of the `count` lines, and its answer, in their order."""
        assert self.count == count and not self._waiting, "the job is not finished"
        with open(self.path, "rb") as file:
            for index in range(count):
                file.seek(self._offsets[index])
                found = about_and_answer(file.readline())
                if found is None:
                    raise JobError(f"{self.path} was damaged while the job ran; run the same command again")
                yield found

    def remove(self) -> None:
        """Deletes the journal: its answers are elsewhere now, or it has none."""
        self.path.unlink(missing_ok=True)
        sync_folder(self.path.parent)

    def _take_up(self, header: Header) -> tuple[Header, int]:
        with open(self.path, "rb") as file:
            first = file.readline()
            found = header_of(first)
            second = file.readline()
            if found is None:
                self._check_torn(first + second)
                return header, self._begin(header)
            differences = differing(found.fingerprint, header.fingerprint)
            if differences and about_and_answer(second) is None:
                return header, self._begin(header)
            if differences:
                raise JobError(
                    f"{self.path} holds answers of another job:\n{differences}\n"
                    "remove it to begin anew, or choose another output"
                )
            file.seek(len(first))
            end = self._take_up_answers(file, len(first))
        os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, end, os.SEEK_SET)
        return found, end

    def _take_up_answers(self, lines: Iterator[bytes], end: int) -> int:
        for line in lines:
            record = about_and_answer(line)
            if record is None:
                break
            self._note(record[0]["index"], record[0]["digest"], end)
            end += len(line)
        return end

    def _check_torn(self, content: bytes) -> None:
        """Only the beginning of a header may be overwritten: it is what a kill at the first instant leaves."""
        torn = content.startswith(MAGIC) and b"\n" not in content[:-1]
        if not (torn or MAGIC.startswith(content) or not content.strip(b"\0")):
            raise JobError(f"{self.path} exists and is not a journal; remove it, or choose another output")

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


def about_and_answer(line: bytes) -> tuple[dict[str, Any], bytes] | None:
    """A record's two parts; None if it is torn or damaged."""
    checksum, _, content = line[:-1].partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(content):
        return None
    about, _, answer = content.partition(b"\t")
    return msgspec.json.decode(about), answer


def header_of(line: bytes) -> Header | None:
    found = about_and_answer(line.removeprefix(MAGIC)) if line.startswith(MAGIC) else None
    return None if found is None else msgspec.convert(found[0], Header)


def differing(was: Mapping[str, str], now: Mapping[str, str]) -> str:
    """A line for each field in which two fingerprints differ; empty if they are equal."""
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return "\n".join(f"  {n}: was {was.get(n, 'not set')}, is {now.get(n, 'not set')}" for n in names)


def lock(path: Path) -> int:
    """A descriptor of the file, created if need be, and locked against other processes until it is closed.

    Raises JobError if another process has it.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise JobError(f"another process is working on {path}") from None
        # Between opening and locking, a process that finished may have removed the file.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


@contextlib.contextmanager
def disk(path: str | Path) -> Iterator[None]:
    """Turns what the operating system refuses into a sentence about the file."""
    try:
        yield
    except OSError as error:
        raise JobError(f"{error.filename or path}: {error.strerror or error}") from error


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_whole(
    path: Path, pieces: Iterator[bytes], check: Callable[[Path], None] = lambda partial: None
) -> None:
    """A file that appears complete and durable, or not at all; what was there is replaced, unless `check`, which is given
    the complete file under its first name, raises. Raises JobError."""
    partial = path.with_name(path.name + ".partial")
    with disk(partial):
        try:
            with open(partial, "wb") as file:
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            check(partial)
            os.replace(partial, path)
            sync_folder(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes names in a folder durable: files created, renamed, removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
