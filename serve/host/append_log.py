"""A file of lines that one process at a time appends to, and that a kill at any instant leaves readable."""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .files import NEW_FILE_FLAGS, PRIVATE_MODE, JobError, sync_folder, write_all


class AppendLog:
    """An open and locked log; the next line is written at the byte offset `end`."""

    def __init__(self, path: Path, mode: int = PRIVATE_MODE):
        """Open the file, or create it with `mode`. Raises JobError if another process has it locked and for
        a link or a pipe, OSError if it cannot be opened."""
        self.path, self._descriptor = path, open_locked(path, mode)
        self.end = os.fstat(self._descriptor).st_size

    @property
    def mode(self) -> int:
        """Permission bits of the open file."""
        return stat.S_IMODE(os.fstat(self._descriptor).st_mode)

    @contextlib.contextmanager
    def open_reader(self) -> Iterator[BinaryIO]:
        """Open the file for reading from its beginning, even if its name is another file's by now.

        One reader at a time: readers share a position.
        """
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            yield file

    def append(self, data: bytes, durable: bool = False) -> None:
        """Write whole lines at the end, to the disk itself if `durable`. Raises OSError; the log then ends as
        before."""
        try:
            os.lseek(self._descriptor, self.end, os.SEEK_SET)
            write_all(self._descriptor, data)
            if durable:
                os.fsync(self._descriptor)
        except BaseException:
            os.ftruncate(self._descriptor, self.end)
            raise
        self.end += len(data)

    def truncate(self, end: int) -> None:
        """Drop what follows a byte offset."""
        os.ftruncate(self._descriptor, end)
        self.end = end

    def remove(self) -> None:
        """Delete the file; another file that has its name by now stays."""
        if is_same_file(self._descriptor, self.path):
            self.path.unlink()
            sync_folder(self.path.parent)

    def close(self) -> None:
        os.close(self._descriptor)


def open_locked(path: Path, mode: int) -> int:
    """Return a descriptor of the file, locked against other processes until it is closed."""
    while True:
        descriptor = open_log_file(path, mode)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise JobError(f"another process is working on {path}") from None
        # Between opening and locking, a process that finished may have removed the file.
        if is_same_file(descriptor, path):
            return descriptor
        os.close(descriptor)


def open_log_file(path: Path, mode: int) -> int:
    """Open a file for reading and writing, or create it; returns its descriptor. Raises JobError for
    others."""
    try:
        descriptor = os.open(path, os.O_RDWR | NEW_FILE_FLAGS, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise JobError(f"{path} is a link; remove it, or choose another output") from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise JobError(f"{path} exists and is not a file; remove it, or choose another output")


def is_same_file(descriptor: int, path: Path) -> bool:
    """Return True if a path still leads to the open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False
