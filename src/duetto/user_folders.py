"""Private folders, whose files later processes run: no other user may write there."""

import os
import stat
from pathlib import Path

OTHERS_WRITE_BITS = stat.S_IWGRP | stat.S_IWOTH


def cache_home(name: str) -> Path:
    """Return duetto's folder `name` in the user's cache directory. Raises RuntimeError for a user without a
    home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "duetto" / name


def is_user_owned(status: os.stat_result) -> bool:
    """Return True if a file or folder is the user's or root's, and no other user may write to it.

    True on systems without users.
    """
    return not hasattr(os, "geteuid") or (
        status.st_uid in (os.geteuid(), 0) and not stat.S_IMODE(status.st_mode) & OTHERS_WRITE_BITS
    )


def prepare_private_folder(folder: Path) -> str:
    """Create a folder with mode 0700, and its parents. Return the reason why it is not private, or "" if it
    is."""
    try:
        make_private_folder(folder)
        if is_user_owned(folder.stat()):
            return ""
        return "others own it or can write to it: chmod go-w, or name another folder"
    except FileExistsError as error:
        return f"{error.filename} is no folder"
    except (OSError, ValueError) as error:  # ValueError: the path holds a null byte
        return getattr(error, "strerror", None) or str(error)


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents, all with mode 0700."""
    if folder.is_dir():
        return
    if not folder.parent.is_dir():
        make_private_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
