"""What `LLM` keeps of its cache for another process."""

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from ...kvcache.stages import stations
from ..engine.weights.params import require_own
from ..kv.offload import opening, snapshot
from ..kv.offload.disk import place_at
from ..kv.offload.mover import PageMover
from ..kv.offload.realm import realm
from ..kv.offload.tiering import KVOffloader
from ..options.engine import EngineOptions

if TYPE_CHECKING:
    from .llm import LLM


def check_tiers(options: EngineOptions) -> None:
    """Raise ValueError for tiers that need more memory than the host has, or a folder that cannot be used."""
    if options.has_tiers:
        opening.check(options)


def check_places(load_cache: str | Path | None, save_cache: str | Path | None) -> None:
    """Raise ValueError for a folder without a saved cache to load, and for one where none can be saved."""
    if load_cache is not None:
        snapshot.saved_at(load_cache)
    if save_cache is not None:
        place_at(save_cache, "save_cache")


def save_cache(llm: "LLM", path: str | Path) -> int:
    """Write the prompts and answers that the cache holds, page by page, into a folder, and return the number
    of pages.

    `load_cache` of another process of the same model, options and versions finds them there. A folder that
    is made is readable by this user alone. Pages in files, of `kv_disk_space` or of a cache that was loaded,
    stay there and are not copied. Raises ValueError without prefix caching and for a folder that others can
    write to, OSError where a file cannot be written, RuntimeError while the engine sleeps or lacks
    parameters.
    """
    with llm._session.turn():
        mover, engine = mover_at(llm, "save_cache"), llm.engine
        folder = place_at(path, "save_cache")
        pools = snapshot.named_pages(engine.cache, engine.tables, mover.transfers)
        own = realm(engine.programs, engine.everything, llm.options)
        mover.wait()
        return snapshot.save(folder, own, chain(pools, mover.tier.own()))


def load_cache(llm: "LLM", path: str | Path) -> None:
    """Find the pages that `save_cache` has written into a folder, from now on and until other parameters are
    served: each is read when a prompt needs it.

    Raises ValueError for a folder without pages of this model, of these options and versions, RuntimeError
    while the engine sleeps or lacks parameters.
    """
    with llm._session.turn():
        mover, engine = mover_at(llm, "load_cache"), llm.engine
        own = realm(engine.programs, engine.everything, llm.options)
        snapshot.add(mover.tier, snapshot.load(path, own))


def mover_at(llm: "LLM", method: str) -> PageMover:
    """The engine's mover; one without tiers gets it here."""
    if not llm.options.enable_prefix_caching:
        raise ValueError(f"{method} is not allowed without enable_prefix_caching: pages lack names")
    engine = llm.engine
    if (count := stations(engine.everything)) > 1:
        apart = llm.options.experimental_ffn_devices
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
        engine.attach(opening.mover_of(llm.options, engine.programs, engine.everything))
    assert isinstance(engine.tiers, KVOffloader)
    return engine.tiers.mover
