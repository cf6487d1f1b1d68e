"""Snapshots: folders with all pages of an engine's prefix cache, for another process to load."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ....kvcache.pages import KVCache
from ....kvcache.tables import PageTables
from ...runtime.compiled.transfers import MAX_COPY_PAGES, Transfers, page_contents
from .disk import DiskTier
from .tier import PageContent, PageKey, Tier, TierChain, page_key

UNBOUNDED_BYTES = 1 << 62  # bytes
REALM_FILE_PREFIX = "realm-"  # prefix of empty files that name the realms of a folder's pages
SNAPSHOT_NAME = "snapshot"


def save_snapshot(folder: Path, realm: bytes, pages: Iterable[tuple[PageKey, PageContent]]) -> int:
    """Write pages of a realm into a folder; returns the number of pages. Raises ValueError if the folder
    cannot be used, OSError with its name if a file cannot be written."""
    tier, saved = DiskTier(folder, realm, UNBOUNDED_BYTES), set()
    try:
        for key, content in pages:
            tier.write(key, content)
            saved.add(key)
        (folder / f"{REALM_FILE_PREFIX}{realm.hex()}").touch(mode=0o600)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error
    return len(saved)


def read_cached_pages(
    cache: KVCache, tables: PageTables, transfers: Transfers, excluded: TierChain | None = None
) -> Iterator[tuple[PageKey, PageContent]]:
    """Yield key and content of the pages in the pools' prefix caches, the last first. Skips pages that the
    tiers `excluded` have."""
    for g, pool in enumerate(tables.pools):
        pages = [
            entry
            for entry in reversed(pool.list_cached_pages())
            if not (excluded and excluded.has(page_key(entry[0], g)))
        ]
        for i in range(0, len(pages), MAX_COPY_PAGES):
            chunk = pages[i : i + MAX_COPY_PAGES]
            leaves = transfers.gather(cache, g, [page for _, page in chunk])
            keys = [page_key(page_hash, g) for page_hash, _ in chunk]
            yield from zip(keys, page_contents(leaves, len(chunk)), strict=True)


def find_snapshot(path: str | Path) -> Path:
    """Return the folder of a saved cache of any realm. Raises ValueError if there is no saved cache."""
    folder = os.path.expanduser(path)
    try:
        has_realm_file = any(name.startswith(REALM_FILE_PREFIX) for name in os.listdir(folder))
        refusal = "" if has_realm_file else "expected what save_cache has written"
    except (OSError, ValueError) as error:  # ValueError: such as a path with a null byte
        refusal = getattr(error, "strerror", None) or str(error)
    if refusal:
        raise ValueError(f"load_cache: no saved cache in {folder!r}: {refusal}")
    return Path(folder)


def open_snapshot(path: str | Path, realm: bytes) -> DiskTier:
    """Open the saved pages of a realm in a folder. Raises ValueError if the folder has none, or if other
    users can write to it."""
    folder = find_snapshot(path)
    if f"{REALM_FILE_PREFIX}{realm.hex()}" not in os.listdir(folder):
        raise ValueError(
            f"load_cache: the cache saved in {str(folder)!r} is of another model, other weights, options or "
            "versions"
        )
    try:
        return DiskTier(folder, realm, 0, SNAPSHOT_NAME)
    except ValueError as error:
        raise ValueError(f"load_cache: {error}") from error


def add_snapshot(chain: TierChain, disk_tier: DiskTier) -> None:
    """Append an opened snapshot to a chain of tiers, under a unique name. It replaces an earlier tier of the
    same folder."""
    others = [tier for tier in chain.tiers if not is_snapshot_of(disk_tier.folder, tier)]
    names, number = {tier.name for tier in others}, 1
    while disk_tier.name in names:
        number += 1
        disk_tier.name = f"{SNAPSHOT_NAME} {number}"
    chain.tiers = [*others, disk_tier]


def is_snapshot_of(folder: Path, tier: Tier) -> bool:
    """Return True if a tier is a snapshot in this folder."""
    return isinstance(tier, DiskTier) and not tier.is_writable and tier.folder.resolve() == folder.resolve()
