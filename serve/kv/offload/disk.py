"""Pages in files, which processes of the same model share and which outlive them.

A file is called after the page's key and the realm that it belongs to: the weights and all else that its bits
follow from.
A file is whole or not there: it is written under another name and moved. It begins with a checksum of its
name and its content, so that one that was cut off, damaged or renamed is found out before a token depends on
it. Files are read, not mapped: a mapped file that cannot be read ends the process.
"""

import hashlib
import os
import re
import tempfile
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...host.store import CHECKSUM, checksum, make, nofollow, owned, warn
from .tier import Content, Counts, Key

MAGIC = b"duetto page 1\n"
HEAD = len(MAGIC) + CHECKSUM
FOLDERS, DIGITS = 2, 40  # of a file's hexadecimal digits the first name its folder: none has many files
SUFFIX, PARTIAL = ".page", ".duetto-page-"
OURS = re.compile(f"[0-9a-f]{{{DIGITS}}}{re.escape(SUFFIX)}")  # nothing else in a folder is touched
ABANDONED = 3600  # seconds after which a file that is not whole is nobody's any more


def own(folder: Path) -> None:
    """Make a folder for pages, if there is none. Raises ValueError where that cannot be, and for one that
    others own or can write to."""
    try:
        make(folder)
        refused = not owned(folder.stat()) and "others own it or can write to it"
    except FileExistsError as error:
        refused = f"{error.filename} is no folder"
    except (OSError, ValueError) as error:  # ValueError is a path's that no system has
        refused = getattr(error, "strerror", None) or str(error)
    if refused:
        raise ValueError(f"{str(folder)!r} is not allowed for pages: {refused}")


def place_at(path: str | Path, argument: str) -> Path:
    """The folder that an argument names for pages to be written, made if there is none. Raises ValueError,
    with the argument's name, for one that cannot be used."""
    folder = Path(os.path.expanduser(path))
    if not os.fspath(path):
        raise ValueError(f"{argument}: '' is not allowed for pages: expected a folder")
    try:
        own(folder)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{argument}: {str(folder)!r} is not allowed for pages: you may not write there")
    return folder


