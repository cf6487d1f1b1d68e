"""Update of the weights of a running engine, and their storage in a folder."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, NamedSharding

from ...checkpoints.configuration.overrides import overridden_folder
from ...checkpoints.folders import atomic_folder
from ...model.config import ModelConfig
from ...model.transformer import Decoder, decoder_spec
from ...model.weights.compression.compress import convert_weight_form
from ..engine.startup.model_folder import load_folder, write_orbax
from ..engine.startup.model_source import ModelSource
from ..engine.startup.start import check_param_placement, require_finite
from ..engine.weights.weight_update import match_served_params
from ..host.process import trim_heap
from ..options.engine import EngineOptions
from .audit.answer_realm import AnswerRealm
from .input_processor import InputProcessor
from .session import PauseMode, Session, check_pause_mode


def update_params(
    session: Session, options: EngineOptions, params: Decoder, mode: PauseMode | None, copy: bool = False
) -> None:
    """Serve other weights of the same shapes from now on. No step is compiled again.

    Floating-point numbers of another dtype (masters in float32, served in bfloat16) are rounded to the
    nearest as `astype` does, and arrays of another sharding or layout are laid out again, on their devices.
    If one parameter needs that, all are copied, else none is: the engine then reads the caller's arrays, and
    a train step must not donate them. With `copy` they are always copied, and the caller may donate or delete
    its arrays once this returns. The old weights are released when the new ones are ready.

    `mode` says what happens to unfinished requests. "abort" aborts them. "wait" runs them to their end
    before; requests that arrive meanwhile are kept. "keep" keeps their tokens, computes their cache again,
    and continues them with the new weights. `CompletionOutput.weights` has the version that made each token.

    Without a mode, unfinished requests raise RuntimeError, unless the engine sleeps or is paused. Raises
    ValueError for another mode, if a name, a shape, the devices or a dtype that is no float differ, and for a
    parameter with NaN or infinity (as rounded) or whose array was deleted; TypeError for parameters that are
    not on a device. The old weights are then served on.
    """
    if mode is not None:
        check_pause_mode(mode)
    if mode == "wait":
        session.abort_or_drain(mode)
    with session.hold_engine():
        engine = session.engine
        params, donate = match_served_params(engine.params, check_param_placement(params), copy)
        require_finite(params)
        new_params = convert_weight_form(params, options.quantization, params.embed.dtype, donate)
        engine.update_params(new_params, mode is not None or engine.is_sleeping, donate)
        if mode == "abort":  # once it is known that the others fit
            session.abort_or_drain(mode)
        if session.audit_log is not None:
            session.audit_log.on_weights_replaced(engine.weights_version, engine.params)
        if session.answer_realm is not None:
            session.answer_realm.renew(engine)
    session.wake()


def resolve_model_source(
    path: str | Path | None, find_source: Callable[[], ModelSource] | None
) -> ModelSource:
    """Return the source of weights: the folder `path`, or if that is None the model's own, found by
    `find_source`. Raises ValueError for a model that was not read from a folder."""
    if path is not None:
        return ModelSource.resolve_names(path)
    if find_source is None:
        raise ValueError("load_params: path is missing: the model was not read from a folder")
    return find_source()


def load_params(
    session: Session,
    options: EngineOptions,
    config: ModelConfig,
    model_source: ModelSource,
    mode: PauseMode | None,
) -> int:
    """Serve the weights of a folder of the same model. Returns their version. Raises as `LLM.load_params`
    does."""
    served = session.engine.params.embed
    chosen = model_source.resolve_options(replace(options, load_format="auto"))
    sharding = served.sharding
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None
    with overridden_folder(model_source.model_folder, options.hf_overrides) as folder:
        loaded_config, params, _ = load_folder(folder, str(served.dtype), mesh, chosen)
    if loaded_config != config:
        raise ValueError(
            f"load_params: {model_source.model_folder} is of another model: its configuration differs"
        )
    with session.hold_engine():
        update_params(session, options, params, mode)
        version = session.engine.weights_version
    trim_heap()  # else each thread that has loaded keeps the memory of a set of weights
    return version


def save_params(config: ModelConfig, params: Decoder, source: str | None, path: str | Path) -> None:
    """Write weights as a folder that `LLM` loads. Raises CheckpointError if `path` exists already, ValueError
    for a model that was not read from a folder."""
    if source is None:
        raise ValueError("save_params: the model was not read from a folder, so what describes it is unknown")
    if decoder_spec(config).head is None:  # a pipeline's last stage has a copy of the embedding
        params = replace(params, head=None)
    with atomic_folder(Path(path)) as folder:
        write_orbax(folder, Path(source), params)


def set_answer_realm(session: Session, processor: InputProcessor, *others: Any) -> AnswerRealm:
    """Give the session a realm of answers, which is renewed with the weights, and return it. `others` are
    further facts that decide answers."""
    with session.hold_engine():
        facts = processor.eos_ids, *others
        session.answer_realm = AnswerRealm(session.engine, processor.options, processor.tokenizer, *facts)
        return session.answer_realm
