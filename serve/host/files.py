"""Files that are never half written, never another's, and never mistaken for one another."""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

PRIVATE = 0o600  # the mode of files that a process writes of its own accord: prompts and answers are in them
NEW = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class JobError(Exception):
    """A job that cannot run or go on: a sentence for the user, and perhaps a hint what to do."""

    hint = ""


@contextlib.contextmanager
def disk(path: str | Path) -> Iterator[None]:
    """Turns what the operating system refuses into a sentence about the file."""
    try:
        yield
    except OSError as error:
        raise JobError(f"{error.filename or path}: {error.strerror or error}") from error


def lock(path: Path, mode: int = PRIVATE) -> int:
    """A descriptor of the file, created with `mode` if need be, and locked against other processes until it
    is closed.

    Raises JobError if another process has it, and for what is no file of its own (a link, a pipe).
    """
    while True:
        descriptor = opened(path, mode)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise JobError(f"another process is working on {path}") from None
        # Between opening and locking, a process that finished may have removed the file.
        if is_named(descriptor, path):
            return descriptor
        os.close(descriptor)


def opened(path: Path, mode: int) -> int:
    try:
        descriptor = os.open(path, os.O_RDWR | NEW, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise JobError(f"{path} is a link; remove it, or choose another output") from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise JobError(f"{path} exists and is not a file; remove it, or choose another output")


def is_named(descriptor: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_whole(
    path: Path,
    pieces: Iterator[bytes],
    partial: Path,
    *,
    check: Callable[[Path], None] = lambda partial: None,
    like: os.stat_result | None = None,
) -> None:
    """A file that appears complete and durable, or not at all; what was there is replaced, unless `check`,
    which is given the complete file under the name `partial`, raises.

    `partial` is a name in the same folder that only the caller knows, so that what is there is left of an
    earlier call of its own. The file is as accessible as the one that `like` describes. Raises JobError.
    """
    with disk(partial):
        partial.unlink(missing_ok=True)
        try:
            mode = 0o666 if like is None else like.st_mode & 0o777
            with open(os.open(partial, os.O_WRONLY | os.O_EXCL | NEW, mode), "wb") as file:
                if like is not None:
                    own_as(file.fileno(), like)
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            check(partial)
            os.replace(partial, path)
            sync_folder(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def status(path: Path) -> os.stat_result | None:
    """A file's status; None if there is none. Raises JobError."""
    with disk(path), contextlib.suppress(FileNotFoundError):
        return path.stat()
    return None


def own_as(descriptor: int, like: os.stat_result) -> None:
    """Gives an open file the mode of another one, and its owner and group where the system allows."""
    with contextlib.suppress(PermissionError):
        os.fchown(descriptor, like.st_uid, like.st_gid)
    os.fchmod(descriptor, like.st_mode & 0o777)


def sync_folder(folder: Path) -> None:
    """Makes names in a folder durable: files created, renamed, removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
