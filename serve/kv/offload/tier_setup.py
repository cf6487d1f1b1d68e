"""Setup of KV offload: the tiers that an engine's options ask for, and the mover between them and the
device."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from ....user_folders import cache_home
from ...options.checks import GIB
from ...options.engine import EngineOptions
from ...runtime.compiled.sizing import host_memory_bytes
from ...runtime.compiled.transfers import Transfers
from ...runtime.executor import StepPrograms
from .disk import DiskTier, create_page_folder
from .host import HostTier
from .mover import PageMover
from .realm import hash_page_realm
from .remote_kv import RemoteKV
from .tier import Tier, TierChain
from .write_behind import WriteBehindTier

# called with the realm of the engine's pages (None without parameters) and the bytes of a page of each window
OnRealm = Callable[[bytes | None, Sequence[int]], None]


def check_offload_options(options: EngineOptions) -> None:
    """Raise ValueError if the options need more memory than the host has, or a folder that cannot be used."""
    if options.host_space * GIB > host_memory_bytes():
        raise ValueError(
            f"swap_space {options.host_space:g} GiB is more than the host's memory, "
            f"{host_memory_bytes() / GIB:.1f} GiB: lower it"
        )
    if options.kv_disk_space:
        create_page_folder(disk_folder(options), "kv_disk_path")


def disk_folder(options: EngineOptions) -> Path:
    """Return the folder of the disk tier. Raises ValueError if the options name none and the user has no
    home."""
    try:
        return Path(options.kv_disk_path or cache_home("pages")).expanduser()
    except RuntimeError as error:
        raise ValueError(f"kv_disk_space is not allowed without kv_disk_path: {error}") from error


def open_tiers(options: EngineOptions, programs: StepPrograms, params: Any) -> TierChain:
    """Open the tiers for the pages of these parameters, the fastest first.

    The disk tier is left out while the parameters are not on the device: its realm is a hash of them. Raises
    the errors of `check_offload_options`.
    """
    tiers: list[Tier] = []
    if options.host_space:
        tiers.append(HostTier(int(options.host_space * GIB)))
    has_params = are_params_on_device(params)
    if options.kv_disk_space and has_params:
        page_realm = hash_page_realm(programs, params, options)
        tiers.append(WriteBehindTier(DiskTier(disk_folder(options), page_realm, options.kv_disk_space * GIB)))
    return TierChain(tiers, has_params)


def are_params_on_device(params: Any) -> bool:
    """Return True if all parameters are arrays on a device."""
    return all(isinstance(x, jax.Array) for x in jax.tree.leaves(params))


def start_mover(
    options: EngineOptions,
    programs: StepPrograms,
    params: Any,
    remote_kv: RemoteKV | None = None,
    on_realm: OnRealm | None = None,
) -> PageMover:
    """Start a mover between the pools of programs and the tiers, of which `remote_kv` is the last.

    on_realm: called with the pages' realm, as `remote_kv.expect_realm` is, now and whenever parameters are
        replaced.
    """
    transfers = Transfers(programs.config, programs.abstract_arguments)
    listeners = [on_realm, remote_kv.expect_realm if remote_kv else None]

    def reopen_tiers(params: Any) -> TierChain:
        """Open the tiers for other parameters, and tell the listeners the realm."""
        chain = open_tiers(options, programs, params)
        if any(listeners):
            page_realm = (
                hash_page_realm(programs, params, options, options.reproducible)
                if are_params_on_device(params)
                else None
            )
            for listener in listeners:
                if listener is not None:
                    listener(page_realm, transfers.page_bytes)
        return TierChain([*chain.tiers, *([remote_kv] if remote_kv else [])], chain.is_complete)

    mover = PageMover(reopen_tiers(params), transfers, reopen_tiers, remote_kv)
    mover.start()
    return mover
