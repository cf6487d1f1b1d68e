"""Folders of a model and its tokenizer, from paths or ids on the hub, and facts in them besides the
weights."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....checkpoints import heads, orbax
from ....checkpoints.configuration.overrides import overridden_folder
from ....checkpoints.folders import read_config_json
from ....checkpoints.generation import GenerationDefaults
from ....checkpoints.hub import resolve_draft, resolve_model
from ....checkpoints.quantised.activations import stated_activations
from ....checkpoints.tensors import CheckpointError
from ....sampling.params import MAX_STOP_IDS
from ...options.engine import SAME_WEIGHTS, STORED_QUANTIZATIONS, EngineOptions
from ...text.tokenizer.tokenizer import Tokenizer
from ...text.tokenizer.vocabularies import EXPECTED_FILES, describe_unsupported
from .model_folder import DEMO_FOLDER

NO_TOKENIZER = "the model has no tokenizer"


@dataclass(frozen=True)
class ModelSource:
    """Folders of a model and of its tokenizer.

    is_tokenizer_of_model: True if the tokenizer has no name of its own: the model's name stands for both.
    """

    model_folder: Path
    tokenizer_folder: Path
    is_tokenizer_of_model: bool = True

    @classmethod
    def resolve_names(
        cls,
        model: str | Path | None,
        tokenizer: str | Path | None = None,
        *,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        weights: bool = True,
        **hub_options: Any,
    ) -> "ModelSource":
        """Return the folders of paths or ids; downloads are made as needed. Raises the errors of
        `hub.resolve_model`.

        hub_options: `download_dir` and `token` of `hub.resolve_model`.
        """
        folder = (
            DEMO_FOLDER if model is None else resolve_model(model, revision, weights=weights, **hub_options)
        )
        is_tokenizer_of_model, name = tokenizer is None, model if tokenizer is None else tokenizer
        if name is None or (is_tokenizer_of_model and tokenizer_revision is None):
            return cls(folder, folder)
        return cls(
            folder,
            resolve_model(name, tokenizer_revision, weights=False, **hub_options),
            is_tokenizer_of_model,
        )

    def load_tokenizer(self) -> tuple[Tokenizer | None, str]:
        """Load the tokenizer; returns it and "", or None and the reason why there is none.

        Raises ValueError for a tokenizer that cannot be read, and if a folder named for it has none.
        """
        tokenizer = Tokenizer.from_folder(self.tokenizer_folder)
        if tokenizer is not None:
            return tokenizer, ""
        reason = describe_unsupported(self.tokenizer_folder)
        if not self.is_tokenizer_of_model:
            raise ValueError(
                f"tokenizer {str(self.tokenizer_folder)!r} has no {EXPECTED_FILES}"
                + (f": {reason}" if reason else "")
            )
        if reason:
            print(f"duetto: {reason}: only prompts of token ids can be given", file=sys.stderr)
        return None, f"{NO_TOKENIZER} ({reason})" if reason else NO_TOKENIZER

    def resolve_options(self, options: EngineOptions, **hub_options: Any) -> EngineOptions:
        """Return the options with a draft model's name resolved to its folder.

        `load_format`, and what `resolve_weight_options` resolves, become what remains to be done for this
        folder. Raises CheckpointError if the folder contradicts them.
        """
        draft, config = options.speculation.model, options.speculative_config
        if draft is not None and isinstance(config, Mapping):
            draft_folder = resolve_draft(draft, **hub_options)
            method = "heads" if (draft_folder / heads.HEADS_FILE).exists() else "draft_model"
            config = {**config, "method": config.get("method") or method, "model": str(draft_folder)}
        with overridden_folder(self.model_folder, options.hf_overrides) as folder:
            options = resolve_weight_options(folder, options)
        format = resolve_load_format(self.model_folder, options.load_format)
        return replace(options, speculative_config=config, load_format=format)


def resolve_load_format(folder: Path, load_format: str) -> str:
    """Return "auto" for a load format of vLLM that reads the same weights; other names are returned
    unchanged.

    Raises CheckpointError for "sharded_state" if the folder is not an Orbax folder.
    """
    if load_format == "sharded_state" and not orbax.is_orbax(folder):
        raise CheckpointError(
            f"{folder}: load_format='sharded_state' is not allowed: it reads folders that LLM.save_params or "
            "`duetto convert` has written"
        )
    return "auto" if load_format in SAME_WEIGHTS else load_format


def resolve_weight_options(folder: Path, options: EngineOptions) -> EngineOptions:
    """Return the options with `quantization` as what remains to be done for a folder, and `activations` as a
    scheme or None. Raises CheckpointError if the folder contradicts them."""
    quantization = remaining_quantization(folder, options.quantization)
    return replace(options, quantization=quantization, activations=resolve_activations(folder, options))


def resolve_activations(folder: Path, options: EngineOptions) -> str | None:
    """Return the scheme of activations: the option's, or for "auto" the one that a folder states. Raises
    CheckpointError if that is not supported."""
    if options.activations != "auto":
        return options.activations
    stated = read_config_json(folder).get("quantization_config")
    try:
        return stated_activations(stated) if isinstance(stated, Mapping) else None
    except ValueError as e:
        raise CheckpointError(f"{folder / 'config.json'}: activations='auto': {e}") from e


def remaining_quantization(folder: Path, quantization: str | None) -> str | None:
    """Return the quantisation that remains to be done; None if the folder's weights are stored so already.

    Raises CheckpointError if `quantization` names another format of stored weights.
    """
    if quantization not in STORED_QUANTIZATIONS and quantization != "fp8":
        return quantization
    stated = read_config_json(folder).get("quantization_config")
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    if STORED_QUANTIZATIONS.get(quantization, quantization) == method:
        return None
    if quantization == "fp8":
        return quantization
    stored = "not quantised" if method is None else f"{method!r}"
    raise CheckpointError(
        f"{folder / 'config.json'}: quant_method is {stored}, "
        f"expected {STORED_QUANTIZATIONS[quantization]!r} for quantization={quantization!r}"
    )


def with_end_tokens(defaults: GenerationDefaults, tokenizer: Tokenizer | None) -> GenerationDefaults:
    """Return generation defaults with the tokenizer's end tokens too, as in vLLM. Raises ValueError if these
    are too many."""
    end_ids = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    ids = tuple(dict.fromkeys((*end_ids, *defaults.eos_token_ids)))
    if len(ids) > MAX_STOP_IDS:
        raise ValueError(
            f"eos_token_id has {len(ids)} ids with the tokenizer's, expected at most {MAX_STOP_IDS}"
        )
    return replace(defaults, eos_token_ids=ids)
