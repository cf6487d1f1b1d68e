"""Folders of a model and its tokenizer, from paths or ids on the hub, and facts in them besides the
weights."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ....checkpoints import heads, orbax
from ....checkpoints.folders import overridden, read_config_json
from ....checkpoints.generation import GenerationDefaults
from ....checkpoints.hub import resolve, resolve_draft
from ....checkpoints.tensors import CheckpointError
from ....sampling.params import MAX_STOP_IDS
from ...options.engine import SAME_WEIGHTS, STORED, EngineOptions
from ...text.tokenizer.tokenizer import Tokenizer
from ...text.tokenizer.vocabularies import EXPECTED, unread
from .folder import DEMO

NONE = "the model has no tokenizer"


@dataclass(frozen=True)
class Origin:
    """Folders of a model and of its tokenizer; `own` if one name stands for both."""

    model: Path
    tokenizer: Path
    own: bool = True

    @classmethod
    def of(
        cls,
        model: str | Path | None,
        tokenizer: str | Path | None = None,
        *,
        revision: str | None = None,
        tokenizer_revision: str | None = None,
        weights: bool = True,
        **where: Any,
    ) -> "Origin":
        """Resolve paths or ids; `where` are `download_dir` and `token` of `hub.resolve`, whose errors are
        raised."""
        folder = DEMO if model is None else resolve(model, revision, weights=weights, **where)
        own, name = tokenizer is None, model if tokenizer is None else tokenizer
        if name is None or (own and tokenizer_revision is None):
            return cls(folder, folder)
        return cls(folder, resolve(name, tokenizer_revision, weights=False, **where), own)

    def words(self) -> tuple[Tokenizer | None, str]:
        """The tokenizer, and what there is to say where there is none.

        Raises ValueError for one that cannot be read, and where a folder that was named for it has none.
        """
        found = Tokenizer.from_folder(self.tokenizer)
        if found is not None:
            return found, ""
        why = unread(self.tokenizer)
        if not self.own:
            raise ValueError(
                f"tokenizer {str(self.tokenizer)!r} has no {EXPECTED}" + (f": {why}" if why else "")
            )
        if why:
            print(f"duetto: {why}: only prompts of token ids can be given", file=sys.stderr)
        return None, f"{NONE} ({why})" if why else NONE

    def settled(self, options: EngineOptions, **where: Any) -> EngineOptions:
        """Options in which a draft model is a folder, and `quantization` and `load_format` what is left to do
        after loading. Raises CheckpointError for a folder that is not as they say."""
        draft, config = options.speculation.model, options.speculative_config
        if draft is not None and isinstance(config, Mapping):
            beside = resolve_draft(draft, **where)
            method = "heads" if (beside / heads.FILE).exists() else "draft_model"
            config = {**config, "method": config.get("method") or method, "model": str(beside)}
        with overridden(self.model, options.hf_overrides) as folder:
            form = stored_form(folder, options.quantization)
        format = read_format(self.model, options.load_format)
        return replace(options, speculative_config=config, quantization=form, load_format=format)


def read_format(folder: Path, load_format: str) -> str:
    """Return "auto" for a name of vLLM's that reads the same weights, else the name. Raises CheckpointError
    for a "sharded_state" that is none."""
    if load_format == "sharded_state" and not orbax.is_orbax(folder):
        raise CheckpointError(
            f"{folder}: load_format='sharded_state' is not allowed: it reads folders that LLM.save_params or "
            "`duetto convert` has written"
        )
    return "auto" if load_format in SAME_WEIGHTS else load_format


def stored_form(folder: Path, quantization: str | None) -> str | None:
    """None where `quantization` names how the folder's weights are stored already, itself where it is
    something to do.

    Raises CheckpointError where it names another way to store them.
    """
    if quantization not in STORED and quantization != "fp8":
        return quantization
    stated = read_config_json(folder).get("quantization_config")
    method = stated.get("quant_method") if isinstance(stated, Mapping) else None
    if STORED.get(quantization, quantization) == method:
        return None
    if quantization == "fp8":
        return quantization
    found = "not quantised" if method is None else f"{method!r}"
    raise CheckpointError(
        f"{folder / 'config.json'}: quant_method is {found}, expected {STORED[quantization]!r} "
        f"for quantization={quantization!r}"
    )


def ending(defaults: GenerationDefaults, words: Tokenizer | None) -> GenerationDefaults:
    """Return generation defaults with the tokenizer's end tokens too, as in vLLM. Raises ValueError if these
    are too many."""
    own = () if words is None or words.eos_token_id is None else (words.eos_token_id,)
    ids = tuple(dict.fromkeys((*own, *defaults.eos_token_ids)))
    if len(ids) > MAX_STOP_IDS:
        raise ValueError(
            f"eos_token_id has {len(ids)} ids with the tokenizer's, expected at most {MAX_STOP_IDS}"
        )
    return replace(defaults, eos_token_ids=ids)
