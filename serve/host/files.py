"""Files that appear whole and durable, or not at all."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

PRIVATE = 0o600  # mode of files with prompts and answers that the user has not asked for by name
NEW = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class JobError(Exception):
    """A job cannot run or go on. The message is for the user; `hint` may say what to do."""

    hint = ""


@contextlib.contextmanager
def disk(path: str | Path) -> Iterator[None]:
    """Raise an OSError of the block as JobError, with the file's name."""
    try:
        yield
    except OSError as error:
        raise JobError(f"{error.filename or path}: {error.strerror or error}") from error


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
    """Write a file that appears complete and durable, or not at all, in place of one of its name. Raises
    JobError.

    `partial` is a name in the same folder that only the caller knows: a file there is left over from an
    earlier call. `check` gets the complete file under that name, and raises to keep the old one. The file
    gets the permissions, and if allowed the owner, of the one that `like` describes.
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
    """Return a file's status; None if there is no file. Raises JobError."""
    with disk(path), contextlib.suppress(FileNotFoundError):
        return path.stat()
    return None


def own_as(descriptor: int, like: os.stat_result) -> None:
    """Set an open file's mode to that of another one, and its owner and group if the system allows."""
    with contextlib.suppress(PermissionError):
        os.fchown(descriptor, like.st_uid, like.st_gid)
    os.fchmod(descriptor, like.st_mode & 0o777)


def sync_folder(folder: Path) -> None:
    """Write a folder's names to the disk: files created, renamed, removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
