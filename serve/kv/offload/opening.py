"""Opens the tiers that an engine's options ask for."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from ....user_folders import cache_home
from ...options.checks import GIB
from ...options.engine import EngineOptions
from ...runtime.compiled.sizing import host_memory
from ...runtime.compiled.transfers import Transfers
from ...runtime.programs import StepPrograms
from .disk import DiskTier, place_at
from .host import HostTier
from .later import WriteBehindTier
from .mover import PageMover
from .peer import RemoteKV
from .realm import realm
from .tier import Tier, TierChain

# called with the realm of the engine's pages, and the bytes of a page of each window
OnRealm = Callable[[bytes | None, Sequence[int]], None]


def check(options: EngineOptions) -> None:
    """Raise ValueError for more memory than the host has, and for a folder that cannot be used."""
    if options.host_space * GIB > host_memory():
        raise ValueError(
            f"swap_space {options.host_space:g} GiB is more than the host's memory, "
            f"{host_memory() / GIB:.1f} GiB: lower it"
        )
    if options.kv_disk_space:
        place_at(folder(options), "kv_disk_path")


def folder(options: EngineOptions) -> Path:
    """Return the folder of pages in files. Raises ValueError where the user has no home."""
    try:
        return Path(options.kv_disk_path or cache_home("pages")).expanduser()
    except RuntimeError as error:
        raise ValueError(f"kv_disk_space is not allowed without kv_disk_path: {error}") from error


def tiers_of(options: EngineOptions, programs: StepPrograms, params: Any) -> TierChain:
    """Return the tiers for pages of these parameters, the fastest first; without the disk while the
    parameters are not on the device, since the realm is a hash of them. Raises what `check` does."""
    tiers: list[Tier] = []
    if options.host_space:
        tiers.append(HostTier(int(options.host_space * GIB)))
    there = are_there(params)
    if options.kv_disk_space and there:
        named = realm(programs, params, options)
        tiers.append(WriteBehindTier(DiskTier(folder(options), named, options.kv_disk_space * GIB)))
    return TierChain(tiers, there)


def are_there(params: Any) -> bool:
    return all(isinstance(x, jax.Array) for x in jax.tree.leaves(params))


def mover_of(
    options: EngineOptions,
    programs: StepPrograms,
    params: Any,
    peer: RemoteKV | None = None,
    on_realm: OnRealm | None = None,
) -> PageMover:
    """Start a mover between the pools of programs and the tiers, of which `peer` is the last. `on_realm` and
    the peer get the pages' realm, now and whenever parameters are replaced."""
    transfers = Transfers(programs.config, programs.like)
    listeners = [on_realm, peer.renew if peer else None]

    def reopen(params: Any) -> TierChain:
        chain = tiers_of(options, programs, params)
        if any(listeners):
            named = realm(programs, params, options, options.reproducible) if are_there(params) else None
            for hear in listeners:
                if hear is not None:
                    hear(named, transfers.page_bytes)
        return TierChain([*chain.tiers, *([peer] if peer else [])], chain.whole)

    mover = PageMover(reopen(params), transfers, reopen, peer)
    mover.begin()
    return mover
