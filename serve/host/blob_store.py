"""Blobs under names in a folder of the user's own: written whole, checked when they are read, evicted least
recently used first.

A stored program is run by the next start, and tokens depend on a stored page. So folders and files must be
owned by the user, or root, and be writable by no other user. A checksum over name and content finds damaged,
cut-off and renamed files. Files are read, not mapped: a mapped file that cannot be read ends the process.
"""

import hashlib
import os
import re
import stat
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

from .streams import warn

CHECKSUM = hashlib.sha256().digest_size
OTHERS = stat.S_IWGRP | stat.S_IWOTH
ABANDONED = 3600  # seconds after which a partial file is left over from a killed process


def cache_home(name: str) -> Path:
    """Return duetto's folder `name` in the user's cache directory. Raises RuntimeError for a user without a
    home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "duetto" / name


def owned(found: os.stat_result) -> bool:
    """Return whether a file or folder is the user's or root's, and writable by no other user; True on systems
    without users."""
    return not hasattr(os, "geteuid") or (
        found.st_uid in (os.geteuid(), 0) and not stat.S_IMODE(found.st_mode) & OTHERS
    )


def refusal(folder: Path) -> str:
    """Create a folder, and its parents, with mode 0700; return why it cannot hold blobs, "" if it can."""
    try:
        make(folder)
        if owned(folder.stat()):
            return ""
        return "others own it or can write to it: chmod go-w, or name another folder"
    except FileExistsError as error:
        return f"{error.filename} is no folder"
    except (OSError, ValueError) as error:  # ValueError: a path that no system has
        return getattr(error, "strerror", None) or str(error)


def make(folder: Path) -> None:
    if folder.is_dir():
        return
    if not folder.parent.is_dir():
        make(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def open_file(path: Path) -> BufferedReader:
    """Open a file for reading. Raises OSError, also for a symbolic link."""
    nofollow = getattr(os, "O_NOFOLLOW", 0)
    return open(path, "rb", opener=lambda path, flags: os.open(path, flags | nofollow))


class FileEntry(NamedTuple):
    """A file of a folder: time of its last modification by the wall clock, name and bytes."""

    modified: float
    name: str
    size: int


class Files:
    """The operating system's files, as a blob store uses them. Methods raise OSError."""

    def now(self) -> float:
        """Return the wall clock, by which files are modified."""
        return time.time()

    def read(self, path: Path) -> bytes | None:
        """Return a file's bytes; None if other users may have written it."""
        with open_file(path) as file:
            return file.read() if owned(os.fstat(file.fileno())) else None

    def write(self, path: Path, head: bytes, content: bytes, partial: str, durable: bool) -> None:
        """Write a file that is whole or not there. Its folder holds it under a name with the prefix `partial`
        until then."""
        make(path.parent)
        handle, name = tempfile.mkstemp(prefix=partial, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(head)
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

    def modified(self, path: Path) -> int:
        """Return the time of modification of a file or folder, in nanoseconds."""
        return path.stat().st_mtime_ns

    def folders(self, folder: Path, digits: int) -> list[str]:
        """Return the names of `digits` characters in a folder."""
        return [place.name for place in folder.glob("?" * digits)]

    def scan(self, folder: Path) -> Iterator[FileEntry]:
        """Yield the files of a folder, but not those that are gone at once."""
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    info = entry.stat(follow_symlinks=False)
                    yield FileEntry(info.st_mtime, entry.name, info.st_size)


FILES = Files()


class DamagedBlobError(OSError):
    """A file that was not as it had been written; it is deleted."""


@dataclass(frozen=True)
class BlobFormat:
    """Files of one kind of blob: `magic`, a checksum, and the content."""

    magic: bytes
    partial: str  # prefix of the names of files that are being written
    files: re.Pattern[str]  # names of blobs' files; others in the folder are not touched
    suffix: str = ""  # of a file's name, after the blob's
    digits: int = 0  # leading characters of a blob's name that name its subfolder
    durable: bool = False  # a file is on the disk before it has its name

    @property
    def head(self) -> int:
        """Bytes of a file before its content."""
        return len(self.magic) + CHECKSUM

    def head_of(self, name: str, content: bytes) -> bytes:
        checksum = hashlib.sha256(name.encode() + b"\0")
        checksum.update(content)
        return self.magic + checksum.digest()


class BlobStore:
    """The blobs of one format in a folder, at most `limit` bytes of files. Files that any process has used in
    the last `grace` seconds are not evicted. `files` holds them.

    `sizes` are the bytes of files by blob, least recently used first: those that this store has written or
    read, and those that `refresh` found.
    """

    def __init__(
        self, folder: Path, format: BlobFormat, limit: float, grace: float = 0.0, files: Files = FILES
    ):
        self.folder, self.format, self.limit, self.grace, self.files = folder, format, limit, grace, files
        self.nbytes, self.sizes = 0, OrderedDict[str, int]()
        self._changed: dict[str, int] = {}  # times of modification of subfolders at the last refresh
        self._lock = threading.Lock()

    def path(self, name: str) -> Path:
        return self.folder / name[: self.format.digits] / f"{name}{self.format.suffix}"

    def read(self, name: str) -> bytes | None:
        """Return a blob's content and mark it as used now; None if other users may have written its file.

        Raises OSError, for a damaged file DamagedBlobError.
        """
        path, head = self.path(name), self.format.head
        try:
            found = self.files.read(path)
        except OSError as error:
            self._note(name, 0)
            if not isinstance(error, FileNotFoundError):
                self._changed.pop(name[: self.format.digits], None)  # the next refresh counts the file again
            raise
        if found is None:
            warn(f"{path} is not used: others own it or can write to it")
            return self._note(name, 0)
        content = found[head:]
        if found[:head] != self.format.head_of(name, content):
            self._note(name, 0)
            with suppress(OSError):
                self.files.unlink(path)
            raise DamagedBlobError(path)
        with suppress(OSError):
            self.files.touch(path)  # other processes evict by this time
        self._note(name, len(found))
        return content

    def write(self, name: str, content: bytes) -> None:
        """Store a content under a name, evicting others for it. The file is whole or not there, also after a
        kill. Raises OSError."""
        size, own = self.format.head + len(content), self.format
        self.make_room(size, name)
        self.files.write(self.path(name), own.head_of(name, content), content, own.partial, own.durable)
        self._note(name, size)

    def make_room(self, size: int, replaced: str = "") -> None:
        """Evict the least recently used blobs until `size` bytes in the place of blob `replaced` are within
        the limit, or the next one was used within the grace time."""
        while self.nbytes - self.sizes.get(replaced, 0) + size > self.limit and self.sizes:
            with self._lock:
                name = next(iter(self.sizes))
            path = self.path(name)
            with suppress(OSError):  # another process may evict too
                if self.grace and self.files.modified(path) > 1e9 * (self.files.now() - self.grace):
                    return
                self.files.unlink(path)
            self._note(name, 0)

    def refresh(self) -> None:
        """Index the subfolders that have changed: files that are gone are forgotten, and new ones are added
        by the time of their last use."""
        found: list[FileEntry] = []
        digits = self.format.digits
        for folder in self.files.folders(self.folder, digits) if digits else [""]:
            with suppress(OSError):  # another process may evict too
                changed = self.files.modified(self.folder / folder)
                if self._changed.get(folder) != changed:
                    with self._lock:  # before the scan: what is written meanwhile is not gone
                        known = {name for name in self.sizes if name.startswith(folder)}
                    files = self._scan(folder)
                    for gone in known - {name for _, name, _ in files}:
                        self._note(gone, 0)
                    found += files
                    self._changed[folder] = changed
        for _, name, size in sorted(found):
            if name not in self.sizes:
                self._note(name, size)

    def _scan(self, folder: str) -> list[FileEntry]:
        """Return the time of last use, the name and the bytes of each blob in a subfolder; delete partial
        files that killed processes have left."""
        found, place, left_over = [], self.folder / folder, self.files.now() - ABANDONED
        for entry in self.files.scan(place):
            if self.format.files.fullmatch(entry.name) and entry.name.startswith(folder):
                found.append(entry._replace(name=entry.name.removesuffix(self.format.suffix)))
            elif entry.name.startswith(self.format.partial) and entry.modified < left_over:
                with suppress(OSError):
                    self.files.unlink(place / entry.name)
        return found

    def _note(self, name: str, size: int) -> None:
        """Index a blob as the one used last; 0 bytes is one that is gone."""
        with self._lock:
            self.nbytes += size - self.sizes.get(name, 0)
            self.sizes[name] = size
            self.sizes.move_to_end(name)
            if not size:
                del self.sizes[name]
