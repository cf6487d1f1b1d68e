"""The prefix cache: reset, saved into a folder for another process, and loaded."""

from itertools import chain
from pathlib import Path

from ...kvcache.stages import num_device_groups
from ..engine.weights.weight_update import require_one_process
from ..kv.offload import snapshot, tier_setup
from ..kv.offload.disk import create_page_folder
from ..kv.offload.mover import PageMover
from ..kv.offload.page_finder import KVOffloader
from ..kv.offload.realm import hash_page_realm
from ..options.engine import EngineOptions
from .session import Session


def check_host_tiers(options: EngineOptions) -> None:
    """Raise ValueError for tiers that need more memory than the host has, or for a folder that cannot be
    used."""
    if options.has_tiers:
        tier_setup.check_offload_options(options)


def check_cache_folders(load_cache: str | Path | None, save_cache: str | Path | None) -> None:
    """Raise ValueError if `load_cache` has no saved cache, or if a cache cannot be saved in `save_cache`."""
    if load_cache is not None:
        snapshot.find_snapshot(load_cache)
    if save_cache is not None:
        create_page_folder(save_cache, "save_cache")


def save_cache(session: Session, options: EngineOptions, path: str | Path) -> int:
    """Write the cached pages of prompts and answers into a folder; return their number.

    `load_cache` of another process of the same model, options and versions finds them there. A new folder is
    readable by this user alone. Pages in files (`kv_disk_space`, a loaded cache) are not copied. Raises
    ValueError without prefix caching and for a folder that others can write to, OSError if a file cannot be
    written, RuntimeError while the engine sleeps or lacks parameters.
    """
    with session.hold_engine():
        mover, engine = get_or_start_mover(session, options, "save_cache"), session.engine
        folder = create_page_folder(path, "save_cache")
        pools = snapshot.read_cached_pages(engine.cache, engine.tables, mover.transfers)
        cache_realm = hash_page_realm(engine.programs, engine.all_params, options)
        mover.wait_for_jobs()
        return snapshot.save_snapshot(folder, cache_realm, chain(pools, mover.tier.volatile_pages()))


def load_cache(session: Session, options: EngineOptions, path: str | Path) -> None:
    """Use the pages of `save_cache` in a folder, until other weights are served. Each is read when a prompt
    needs it.

    Raises ValueError for a folder without pages of this model, of these options and versions, RuntimeError
    while the engine sleeps or lacks parameters.
    """
    with session.hold_engine():
        mover, engine = get_or_start_mover(session, options, "load_cache"), session.engine
        cache_realm = hash_page_realm(engine.programs, engine.all_params, options)
        snapshot.add_snapshot(mover.tier, snapshot.open_snapshot(path, cache_realm))


def reset_prefix_cache(session: Session, allow_running: bool, reset_tiers: bool) -> bool:
    """Discard all cached pages, with `reset_tiers` also the pages in host memory. Without `allow_running`, do
    nothing and return False while requests run."""
    with session.hold_engine():
        engine = session.engine
        if engine.scheduler.running and not allow_running:
            return False
        engine.preempt_and_reset_cache()
        if reset_tiers:
            engine.page_finder.on_weights_replaced(engine.all_params)
        return True


def get_or_start_mover(session: Session, options: EngineOptions, method: str) -> PageMover:
    """Return the engine's page mover, which is made if the engine has none. Raises ValueError and
    RuntimeError that name `method`."""
    if not options.enable_prefix_caching:
        raise ValueError(f"{method} is not allowed without enable_prefix_caching: pages lack names")
    engine = session.engine
    if (num_groups := num_device_groups(engine.all_params)) > 1:
        ffn_devices = options.experimental_ffn_devices
        reason = f"experimental_ffn_devices {ffn_devices}" if ffn_devices else f"{num_groups} pipeline stages"
        raise ValueError(f"{method} is not allowed with {reason}")
    require_one_process(engine.all_params, method)
    if engine.sizes.shards > 1:
        raise ValueError(f"{method} is not allowed with data_parallel_size {engine.sizes.shards}: only 1")
    try:
        engine.sleep_state.check_awake()
    except RuntimeError as error:
        raise RuntimeError(f"{method}: {error}") from None
    if not isinstance(engine.page_finder, KVOffloader):
        engine.attach_mover(tier_setup.start_mover(options, engine.programs, engine.all_params))
    assert isinstance(engine.page_finder, KVOffloader)
    return engine.page_finder.mover