class DiskTier:
    """Pages of a realm in a folder that is the user's alone; all files in it take at most `most_bytes`, 0 is
    a folder that takes no more.

    Its index is what this process has written, and what it has found of others at the last `refresh`. Files
    of other processes and other realms are evicted like its own.
    """

    lasts = True

    def __init__(self, folder: Path, realm: bytes, most_bytes: float, name: str = "disk"):
        """Raises ValueError for a folder that cannot be used."""
        own(folder)
        self.folder, self.realm, self.most_bytes, self.name = folder, realm, most_bytes, name
        self.nbytes, self.counts = 0, Counts()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by file
        self._seen: dict[str, int] = {}  # folders of files, and when they had changed last
        self._lock = threading.Lock()
        self.refresh()

    @property
    def keeps(self) -> bool:
        return self.most_bytes > 0

    def has(self, key: Key) -> bool:
        return self._file(key) in self._sizes

    def offer(self, key: Key, content: Content) -> None:
        size = HEAD + len(content)
        if self.has(key) or size > self.most_bytes:
            return
        self._make_room(size)
        try:
            self.write(key, content)
        except OSError as error:
            warn(f"pages are not kept in {self.folder}: {error.strerror or error}")

    def write(self, key: Key, content: Content) -> None:
        """Keep a page, also in place of a file that was cut off. Raises OSError where that cannot be
        done."""
        file, size = self._file(key), HEAD + len(content)
        if self._sizes.get(file) != size:
            self._write(file, content)
            self._add(file, size)
            self.counts.kept += 1

    def fetch(self, key: Key) -> Content | None:
        file = self._file(key)
        with self.counts.fetching():
            content = self._read(file)
        if content is None:
            self._remove(file)
        else:
            self.counts.hit(content)
            with self._lock, suppress(KeyError):
                self._sizes.move_to_end(file)
        return content

    def refresh(self) -> None:
        """Look at folders that have changed: files that are gone are forgotten; of those that are new, those
        used least recently go first."""
        found: list[tuple[float, str, int]] = []
        for place in self.folder.glob("?" * FOLDERS):
            with suppress(OSError):  # another process may evict too
                changed = place.stat().st_mtime_ns
                if self._seen.get(place.name) != changed:
                    known = self._known(place.name)  # before: what is written meanwhile is not gone
                    files = self._files(place)
                    for gone in known - {file for _, file, _ in files}:
                        self._remove(gone)
                    found += files
                    self._seen[place.name] = changed
        for _, file, size in sorted(found):
            if file not in self._sizes:
                self._add(file, size)

    def settle(self, until: float, most: int = 0) -> int:
        """Nothing: what is offered is written."""
        return 0

    def own(self) -> list[tuple[Key, Content]]:
        """None: files stay."""
        return []

    def report(self) -> dict[str, Any]:
        return {"pages": len(self._sizes), "bytes": self.nbytes} | self.counts.report()

    # ------------------------------------------------------------ the index

    def _file(self, key: Key) -> str:
        return hashlib.blake2b(key, digest_size=DIGITS // 2, key=self.realm).hexdigest()

    def _known(self, place: str) -> set[str]:
        """The files of a folder."""
        with self._lock:
            return {file for file in self._sizes if file.startswith(place)}

    def _add(self, file: str, size: int) -> None:
        with self._lock:
            self.nbytes += size - self._sizes.get(file, 0)
            self._sizes[file] = size

    def _remove(self, file: str) -> None:
        with self._lock:
            self.nbytes -= self._sizes.pop(file, 0)

    def _make_room(self, size: int) -> None:
        while self.nbytes + size > self.most_bytes and self._sizes:
            with self._lock:
                file = next(iter(self._sizes))
            self._remove(file)
            with suppress(OSError):
                self._place(file).unlink()

    # ------------------------------------------------------------ files

    def _place(self, file: str) -> Path:
        return self.folder / file[:FOLDERS] / f"{file}{SUFFIX}"

    def _files(self, place: Path) -> list[tuple[float, str, int]]:
        """When each file of a folder was used last, and its bytes. What a process that was killed left behind
        is deleted."""
        found = []
        with os.scandir(place) as entries:
            for entry in entries:
                with suppress(OSError):
                    info = entry.stat(follow_symlinks=False)
                    if OURS.fullmatch(entry.name) and entry.name.startswith(place.name):
                        found.append((info.st_mtime, entry.name.removesuffix(SUFFIX), info.st_size))
                    elif entry.name.startswith(PARTIAL) and info.st_mtime < time.time() - ABANDONED:
                        os.unlink(entry.path)
        return found

    def _write(self, file: str, content: Content) -> None:
        place = self._place(file)
        make(place.parent)
        handle, partial = tempfile.mkstemp(prefix=PARTIAL, dir=place.parent)
        try:
            with os.fdopen(handle, "wb") as f:
                f.write(MAGIC + checksum(file, content))
                f.write(content)
            os.replace(partial, place)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise

    def _read(self, file: str) -> Content | None:
        place = self._place(file)
        try:
            with open(place, "rb", opener=lambda path, flags: os.open(path, flags | nofollow())) as f:
                if not owned(os.fstat(f.fileno())):
                    return warn(f"{place} is not used: others own it or can write to it")
                found = f.read()
        except FileNotFoundError:  # another process has evicted it
            return None
        except OSError as error:
            warn(f"pages in {self.folder} cannot be read for now: {error.strerror or error}")
            self._seen.pop(place.parent.name, None)  # the next refresh finds and counts it again
            return None
        content = found[HEAD:]
        if found[:HEAD] == MAGIC + checksum(file, content):
            with suppress(OSError):
                os.utime(place)  # used now, for other processes too
            return content
        self.counts.damaged += 1
        warn(f"damaged pages in {self.folder}: they are computed again")
        with suppress(OSError):
            place.unlink()
        return None
