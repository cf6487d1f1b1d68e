"""A folder of all pages that an engine can find by name, to go on from in another process."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ....kvcache.pages import KVCache
from ....kvcache.tables import PageTables
from ...runtime.compiled.transfers import MOST, Transfers, contents
from .disk import DiskTier
from .tier import Content, Key, Tier, TierChain, key_of

UNBOUNDED = 1 << 62  # bytes
NOTE = "realm-"  # how files begin that say whose pages a folder has
NAME = "snapshot"


def save(folder: Path, realm: bytes, pages: Iterable[tuple[Key, Content]]) -> int:
    """Write pages of a realm into a folder; how many they are. Raises ValueError for a folder that
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
    """All pages of the pools that can be found by name, the last first, but those that a tier has."""
    for g, pool in enumerate(tables.pools):
        named = [entry for entry in reversed(pool.named()) if not (but and but.has(key_of(entry[0], g)))]
        for i in range(0, len(named), MOST):
            part = named[i : i + MOST]
            leaves = transfers.gather(cache, g, [page for _, page in part])
            keys = [key_of(name, g) for name, _ in part]
            yield from zip(keys, contents(leaves, len(part)), strict=True)


def saved_at(path: str | Path) -> Path:
    """The folder of a saved cache, whosever it is. Raises ValueError where there is none."""
    folder = os.path.expanduser(path)
    try:
        refused = "" if any(map(is_note, os.listdir(folder))) else "expected what save_cache has written"
    except (OSError, ValueError) as error:  # ValueError is a path's that no system has
        refused = getattr(error, "strerror", None) or str(error)
    if refused:
        raise ValueError(f"load_cache: no saved cache in {folder!r}: {refused}")
    return Path(folder)


def is_note(name: str) -> bool:
    return name.startswith(NOTE)


def load(path: str | Path, realm: bytes) -> DiskTier:
    """The pages of a realm in a folder. Raises ValueError for one without any, and for one that others can
    write to."""
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
    """Find pages in what was loaded too, under a name of its own; a folder that was loaded before is read
    anew."""
    others = [tier for tier in chain.tiers if not is_of(loaded.folder, tier)]
    taken, number = {tier.name for tier in others}, 1
    while loaded.name in taken:
        number += 1
        loaded.name = f"{NAME} {number}"
    chain.tiers = [*others, loaded]


def is_of(folder: Path, tier: Tier) -> bool:
    """Whether a tier is what was loaded from a folder."""
    return isinstance(tier, DiskTier) and not tier.keeps and tier.folder.resolve() == folder.resolve()
