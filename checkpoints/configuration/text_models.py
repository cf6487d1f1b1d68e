"""Text models inside of multimodal ones: one level down in `config.json`, and behind a prefix in tensor
names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from ...refusals import quote
from ..tensors import CheckpointError

T = TypeVar("T")
# `model_type` of multimodal folders, and the default `model_type` of their `text_config`
TEXT_MODEL_TYPES: Mapping[str, str] = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "llava": "llama",
    "llava_next": "llama",
    "internvl": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "smolvlm": "llama",
    "idefics3": "llama",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
}
FLAT_MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl")  # on the hub these state the text's fields beside the others
SHARED_FIELDS = (  # fields that a folder may state outside of `text_config`
    "dtype", "torch_dtype", "quantization_config", "tie_word_embeddings", "bos_token_id", "eos_token_id",
    "pad_token_id",
)  # fmt: skip
# A text model's tensors, the part that a folder of this model alone has as "model.", and towers beside them.
OUTER_PREFIX, INNER_PREFIXES = "language_model.", ("model.language_model.", "model.text_model.")
TEXT_PREFIXES, HEAD_PREFIX, TOWER_PREFIX = (OUTER_PREFIX, *INNER_PREFIXES), "lm_head.", "visual."


def is_nested(raw: Mapping[str, Any]) -> bool:
    """Return True if a `config.json` describes a multimodal model with a text model inside."""
    kind = raw.get("model_type")
    return isinstance(kind, str) and kind in TEXT_MODEL_TYPES


def text_fields(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return the fields of the text model; fields of a plain text model are returned as a copy.

    Raises CheckpointError if `text_config` is no object.
    """
    if not is_nested(raw):
        return dict(raw)
    kind = raw["model_type"]
    inner = raw.get("text_config", flat_text_fields(raw) if kind in FLAT_MODEL_TYPES else None)
    if not isinstance(inner, Mapping):
        raise CheckpointError(f"{file}: text_config is {quote(inner)}, expected an object")
    shared = {
        name: raw[name] for name in SHARED_FIELDS if raw.get(name) is not None and inner.get(name) is None
    }
    return {"model_type": TEXT_MODEL_TYPES[kind], **inner, **shared}


def flat_text_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `config.json` without `text_config`, except the tower's."""
    return {name: value for name, value in raw.items() if name not in ("model_type", "vision_config")}


def text_tensors(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return the tensors of the text model, under the names that a folder of this model alone has."""
    if not any(name.startswith(TEXT_PREFIXES) for name in tensors):
        return {n: tensor for n, tensor in tensors.items() if not n.startswith(TOWER_PREFIX)}
    return {
        text_tensor_name(n): tensor
        for n, tensor in tensors.items()
        if n.startswith((*TEXT_PREFIXES, HEAD_PREFIX))
    }


def text_tensor_name(name: str) -> str:
    """Return the name that a tensor has in a folder of the text model alone; other names are returned
    unchanged."""
    for prefix in INNER_PREFIXES:
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix(OUTER_PREFIX)
