"""A folder of all pages that an engine can find by name, to go on from in another process."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from ...kvcache.pages import KVCache
from ...kvcache.tables import PageTables
from ..programs.transfers import MOST, Transfers, contents
from .disk import DiskTier
from .tier import Chain, Content, Key, key_of

UNBOUNDED = 1 << 62  # bytes
NOTE = "realm-"  # how files begin that say whose pages a folder has


def save(folder: Path, realm: bytes, pages: Iterable[tuple[Key, Content]]) -> int:
    """Write pages of a realm into a folder; how many they are. Raises ValueError for a folder that
    cannot be used, OSError where a file cannot be written."""
    tier, saved = DiskTier(folder, realm, UNBOUNDED), set()
    for key, content in pages:
        tier.write(key, content)
        saved.add(key)
    (folder / f"{NOTE}{realm.hex()}").touch(mode=0o600)
    return len(saved)


def named_pages(
    cache: KVCache, tables: PageTables, transfers: Transfers, but: Chain | None = None
) -> Iterator[tuple[Key, Content]]:
    """All pages of the pools that can be found by name, the last first, but those that a tier has."""
    for g, pool in enumerate(tables.pools):
        named = [entry for entry in reversed(pool.named()) if not (but and but.has(key_of(entry[0], g)))]
        for i in range(0, len(named), MOST):
            part = named[i : i + MOST]
            leaves = transfers.gather(cache, g, [page for _, page in part])
            keys = [key_of(name, g) for name, _ in part]
            yield from zip(keys, contents(leaves, len(part)), strict=True)


def load(folder: Path, realm: bytes) -> DiskTier:
    """The pages of a realm in a folder. Raises ValueError for one without any, and for one that others can
    write to."""
    if not folder.is_dir():
        raise ValueError(f"no saved cache in {folder}: it is no folder")
    if not (folder / f"{NOTE}{realm.hex()}").exists():
        others = any(folder.glob(f"{NOTE}*"))
        raise ValueError(
            f"the cache saved in {folder} is of another model, other weights, options or versions"
            if others
            else f"no saved cache in {folder}"
        )
    return DiskTier(folder, realm, 0, "snapshot")
