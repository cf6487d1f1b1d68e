"""The parts of an `LLM`: a model from a folder, or parameters that are on a device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from ...checkpoints.families import FAMILIES
from ...checkpoints.families.family import Family
from ...checkpoints.folders import overridden
from ...checkpoints.generation import GenerationDefaults
from ...checkpoints.huggingface import read_config, read_model
from ...model.config import ModelConfig
from ...model.transformer import Decoder
from ...sampling.params import SamplingParams
from ..engine.lora.registry import registry_of
from ..engine.startup.cpu_kernels import with_kernels
from ..engine.startup.folder import load_folder
from ..engine.startup.origin import NONE, Origin
from ..engine.startup.start import on_devices, require_finite
from ..host.devices import default_device
from ..host.process import require_own_threads
from ..host.progress import telling
from ..options.engine import EngineOptions
from ..options.keywords import engine_options
from ..runtime.compiled.jaxcache import keep_compiled
from ..runtime.compiled.shapes import Sizes
from ..runtime.multihost.rendezvous import join
from ..text.tokenizer.tokenizer import Tokenizer
from .input_processor import InputProcessor


@dataclass(frozen=True)
class LoadedModel:
    """A model on its devices."""

    config: ModelConfig
    params: Decoder
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    options: EngineOptions
    lacking: str = NONE  # why there is no tokenizer
    folder: str | None = None  # it was read from
    family: Family = FAMILIES["llama"]
    again: Callable[[], Origin] | None = None  # finds its weights, which "dummy" has not read

    def processor(self, sizes: Sizes, defaults: GenerationDefaults) -> InputProcessor:
        return InputProcessor(
            self.config.vocab_size,
            sizes.max_model_len,
            self.options,
            self.tokenizer,
            defaults.eos_token_ids,
            self.lacking,
            registry_of(self.options, self.family, self.config, self.params.embed),
            self.config.hidden_size,
            defaults.pooling,
            sizes.processors,
        )


def read(
    model: str | Path | None,
    tokenizer: str | Path | None,
    dtype: Any,
    mesh: Mesh | None,
    compilation_cache: str | Path | None,
    options: dict[str, Any],
    revisions: dict[str, Any],
    hub: dict[str, Any],
) -> LoadedModel:
    """Read a folder or an id; `hub` are `download_dir` and `token`. Errors are those of `LLM`."""
    require_own_threads()
    chosen = join(engine_options(options))
    SamplingParams.from_dict(chosen.recommended({}))
    keep_compiled(compilation_cache)
    origin = Origin.of(model, tokenizer, weights=chosen.load_format != "dummy", **revisions, **hub)
    chosen = origin.settled(chosen, **hub)
    with telling(chosen.use_tqdm_on_load), overridden(origin.model, chosen.hf_overrides) as folder:
        device, count = (default_device(), 1) if mesh is None else (mesh.devices.flat[0], mesh.size)
        chosen = with_kernels(chosen, device, read_config(folder), dtype, count)
        config, params, defaults = load_folder(folder, dtype, mesh, chosen)
        family = read_model(folder)[0]
    words, lacking = origin.words()
    again = partial(Origin.of, model, revision=revisions["revision"], **hub)
    return LoadedModel(config, params, words, defaults, chosen, lacking, str(origin.model), family, again)


def given(
    config: ModelConfig,
    params: Decoder,
    tokenizer: Tokenizer | None,
    eos_token_ids: Sequence[int],
    compilation_cache: str | Path | None,
    options: dict[str, Any],
) -> LoadedModel:
    """Take parameters that are on a device. Errors are those of `LLM.from_params`."""
    require_own_threads()
    chosen = join(engine_options(options))
    if chosen.hf_overrides or chosen.load_format != "auto":
        raise ValueError("hf_overrides and load_format are not allowed: the parameters are here already")
    keep_compiled(compilation_cache)
    require_finite(on_devices(params))
    defaults = GenerationDefaults(tuple(eos_token_ids))
    return LoadedModel(config, params, tokenizer, defaults, chosen)
