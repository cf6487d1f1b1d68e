"""The tiers that an engine's options ask for."""

from functools import partial
from pathlib import Path
from typing import Any

import jax

from ..host.store import cache_home
from ..options.engine import GIB, EngineOptions
from ..programs.compile import Programs
from ..programs.sizing import host_memory
from ..programs.transfers import Transfers
from .disk import DiskTier, place_at
from .host import HostTier
from .later import Later
from .mover import Mover
from .realm import realm
from .tier import Chain, Tier


def check(options: EngineOptions) -> None:
    """Raise ValueError for more memory than the host has, and for a folder that cannot be used."""
    if options.swap_space * GIB > host_memory():
        raise ValueError(
            f"swap_space {options.swap_space:g} GiB is more than the host's memory, "
            f"{host_memory() / GIB:.1f} GiB: lower it"
        )
    if options.kv_disk_space:
        place_at(folder(options), "kv_disk_path")


def folder(options: EngineOptions) -> Path:
    """Where pages are kept in files. Raises ValueError where the user has no home for them."""
    try:
        return Path(options.kv_disk_path or cache_home("pages")).expanduser()
    except RuntimeError as error:
        raise ValueError(f"kv_disk_space is not allowed without kv_disk_path: {error}") from error


def tiers_of(options: EngineOptions, programs: Programs, params: Any) -> Chain:
    """The tiers for pages of these parameters, the quickest first; without files while parameters are not
    there to be named. Raises what `check` does."""
    tiers: list[Tier] = []
    if options.swap_space:
        tiers.append(HostTier(int(options.swap_space * GIB)))
    there = all(isinstance(x, jax.Array) for x in jax.tree.leaves(params))
    if options.kv_disk_space and there:
        named = realm(programs, params, options)
        tiers.append(Later(DiskTier(folder(options), named, options.kv_disk_space * GIB)))
    return Chain(tiers, there)


def mover_of(options: EngineOptions, programs: Programs, params: Any) -> Mover:
    """A mover at work between the pools of programs and the tiers."""
    reopen = partial(tiers_of, options, programs)
    mover = Mover(reopen(params), Transfers(programs.config, programs.like), reopen)
    mover.begin()
    return mover
