"""Other weights for an engine in use."""

from pathlib import Path
from typing import Any

from jax.sharding import Mesh, NamedSharding

from ...model.config import ModelConfig
from ...model.transformer import Decoder
from ...model.weights.compress import in_form
from ..engine.startup.folder import load_folder
from ..engine.startup.origin import Origin
from ..engine.startup.start import on_devices, require_finite
from ..options.engine import EngineOptions
from .audit.realms import Realms
from .input_processor import InputProcessor
from .session import Mode, Session, check_mode


def update_params(session: Session, options: EngineOptions, params: Decoder, mode: Mode | None) -> None:
    """Serve other weights of the same shapes from now on, without a compilation.

    `mode` of unfinished requests: "abort"; "wait" runs them to their end before (those that come meanwhile
    are kept); "keep" keeps their tokens, computes them again and continues them with the new weights, as if
    prompt and tokens had been given. `CompletionOutput.weights` has the version that made each token. Without
    a mode, unfinished requests raise RuntimeError, unless the engine sleeps or is paused. Raises ValueError
    for another mode, if a shape, dtype or sharding differs, and for a parameter with NaN or infinity;
    TypeError for parameters that are not on a device. The weights are then kept.
    """
    if mode is not None:
        check_mode(mode)
    if mode == "wait":
        session.settle(mode)
    with session.turn():
        engine, params = session.engine, on_devices(params)
        require_finite(params)
        found = in_form(params, options.quantization, params.embed.dtype)
        engine.update_params(found, keep=mode is not None or engine.is_sleeping)
        if mode == "abort":  # once it is known that the others fit
            session.settle(mode)
        if session.log is not None:
            session.log.replaced(engine.weights, engine.params)
        if session.realms is not None:
            session.realms.renew(engine)
    session.wake()


def load_params(
    session: Session, options: EngineOptions, config: ModelConfig, path: str | Path, mode: Mode | None
) -> int:
    """Serve the weights of a folder of the same model; return their version. Errors are those of
    `LLM.load_params`."""
    origin, served = Origin.of(path, weights=True), session.engine.params.embed
    placed = served.sharding
    mesh = placed.mesh if isinstance(placed, NamedSharding) and isinstance(placed.mesh, Mesh) else None
    found, params, _ = load_folder(origin.model, str(served.dtype), mesh, origin.settled(options))
    if found != config:
        raise ValueError(f"load_params: {path} is of another model: its configuration differs")
    with session.turn():
        update_params(session, options, params, mode)
        return session.engine.weights


def realms_of(session: Session, processor: InputProcessor, *others: Any) -> Realms:
    """Return the names of what answers follow from, renewed with the weights; `others` are further facts."""
    with session.turn():
        facts = processor.eos_ids, *others
        session.realms = Realms(session.engine, processor.options, processor.tokenizer, *facts)
        return session.realms
