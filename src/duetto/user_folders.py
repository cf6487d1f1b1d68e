"""Folders of the user's own, whose files later processes run: no other user may write there."""

import os
import stat
from pathlib import Path

OTHERS = stat.S_IWGRP | stat.S_IWOTH


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
    """Create a folder, and its parents, with mode 0700; return why it cannot hold such files, "" if it
    can."""
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
