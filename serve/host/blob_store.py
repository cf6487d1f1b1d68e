"""Blobs under names in a folder of the user's own: written whole, checked when they are read, evicted least
recently used first.

A stored program is run by the next start, and tokens depend on a stored page. So folders and files must be
owned by the user, or root, and be writable by no other user. A checksum over name and content finds damaged,
cut-off and renamed files. Files are read, not mapped: a mapped file that cannot be read ends the process.
"""

import hashlib
import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

from ...user_folders import is_user_owned, make_private_folder
from .streams import warn_once

CHECKSUM_BYTES = hashlib.sha256().digest_size  # bytes
ABANDONED_SECONDS = 3600  # age in seconds at which a partial file counts as left by a killed process


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading. Raises OSError, also for a symbolic link."""
    nofollow = getattr(os, "O_NOFOLLOW", 0)
    return open(path, "rb", opener=lambda path, flags: os.open(path, flags | nofollow))


class FileEntry(NamedTuple):
    """A file in a folder.

    modified: time of the last modification, in seconds of the wall clock.
    name: name of the file.
    size: bytes.
    """

    modified: float
    name: str
    size: int


class Files:
    """The operating system's files, as a blob store uses them. Methods raise OSError."""

    def wall_time(self) -> float:
        """Return the time of the wall clock in seconds, as in times of modification."""
        return time.time()

    def read(self, path: Path) -> bytes | None:
        """Return a file's bytes; None if other users may have written it."""
        with open_file(path) as file:
            return file.read() if is_user_owned(os.fstat(file.fileno())) else None

    def write(self, path: Path, header: bytes, content: bytes, partial_prefix: str, durable: bool) -> None:
        """Write a file that is whole or not there. Its folder holds it under a name with the prefix
        `partial_prefix` until then."""
        make_private_folder(path.parent)
        handle, name = tempfile.mkstemp(prefix=partial_prefix, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(header)
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def touch(self, path: Path) -> None:
        """Set a file's time of modification to now."""
        os.utime(path)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def modified_ns(self, path: Path) -> int:
        """Return the time of modification of a file or folder, in nanoseconds."""
        return path.stat().st_mtime_ns

    def list_subfolders(self, folder: Path, name_length: int) -> list[str]:
        """Return the names in a folder that have `name_length` characters."""
        return [path.name for path in folder.glob("?" * name_length)]

    def scan(self, folder: Path) -> Iterator[FileEntry]:
        """Yield the files of a folder. A file that is deleted meanwhile is left out."""
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    info = entry.stat(follow_symlinks=False)
                    yield FileEntry(info.st_mtime, entry.name, info.st_size)


SYSTEM_FILES = Files()


class DamagedBlobError(OSError):
    """A file with another content than was written. It has been deleted."""


@dataclass(frozen=True)
class BlobFormat:
    """Format of the files of one kind of blob: `magic`, a checksum, and the content."""

    magic: bytes
    partial_prefix: str  # prefix of the names of files that are being written
    file_pattern: re.Pattern[str]  # names of blobs' files; others in the folder are not touched
    suffix: str = ""  # of a file's name, after the blob's
    subfolder_digits: int = 0  # leading characters of a blob's name that name its subfolder
    durable: bool = False  # a file is on the disk before it has its name

    @property
    def header_bytes(self) -> int:
        """Bytes of a file before its content."""
        return len(self.magic) + CHECKSUM_BYTES

    def make_header(self, name: str, content: bytes) -> bytes:
        """Return the bytes before the content: `magic`, and a checksum over name and content."""
        checksum = hashlib.sha256(name.encode() + b"\0")
        checksum.update(content)
        return self.magic + checksum.digest()


class BlobStore:
    """Blobs of one format in a folder.

    max_bytes: maximum bytes of all files.
    grace_seconds: seconds for which a file stays after a process has used it.
    files: operations on files.
    sizes: bytes of each known blob's file, least recently used first. A blob is known once this store has
        written or read it, or `refresh_index` has found it.
    nbytes: sum of `sizes`.
    """

    def __init__(
        self,
        folder: Path,
        format: BlobFormat,
        max_bytes: float,
        grace_seconds: float = 0.0,
        files: Files = SYSTEM_FILES,
    ):
        self.folder = folder
        self.format = format
        self.max_bytes = max_bytes
        self.grace_seconds = grace_seconds
        self.files = files
        self.nbytes, self.sizes = 0, OrderedDict[str, int]()
        self._changed: dict[str, int] = {}  # times of modification of subfolders at the last refresh
        self._lock = threading.Lock()

    def path(self, name: str) -> Path:
        return self.folder / name[: self.format.subfolder_digits] / f"{name}{self.format.suffix}"

    def read(self, name: str) -> bytes | None:
        """Return a blob's content and mark it as used now; None if other users may have written its file.

        Raises OSError; DamagedBlobError for a damaged file.
        """
        path, head = self.path(name), self.format.header_bytes
        try:
            data = self.files.read(path)
        except OSError as error:
            self._index(name, 0)
            if not isinstance(error, FileNotFoundError):
                # The next refresh counts the file again.
                self._changed.pop(name[: self.format.subfolder_digits], None)
            raise
        if data is None:
            warn_once(f"{path} is not used: others own it or can write to it")
            return self._index(name, 0)
        content = data[head:]
        if data[:head] != self.format.make_header(name, content):
            self._index(name, 0)
            with suppress(OSError):
                self.files.unlink(path)
            raise DamagedBlobError(path)
        with suppress(OSError):
            self.files.touch(path)  # other processes evict by this time
        self._index(name, len(data))
        return content

    def write(self, name: str, content: bytes) -> None:
        """Store a content under a name, and evict other blobs for it. Raises OSError.

        The file is complete or missing, also after a kill.
        """
        size, blob_format = self.format.header_bytes + len(content), self.format
        self.make_room(size, name)
        self.files.write(
            self.path(name),
            blob_format.make_header(name, content),
            content,
            blob_format.partial_prefix,
            blob_format.durable,
        )
        self._index(name, size)

    def make_room(self, size: int, replaced: str = "") -> None:
        """Evict the least recently used blobs until `size` more bytes are within the limit.

        The blob `replaced` counts as gone. Eviction ends at a blob that was used within the grace time.
        """
        while self.nbytes - self.sizes.get(replaced, 0) + size > self.max_bytes and self.sizes:
            with self._lock:
                name = next(iter(self.sizes))
            path = self.path(name)
            with suppress(OSError):  # another process may evict too
                if self.grace_seconds and self.files.modified_ns(path) > 1e9 * (
                    self.files.wall_time() - self.grace_seconds
                ):
                    return
                self.files.unlink(path)
            self._index(name, 0)

    def refresh_index(self) -> None:
        """Index the subfolders that have changed: forget deleted files, and add new ones by their last
        use."""
        entries: list[FileEntry] = []
        digits = self.format.subfolder_digits
        for folder in self.files.list_subfolders(self.folder, digits) if digits else [""]:
            with suppress(OSError):  # another process may evict too
                changed = self.files.modified_ns(self.folder / folder)
                if self._changed.get(folder) != changed:
                    with self._lock:  # before the scan: a file written meanwhile is not gone
                        known = {name for name in self.sizes if name.startswith(folder)}
                    files = self._scan(folder)
                    for gone in known - {name for _, name, _ in files}:
                        self._index(gone, 0)
                    entries += files
                    self._changed[folder] = changed
        for _, name, size in sorted(entries):
            if name not in self.sizes:
                self._index(name, size)

    def _scan(self, folder: str) -> list[FileEntry]:
        """Return the blobs in a subfolder, and delete partial files that killed processes have left."""
        blobs, path, left_over = [], self.folder / folder, self.files.wall_time() - ABANDONED_SECONDS
        for entry in self.files.scan(path):
            if self.format.file_pattern.fullmatch(entry.name) and entry.name.startswith(folder):
                blobs.append(entry._replace(name=entry.name.removesuffix(self.format.suffix)))
            elif entry.name.startswith(self.format.partial_prefix) and entry.modified < left_over:
                with suppress(OSError):
                    self.files.unlink(path / entry.name)
        return blobs

    def _index(self, name: str, size: int) -> None:
        """Index a blob of `size` bytes as the one used last; 0 bytes removes it from the index."""
        with self._lock:
            self.nbytes += size - self.sizes.get(name, 0)
            self.sizes[name] = size
            self.sizes.move_to_end(name)
            if not size:
                del self.sizes[name]
