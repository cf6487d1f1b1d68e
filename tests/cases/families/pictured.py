"""Transformers' models of images and text, as the oracle of their text models: without a picture they compute
what the text model does."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

VISION = {
    "qwen2_vl": {"depth": 1, "embed_dim": 16, "hidden_size": 30, "num_heads": 2, "patch_size": 4},
    "qwen2_5_vl": {"depth": 1, "hidden_size": 16, "out_hidden_size": 30, "num_heads": 2, "patch_size": 4}
    | {"intermediate_size": 8, "window_size": 16, "fullatt_block_indexes": [0]},
    "qwen3_vl": {"depth": 1, "hidden_size": 16, "out_hidden_size": 30, "num_heads": 2, "patch_size": 4}
    | {"intermediate_size": 8, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    "glm4v": {"depth": 1, "hidden_size": 16, "out_hidden_size": 30, "num_heads": 2, "patch_size": 4}
    | {"intermediate_size": 8, "image_size": 16},
}
VISION |= {"qwen3_vl_moe": VISION["qwen3_vl"], "glm4v_moe": VISION["glm4v"]}
OUTER = {f"{outer}_text": outer for outer in VISION}  # models of images and text by their text models


def nested_config(raw: dict[str, Any]) -> dict[str, Any]:
    """The `config.json` of a whole model around a text model's."""
    outer = OUTER[raw["model_type"]]
    tied = {"tie_word_embeddings": raw["tie_word_embeddings"]} if "tie_word_embeddings" in raw else {}
    return {"model_type": outer, "text_config": raw, "vision_config": VISION[outer], **tied}


def nested_name(name: str) -> str:
    """The name that a text model's tensor has in a whole model."""
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


def text_name(name: str) -> str | None:
    """The name that a whole model's tensor has in a text model; None of a tower's tensor."""
    return None if "visual." in name else name.replace(".language_model.", ".", 1)


def as_on_the_hub(name: str, tensor: np.ndarray) -> np.ndarray:
    """Experts in one tensor, inputs first; transformers 5 saves outputs first, and reads both."""
    return np.ascontiguousarray(tensor.swapaxes(1, 2)) if tensor.ndim == 3 and ".experts." in name else tensor


def whole_config(transformers: Any, raw: dict[str, Any]) -> Any:
    nested = nested_config(raw)
    return transformers.CONFIG_MAPPING[nested["model_type"]].from_dict(nested)


def draw_text(transformers: Any, raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write the text model of a whole one as Transformers saves it. Returns its configuration's fields."""
    with TemporaryDirectory() as whole:
        config = whole_config(transformers, raw)
        transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(whole)
        tensors = load_file(Path(whole, "model.safetensors"))
        saved = json.loads(Path(whole, "config.json").read_text())
    text = {mine: as_on_the_hub(n, x) for n, x in tensors.items() if (mine := text_name(n))}
    save_file(text, folder / "model.safetensors")
    shared = {"tie_word_embeddings": saved["tie_word_embeddings"]} if "tie_word_embeddings" in saved else {}
    return {**saved["text_config"], **shared}


def load_whole(transformers: Any, raw: dict[str, Any], folder: Path, **options: Any) -> tuple[Any, Any]:
    """A whole model with the text model of a folder, and what Transformers reports of its tensors."""
    config = whole_config(transformers, raw)
    with TemporaryDirectory() as whole:
        transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(whole)
        file = Path(whole, "model.safetensors")
        text = {nested_name(n): x for n, x in load_file(folder / "model.safetensors").items()}
        tower = {n: x for n, x in load_file(file).items() if text_name(n) is None}
        save_file(tower | text, file, metadata={"format": "pt"})
        return transformers.AutoModelForImageTextToText.from_pretrained(whole, config=config, **options)
