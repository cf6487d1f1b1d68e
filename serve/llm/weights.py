"""Other weights for an `LLM` in use, and what becomes of requests meanwhile; names are vLLM's where it has
them."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jax.sharding import Mesh, NamedSharding

from ...model.transformer import Decoder
from ...model.weights.compress import in_form
from ..engine.startup.folder import load_folder
from ..engine.startup.origin import Origin
from ..engine.startup.start import on_devices, require_finite
from ..engine.weights.sleep import TAGS
from .audit.realms import Realms

if TYPE_CHECKING:
    from .llm import LLM

Mode = Literal["abort", "wait", "keep"]
MODES = ("abort", "wait", "keep")


def update_params(llm: "LLM", params: Decoder, mode: Mode | None = None) -> None:
    """Serve other weights of the same shapes from now on, without a compilation.

    Unfinished requests are aborted, run to their end before ("wait"; those that come meanwhile are kept), or
    kept: their tokens so far stay, are computed again, and followed by those of the new weights, as if the
    prompt and these tokens had been given. Which version made which token is told by
    `CompletionOutput.weights`. Without a mode RuntimeError is raised where there are such requests, unless
    the engine sleeps or is paused. Raises ValueError for another mode, where a shape, dtype or sharding
    differs, and for a parameter with NaN or infinity, TypeError for parameters that are not on a device. The
    weights stay as they are then.
    """
    if mode is not None:
        check(mode)
    if mode == "wait":
        llm._session.settle(mode)
    with llm._session.turn():
        engine, params = llm.engine, on_devices(params)
        require_finite(params)
        found = in_form(params, llm.options.quantization, params.embed.dtype)
        engine.update_params(found, keep=mode is not None or engine.is_sleeping)
        if mode == "abort":  # once it is known that the others fit
            llm._session.settle(mode)
        if llm._session.log is not None:
            llm._session.log.replaced(engine.weights, engine.params)
        if llm._session.realms is not None:
            llm._session.realms.renew(engine)


def realms_of(llm: "LLM", *others: Any) -> Realms:
    """Names of what its answers follow from, renewed with the weights; `others` are facts of the caller."""
    with llm._session.turn():
        facts = llm._intake.eos_ids, *others
        llm._session.realms = Realms(llm.engine, llm.options, llm.tokenizer, *facts)
        return llm._session.realms


def load_params(llm: "LLM", path: str | Path, mode: Mode | None = None) -> int:
    """`update_params` with those of a folder of the same model, in the dtype of those that are served; their
    version, which is how often others came. Raises CheckpointError for the folder."""
    origin, served = Origin.of(path, weights=True), llm.params.embed
    placed = served.sharding
    mesh = placed.mesh if isinstance(placed, NamedSharding) and isinstance(placed.mesh, Mesh) else None
    options = origin.settled(llm.options)
    config, params, _ = load_folder(origin.model, str(served.dtype), mesh, options)
    if config != llm.config:
        raise ValueError(f"load_params: {path} is of another model: its configuration differs")
    with llm._session.turn():
        update_params(llm, params, mode)
        return llm.engine.weights


def pause_generation(llm: "LLM", mode: Mode = "abort", clear_cache: bool = True) -> None:
    """Take no steps until `resume_generation`; unfinished requests are aborted, run to their end before
    ("wait"), or frozen ("keep"), and new ones wait. Where the cache is cleared, what is kept is computed
    again. A call that needs a step raises RuntimeError meanwhile. Raises ValueError for another mode."""
    check(mode)
    llm._session.settle(mode)
    with llm._session.turn():
        if clear_cache and not llm.engine.is_sleeping:
            llm.engine.vacate()
        llm.engine.sleep(0)


def resume_generation(llm: "LLM") -> None:
    """End a pause."""
    with llm._session.turn():
        llm.engine.wake_up(TAGS[-1:])


def check(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode={mode!r} is not allowed: 'abort', 'wait' or 'keep'")
