"""Other weights for an engine in use."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, NamedSharding

from ...checkpoints.folders import fresh, overridden
from ...model.config import ModelConfig
from ...model.transformer import Decoder, decoder_spec
from ...model.weights.compress import in_form
from ..engine.startup.folder import load_folder, write_orbax
from ..engine.startup.origin import Origin
from ..engine.startup.start import on_devices, require_finite
from ..host.process import give_back
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


def origin_of(path: str | Path | None, again: Callable[[], Origin] | None) -> Origin:
    """Return the folder of weights: a path, or the model's own, which `again` finds. Raises ValueError for a
    model that was not read from a folder."""
    if path is not None:
        return Origin.of(path)
    if again is None:
        raise ValueError("load_params: path is missing: the model was not read from a folder")
    return again()


def load_params(
    session: Session, options: EngineOptions, config: ModelConfig, origin: Origin, mode: Mode | None
) -> int:
    """Serve the weights of a folder of the same model; return their version. Errors are those of
    `LLM.load_params`."""
    served, chosen = session.engine.params.embed, origin.settled(replace(options, load_format="auto"))
    placed = served.sharding
    mesh = placed.mesh if isinstance(placed, NamedSharding) and isinstance(placed.mesh, Mesh) else None
    with overridden(origin.model, options.hf_overrides) as folder:
        found, params, _ = load_folder(folder, str(served.dtype), mesh, chosen)
    if found != config:
        raise ValueError(f"load_params: {origin.model} is of another model: its configuration differs")
    with session.turn():
        update_params(session, options, params, mode)
        version = session.engine.weights
    give_back()  # else each thread that has loaded keeps the memory of a set of weights
    return version


def save_params(config: ModelConfig, params: Decoder, source: str | None, path: str | Path) -> None:
    """Write weights as a folder that `LLM` loads. Raises CheckpointError if `path` exists already, ValueError
    for a model that was not read from a folder."""
    if source is None:
        raise ValueError("save_params: the model was not read from a folder, so what describes it is unknown")
    if decoder_spec(config).head is None:  # a pipeline's last stage has a copy of the embedding
        params = replace(params, head=None)
    with fresh(Path(path)) as folder:
        write_orbax(folder, Path(source), params)


def realms_of(session: Session, processor: InputProcessor, *others: Any) -> Realms:
    """Return the names of what answers follow from, renewed with the weights; `others` are further facts."""
    with session.turn():
        facts = processor.eos_ids, *others
        session.realms = Realms(session.engine, processor.options, processor.tokenizer, *facts)
        return session.realms
