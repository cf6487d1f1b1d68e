"""The prefix cache: reset, saved into a folder for another process, and loaded."""

from itertools import chain
from pathlib import Path

from ...kvcache.stages import stations
from ..engine.weights.params import require_own
from ..kv.offload import opening, snapshot
from ..kv.offload.disk import place_at
from ..kv.offload.mover import PageMover
from ..kv.offload.realm import realm
from ..kv.offload.tiering import KVOffloader
from ..options.engine import EngineOptions
from .session import Session


def check_tiers(options: EngineOptions) -> None:
    """Raise ValueError for tiers that need more memory than the host has, or a folder that cannot be used."""
    if options.has_tiers:
        opening.check(options)


def check_places(load_cache: str | Path | None, save_cache: str | Path | None) -> None:
    """Raise ValueError for a folder without a saved cache to load, or one in which none can be saved."""
    if load_cache is not None:
        snapshot.saved_at(load_cache)
    if save_cache is not None:
        place_at(save_cache, "save_cache")


def save_cache(session: Session, options: EngineOptions, path: str | Path) -> int:
    """Write the cached pages of prompts and answers into a folder; return their number.

    `load_cache` of another process of the same model, options and versions finds them there. A new folder is
    readable by this user alone. Pages in files (`kv_disk_space`, a loaded cache) are not copied. Raises
    ValueError without prefix caching and for a folder that others can write to, OSError if a file cannot be
    written, RuntimeError while the engine sleeps or lacks parameters.
    """
    with session.turn():
        mover, engine = mover_at(session, options, "save_cache"), session.engine
        folder = place_at(path, "save_cache")
        pools = snapshot.named_pages(engine.cache, engine.tables, mover.transfers)
        own = realm(engine.programs, engine.everything, options)
        mover.wait()
        return snapshot.save(folder, own, chain(pools, mover.tier.own()))


def load_cache(session: Session, options: EngineOptions, path: str | Path) -> None:
    """Find pages of `save_cache` in a folder, until other weights are served.

    Raises ValueError for a folder without pages of this model, of these options and versions, RuntimeError
    while the engine sleeps or lacks parameters.
    """
    with session.turn():
        mover, engine = mover_at(session, options, "load_cache"), session.engine
        own = realm(engine.programs, engine.everything, options)
        snapshot.add(mover.tier, snapshot.load(path, own))


def reset(session: Session, running: bool, tiers: bool) -> bool:
    """Forget all cached pages, those in `tiers` too; `running` allows it while requests run."""
    with session.turn():
        engine = session.engine
        if engine.scheduler.running and not running:
            return False
        engine.vacate()
        if tiers:
            engine.tiers.replaced(engine.everything)
        return True


def mover_at(session: Session, options: EngineOptions, method: str) -> PageMover:
    """Return the engine's page mover; an engine without tiers gets one. Raises ValueError and RuntimeError
    that name `method`."""
    if not options.enable_prefix_caching:
        raise ValueError(f"{method} is not allowed without enable_prefix_caching: pages lack names")
    engine = session.engine
    if (count := stations(engine.everything)) > 1:
        apart = options.experimental_ffn_devices
        beside = f"experimental_ffn_devices {apart}" if apart else f"{count} pipeline stages"
        raise ValueError(f"{method} is not allowed with {beside}")
    require_own(engine.everything, method)
    if engine.sizes.shards > 1:
        raise ValueError(f"{method} is not allowed with data_parallel_size {engine.sizes.shards}: only 1")
    try:
        engine.sleeper.check()
    except RuntimeError as error:
        raise RuntimeError(f"{method}: {error}") from None
    if not isinstance(engine.tiers, KVOffloader):
        engine.attach(opening.mover_of(options, engine.programs, engine.everything))
    assert isinstance(engine.tiers, KVOffloader)
    return engine.tiers.mover
