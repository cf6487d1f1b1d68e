"""The model of an `LLM`: read from a folder, or made of parameters that are on a device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from ...checkpoints.configuration.overrides import overridden_folder
from ...checkpoints.families import FAMILIES
from ...checkpoints.families.family import Family
from ...checkpoints.generation import GenerationDefaults
from ...checkpoints.huggingface import read_config, read_family_config
from ...model.config import ModelConfig
from ...model.transformer import Decoder
from ...sampling.params import SamplingParams
from ..engine.core.embedding_pool import SpanLimits
from ..engine.lora.registry import make_adapter_registry
from ..engine.startup.cpu_kernels import decide_cpu_kernels
from ..engine.startup.model_folder import load_folder
from ..engine.startup.model_source import NO_TOKENIZER, ModelSource
from ..engine.startup.start import check_param_placement, require_finite
from ..host.devices import default_device
from ..host.process import require_not_forked
from ..host.progress import progress_enabled
from ..options.engine import EngineOptions
from ..options.keywords import options_from_keywords
from ..runtime.compiled.jaxcache import enable_compilation_cache
from ..runtime.compiled.shapes import Sizes
from ..runtime.multihost.rendezvous import join_group
from ..text.tokenizer.tokenizer import Tokenizer
from .input_processor import InputProcessor


@dataclass(frozen=True)
class LoadedModel:
    """A model on its devices, with its tokenizer, defaults and options.

    no_tokenizer_reason: why there is no tokenizer, for errors
    folder: folder that the model was read from; None for parameters
    family: family of the checkpoint
    find_source: finds the source of its weights, also if "dummy" has not read them; None for parameters
    """

    config: ModelConfig
    params: Decoder
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    options: EngineOptions
    no_tokenizer_reason: str = NO_TOKENIZER
    folder: str | None = None
    family: Family = FAMILIES["llama"]
    find_source: Callable[[], ModelSource] | None = None

    def make_processor(self, sizes: Sizes, defaults: GenerationDefaults) -> InputProcessor:
        return InputProcessor(
            self.config.vocab_size,
            sizes.max_model_len,
            self.options,
            self.tokenizer,
            defaults.eos_token_ids,
            self.no_tokenizer_reason,
            make_adapter_registry(self.options, self.family, self.config, self.params.embed),
            self.config.hidden_size,
            defaults.pooling,
            sizes.processors,
            self.config.has_head,
            SpanLimits.from_config(self.config, sizes.embedding_rows),
        )


def load_llm_model(
    model: str | Path | None,
    tokenizer: str | Path | None,
    dtype: Any,
    mesh: Mesh | None,
    compilation_cache: str | Path | None,
    options: dict[str, Any],
    revisions: dict[str, Any],
    hub: dict[str, Any],
) -> LoadedModel:
    """Read a model from a folder or a hub id. `hub` has `download_dir` and `token`. Raises as `LLM` does."""
    require_not_forked()
    chosen = join_group(options_from_keywords(options))
    SamplingParams.from_dict(chosen.default_sampling({}))
    enable_compilation_cache(compilation_cache)
    model_source = ModelSource.resolve_names(
        model, tokenizer, weights=chosen.load_format != "dummy", **revisions, **hub
    )
    chosen = model_source.resolve_options(chosen, **hub)
    with (
        progress_enabled(chosen.use_tqdm_on_load),
        overridden_folder(model_source.model_folder, chosen.hf_overrides) as folder,
    ):
        device, count = (default_device(), 1) if mesh is None else (mesh.devices.flat[0], mesh.size)
        chosen = decide_cpu_kernels(chosen, device, read_config(folder), dtype, count)
        config, params, defaults = load_folder(folder, dtype, mesh, chosen)
        family = read_family_config(folder)[0]
    loaded_tokenizer, no_tokenizer_reason = model_source.load_tokenizer()
    find_source = partial(ModelSource.resolve_names, model, revision=revisions["revision"], **hub)
    return LoadedModel(
        config,
        params,
        loaded_tokenizer,
        defaults,
        chosen,
        no_tokenizer_reason,
        str(model_source.model_folder),
        family,
        find_source,
    )


def model_from_params(
    config: ModelConfig,
    params: Decoder,
    tokenizer: Tokenizer | None,
    eos_token_ids: Sequence[int],
    compilation_cache: str | Path | None,
    options: dict[str, Any],
) -> LoadedModel:
    """Make a model of parameters that are on a device. Raises as `LLM.from_params` does."""
    require_not_forked()
    chosen = join_group(options_from_keywords(options))
    if chosen.hf_overrides or chosen.load_format != "auto":
        raise ValueError("hf_overrides and load_format are not allowed: the parameters are here already")
    enable_compilation_cache(compilation_cache)
    require_finite(check_param_placement(params))
    defaults = GenerationDefaults(tuple(eos_token_ids))
    return LoadedModel(config, params, tokenizer, defaults, chosen)
