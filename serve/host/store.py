"""A folder of files that nobody else can write: what is read is what was written, and the least recently used
files are evicted.

What lies in a cache of programs is run by the next start. So folder and files must be the user's own, or
root's, and writable by nobody else; a checksum finds flipped bits and files that were cut off before anything
else looks at the content.
"""

import hashlib
import logging
import os
import stat
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

LIMIT = 7 << 29  # bytes of a folder: the programs of a hundred models and sizes
# seconds in which a file that was used is safe: no start takes away what it, or another one, has just read
GRACE = 600
MAGIC = b"duetto kept 1\n"
CHECKSUM = hashlib.sha256().digest_size
OTHERS = stat.S_IWGRP | stat.S_IWOTH


@cache
def warn(text: str) -> None:
    """Log a warning, once; without a handler of the user's it goes to standard error."""
    logging.getLogger("duetto").warning("duetto: %s", text)


def cache_home(of: str) -> Path:
    """Where duetto keeps something: a folder in the user's cache directory. Raises RuntimeError for a user
    without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "duetto" / of


def owned(found: os.stat_result) -> bool:
    """Whether a file or folder is the user's or root's, and nobody else can write it; true where the system
    has no users."""
    return not hasattr(os, "geteuid") or (
        found.st_uid in (os.geteuid(), 0) and not stat.S_IMODE(found.st_mode) & OTHERS
    )


def usable(folder: Path) -> bool:
    """Whether a folder may hold programs; it and what is missing above it are made for this user alone. Says
    why it may not."""
    try:
        make(folder)
        if owned(folder.stat()):
            return True
        reason = (
            "others own it or can write to it, and could run code here: chmod go-w, or name another folder"
        )
    except OSError as error:
        reason = error.strerror or str(error)
    warn(f"compiled programs are not kept in {folder}: {reason}")
    return False


def make(folder: Path) -> None:
    if folder.is_dir():
        return
    if not folder.parent.is_dir():
        make(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def checksum(name: str, content: bytes) -> bytes:
    """Of a content under a name: a file that was renamed is as wrong as a damaged one."""
    found = hashlib.sha256(name.encode() + b"\0")
    found.update(content)
    return found.digest()


def read(folder: Path, name: str) -> bytes | None:
    """What was written under a name, or None. A file that others may have written is left alone.

    A damaged file is deleted and replaced by an empty content.
    """
    file = folder / name
    try:
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | nofollow())) as f:
            if not owned(os.fstat(f.fileno())):
                warn(f"{file} is not used: others own it or can write to it")
                return None
            found = f.read()
    except OSError:  # most often there is none
        return None
    head, content = found[: len(MAGIC) + CHECKSUM], found[len(MAGIC) + CHECKSUM :]
    if head == MAGIC + checksum(name, content):
        with suppress(OSError):
            os.utime(file)  # used now
        return content
    warn(f"{file} was damaged: it is deleted and made anew")
    with suppress(OSError):
        file.unlink()
        write(folder, name, b"")
    return b""


def nofollow() -> int:
    return getattr(os, "O_NOFOLLOW", 0)


def write(folder: Path, name: str, content: bytes) -> None:
    """Keep a content under a name: the whole file is there, or none, also after a crash. Raises OSError."""
    handle, partial = tempfile.mkstemp(prefix=".", dir=folder)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(MAGIC + checksum(name, content))
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, folder / name)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
    trim(folder)


def trim(folder: Path) -> None:
    """Evict the least recently used files, down to LIMIT bytes, but none that was used within GRACE
    seconds."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):  # another process may trim too
                info = entry.stat(follow_symlinks=False)
                found.append((info.st_mtime, info.st_size, entry.path))
    total, recent = sum(size for _, size, _ in found), time.time() - GRACE
    for used, size, path in sorted(found):
        if total <= LIMIT or used > recent:
            return
        with suppress(OSError):
            os.unlink(path)
            total -= size
