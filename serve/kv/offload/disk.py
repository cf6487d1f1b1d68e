"""KV offload to disk: pages in files, which processes of the same model share and which outlive them.

A file's name is a hash of the page's key, keyed by its realm: weights, and all else that decides the page's
bits.
"""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

from ....user_folders import prepare_private_folder
from ...host.blob_store import SYSTEM_FILES, BlobFormat, BlobStore, DamagedBlobError, Files
from ...host.streams import warn_once
from .tier import Counts, PageContent, PageKey, Tier

# Hexadecimal digits of a subfolder's and of a file's name: no folder has many files.
FOLDER_DIGITS, FILE_DIGITS = 2, 40
PAGE_FORMAT = BlobFormat(
    b"duetto page 1\n",
    ".duetto-page-",
    re.compile(f"[0-9a-f]{{{FILE_DIGITS}}}[.]page"),
    suffix=".page",
    subfolder_digits=FOLDER_DIGITS,
)


def create_private_folder(folder: Path) -> None:
    """Create a folder for pages if it does not exist. Raises ValueError if that fails, or if other users own
    the folder or can write to it."""
    if reason := prepare_private_folder(folder):
        raise ValueError(f"{str(folder)!r} is not allowed for pages: {reason}")


def create_page_folder(path: str | Path, argument: str) -> Path:
    """Return the folder for pages that an argument names, and create it if it does not exist. Raises
    ValueError, with the argument's name, if the folder cannot be used."""
    folder = Path(os.path.expanduser(path))
    if not os.fspath(path):
        raise ValueError(f"{argument}: '' is not allowed for pages: expected a folder")
    try:
        create_private_folder(folder)
    except ValueError as error:
        raise ValueError(f"{argument}: {error}") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{argument}: {str(folder)!r} is not allowed for pages: you may not write there")
    return folder


class DiskTier(Tier):
    """Tier of the pages of one realm, in a folder that only this user can write to.

    All files in the folder take at most `max_bytes`; with 0 no pages are added. Files of other processes and
    realms are evicted too.
    """

    is_persistent = True

    def __init__(
        self, folder: Path, realm: bytes, max_bytes: float, name: str = "disk", files: Files = SYSTEM_FILES
    ):
        """Raises ValueError for a folder that cannot be used."""
        create_private_folder(folder)
        self.folder, self.realm, self.name, self.counts = folder, realm, name, Counts()
        self.blobs = BlobStore(folder, PAGE_FORMAT, max_bytes, files=files)
        self.refresh()

    @property
    def is_writable(self) -> bool:
        return self.blobs.max_bytes > 0

    def has(self, key: PageKey) -> bool:
        return self.file_name(key) in self.blobs.sizes

    def offer(self, key: PageKey, content: PageContent) -> None:
        if self.has(key) or PAGE_FORMAT.header_bytes + len(content) > self.blobs.max_bytes:
            return
        try:
            self.write(key, content)
        except OSError as error:
            warn_once(f"pages are not kept in {self.folder}: {error.strerror or error}")

    def write(self, key: PageKey, content: PageContent) -> None:
        """Store a page; replace a file of another size, which was cut off. Raises OSError."""
        if self.blobs.sizes.get(file := self.file_name(key)) != PAGE_FORMAT.header_bytes + len(content):
            self.blobs.write(file, content)
            self.counts.kept += 1

    def fetch(self, key: PageKey) -> PageContent | None:
        with self.counts.time_fetch():
            content = self._read(self.file_name(key))
        if content is not None:
            self.counts.record_hit(content)
        return content

    def refresh(self) -> None:
        """Add the pages that other processes have stored, and forget the pages that they have evicted."""
        self.blobs.refresh_index()

    def report(self) -> dict[str, Any]:
        return {"pages": len(self.blobs.sizes), "bytes": self.blobs.nbytes} | self.counts.report()

    def file_name(self, key: PageKey) -> str:
        """Return the name of a page's file, without its suffix."""
        return hashlib.blake2b(key, digest_size=FILE_DIGITS // 2, key=self.realm).hexdigest()

    def _read(self, file: str) -> PageContent | None:
        """Return a file's page; None, with a warning, if it is damaged or cannot be read."""
        try:
            return self.blobs.read(file)
        except DamagedBlobError:
            self.counts.damaged += 1
            warn_once(f"damaged pages in {self.folder}: they are computed again")
        except FileNotFoundError:  # another process has evicted it
            pass
        except OSError as error:
            warn_once(f"pages in {self.folder} cannot be read for now: {error.strerror or error}")
        return None
