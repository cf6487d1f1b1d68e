"""KV offload to disk: pages in files that processes of the same model share, and that outlive them.

A file's name is a hash of the page's key under its realm: weights, and all else that decides the page's bits.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from ....user_folders import refusal
from ...host.blob_store import FILES, BlobFormat, BlobStore, DamagedBlobError, Files
from ...host.streams import warn
from .tier import Content, Counts, Key, Tier

FOLDERS, DIGITS = 2, 40  # hexadecimal digits of a subfolder's and of a file's name: no folder has many files
PAGES = BlobFormat(
    b"duetto page 1\n",
    ".duetto-page-",
    re.compile(f"[0-9a-f]{{{DIGITS}}}[.]page"),
    suffix=".page",
    digits=FOLDERS,
)


def require_own(folder: Path) -> None:
    """Create a folder for pages if there is none. Raises ValueError if that fails, or if other users own it
    or can write to it."""
    if reason := refusal(folder):
        raise ValueError(f"{str(folder)!r} is not allowed for pages: {reason}")


def place_at(path: str | Path, argument: str) -> Path:
    """Return the folder for pages that an argument names, created if there is none. Raises ValueError, with
    the argument's name, for one that cannot be used."""
    folder = Path(os.path.expanduser(path))
    if not os.fspath(path):
        raise ValueError(f"{argument}: '' is not allowed for pages: expected a folder")
    try:
        require_own(folder)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{argument}: {str(folder)!r} is not allowed for pages: you may not write there")
    return folder


class DiskTier(Tier):
    """Pages of a realm in a folder that is the user's alone. All files in it take at most `most_bytes`; with
    0 no pages are added. Files of other processes and realms are evicted like its own."""

    lasts = True

    def __init__(
        self, folder: Path, realm: bytes, most_bytes: float, name: str = "disk", files: Files = FILES
    ):
        """Raises ValueError for a folder that cannot be used."""
        require_own(folder)
        self.folder, self.realm, self.name, self.counts = folder, realm, name, Counts()
        self.blobs = BlobStore(folder, PAGES, most_bytes, files=files)
        self.refresh()

    @property
    def keeps(self) -> bool:
        return self.blobs.limit > 0

    def has(self, key: Key) -> bool:
        return self.file(key) in self.blobs.sizes

    def offer(self, key: Key, content: Content) -> None:
        if self.has(key) or PAGES.head + len(content) > self.blobs.limit:
            return
        try:
            self.write(key, content)
        except OSError as error:
            warn(f"pages are not kept in {self.folder}: {error.strerror or error}")

    def write(self, key: Key, content: Content) -> None:
        """Keep a page, also in place of a file that was cut off. Raises OSError."""
        if self.blobs.sizes.get(file := self.file(key)) != PAGES.head + len(content):
            self.blobs.write(file, content)
            self.counts.kept += 1

    def fetch(self, key: Key) -> Content | None:
        with self.counts.fetching():
            content = self._read(self.file(key))
        if content is not None:
            self.counts.hit(content)
        return content

    def refresh(self) -> None:
        """Find pages that other processes have kept, and forget those that they have evicted."""
        self.blobs.refresh()

    def report(self) -> dict[str, Any]:
        return {"pages": len(self.blobs.sizes), "bytes": self.blobs.nbytes} | self.counts.report()

    def file(self, key: Key) -> str:
        """Return the name of a page's file, without its suffix."""
        return hashlib.blake2b(key, digest_size=DIGITS // 2, key=self.realm).hexdigest()

    def _read(self, file: str) -> Content | None:
        try:
            return self.blobs.read(file)
        except DamagedBlobError:
            self.counts.damaged += 1
            warn(f"damaged pages in {self.folder}: they are computed again")
        except FileNotFoundError:  # another process has evicted it
            pass
        except OSError as error:
            warn(f"pages in {self.folder} cannot be read for now: {error.strerror or error}")
        return None
