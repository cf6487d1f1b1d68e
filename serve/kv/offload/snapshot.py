"""Snapshots: folders with all pages that an engine can find by name, for another process to load."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ....kvcache.pages import KVCache
from ....kvcache.tables import PageTables
from ...runtime.compiled.transfers import MOST, Transfers, contents
from .disk import DiskTier
from .tier import Content, Key, Tier, TierChain, key_of

UNBOUNDED = 1 << 62  # bytes
NOTE = "realm-"  # prefix of empty files that name the realms of a folder's pages
NAME = "snapshot"


def save(folder: Path, realm: bytes, pages: Iterable[tuple[Key, Content]]) -> int:
    """Write pages of a realm into a folder; returns their number. Raises ValueError for a folder that
    cannot be used, OSError with its name where a file cannot be written."""
    tier, saved = DiskTier(folder, realm, UNBOUNDED), set()
    try:
        for key, content in pages:
            tier.write(key, content)
            saved.add(key)
        (folder / f"{NOTE}{realm.hex()}").touch(mode=0o600)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(folder)) from error
    return len(saved)


def named_pages(
    cache: KVCache, tables: PageTables, transfers: Transfers, but: TierChain | None = None
) -> Iterator[tuple[Key, Content]]:
    """Yield all pages of the pools that can be found by name, the last first, but not those in the tiers
    `but`."""
    for g, pool in enumerate(tables.pools):
        named = [entry for entry in reversed(pool.named()) if not (but and but.has(key_of(entry[0], g)))]
        for i in range(0, len(named), MOST):
            part = named[i : i + MOST]
            leaves = transfers.gather(cache, g, [page for _, page in part])
            keys = [key_of(name, g) for name, _ in part]
            yield from zip(keys, contents(leaves, len(part)), strict=True)


def saved_at(path: str | Path) -> Path:
    """Return the folder of a saved cache of any realm. Raises ValueError where there is none."""
    folder = os.path.expanduser(path)
    try:
        has_note = any(name.startswith(NOTE) for name in os.listdir(folder))
        refused = "" if has_note else "expected what save_cache has written"
    except (OSError, ValueError) as error:  # ValueError is a path's that no system has
        refused = getattr(error, "strerror", None) or str(error)
    if refused:
        raise ValueError(f"load_cache: no saved cache in {folder!r}: {refused}")
    return Path(folder)


def load(path: str | Path, realm: bytes) -> DiskTier:
    """Open the pages of a realm in a folder. Raises ValueError for a folder without any, and for one that
    other users can write to."""
    folder = saved_at(path)
    if f"{NOTE}{realm.hex()}" not in os.listdir(folder):
        raise ValueError(
            f"load_cache: the cache saved in {str(folder)!r} is of another model, other weights, options or "
            "versions"
        )
    try:
        return DiskTier(folder, realm, 0, NAME)
    except ValueError as error:
        raise ValueError(f"load_cache: {error}") from error


def add(chain: TierChain, loaded: DiskTier) -> None:
    """Append a loaded folder to a chain of tiers, under a name of its own; it replaces the same folder loaded
    before."""
    others = [tier for tier in chain.tiers if not is_of(loaded.folder, tier)]
    taken, number = {tier.name for tier in others}, 1
    while loaded.name in taken:
        number += 1
        loaded.name = f"{NAME} {number}"
    chain.tiers = [*others, loaded]


def is_of(folder: Path, tier: Tier) -> bool:
    """Return whether a tier was loaded from this folder."""
    return isinstance(tier, DiskTier) and not tier.keeps and tier.folder.resolve() == folder.resolve()
