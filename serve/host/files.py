"""Files that appear whole and durable, or not at all."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

PRIVATE_MODE = 0o600  # mode of files with prompts and answers, unless the user has named them
NEW_FILE_FLAGS = os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW  # flags of `os.open` for a file that may be new


class JobError(Exception):
    """A job cannot run or go on. The message is for the user; `hint` may say what to do."""

    hint = ""


@contextlib.contextmanager
def wrap_os_errors(path: str | Path) -> Iterator[None]:
    """Turn an OSError of the block into a JobError with the file's name."""
    try:
        yield
    except OSError as error:
        raise JobError(f"{error.filename or path}: {error.strerror or error}") from error


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes, in several calls if the system takes fewer at once. Raises OSError."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_atomically(
    path: Path,
    pieces: Iterator[bytes],
    partial: Path,
    *,
    check: Callable[[Path], None] = lambda partial: None,
    like: os.stat_result | None = None,
) -> None:
    """Write a file atomically and durably; it replaces a file of its name. Raises JobError.

    partial: name in the same folder that only the caller uses; a file there is left from an earlier call.
    check: gets the complete file under that name; it raises to keep the old file.
    like: status of a file whose permissions, and if allowed whose owner, the file gets.
    """
    with wrap_os_errors(partial):
        partial.unlink(missing_ok=True)
        try:
            mode = 0o666 if like is None else like.st_mode & 0o777
            with open(os.open(partial, os.O_WRONLY | os.O_EXCL | NEW_FILE_FLAGS, mode), "wb") as file:
                if like is not None:
                    copy_ownership(file.fileno(), like)
                file.writelines(pieces)
                file.flush()
                os.fsync(file.fileno())
            check(partial)
            os.replace(partial, path)
            sync_folder(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def file_status(path: Path) -> os.stat_result | None:
    """Return a file's status; None if there is no file. Raises JobError."""
    with wrap_os_errors(path), contextlib.suppress(FileNotFoundError):
        return path.stat()
    return None


def copy_ownership(descriptor: int, like: os.stat_result) -> None:
    """Copy mode, owner and group of the status `like` to an open file; owner and group only if allowed."""
    with contextlib.suppress(PermissionError):
        os.fchown(descriptor, like.st_uid, like.st_gid)
    os.fchmod(descriptor, like.st_mode & 0o777)


def sync_folder(folder: Path) -> None:
    """Write a folder to the disk: names that were created, changed or removed."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
