"""Folders of models that read images as well, of which the text's model is read: it is nested one level down,
in `config.json` and in the names of tensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ..refusals import shown
from .tensors import CheckpointError

T = TypeVar("T")
# `model_type` of such folders, and that of their `text_config` where it does not say
NESTED: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "llava": "llama",
    "llava_next": "llama",
    "internvl": "qwen2",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
SHARED = (  # fields that may stand beside `text_config`
    "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip
MODELS, HEAD = ("language_model.", "model.language_model."), "lm_head."


def is_nested(raw: Mapping[str, Any]) -> bool:
    kind = raw.get("model_type")
    return isinstance(kind, str) and kind in NESTED


def text_config(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """The fields of the text's model; those of any other folder as they are. Raises CheckpointError."""
    if not is_nested(raw):
        return dict(raw)
    inner = raw.get("text_config")
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{file}: text_config is {shown(inner)}, expected an object")
    beside = {name: raw[name] for name in SHARED if raw.get(name) is not None and inner.get(name) is None}
    return {"model_type": NESTED[raw["model_type"]], **inner, **beside}


def text_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """The tensors of the text's model under the names of a folder of its own: as they are, unless they are
    nested."""
    if not any(name.startswith(MODELS) for name in tensors):
        return dict(tensors)
    return {own: tensor for name, tensor in tensors.items() if (own := name_in_text(name))}


def name_in_text(name: str) -> str | None:
    """The name of a tensor of the text's model, None for one of another."""
    hub, own = MODELS
    if name.startswith(hub):
        return name.removeprefix(hub)
    if name.startswith(own):
        return "model." + name.removeprefix(own)
    return name if name.startswith(HEAD) else None
