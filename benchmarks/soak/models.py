"""Folders that the fleet serves: the shipped model with two sets of weights, and adapters of it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WEIGHTS = {"old": 1.0, "new": 1.25}  # a folder, and the factor of the shipped model's weights
ADAPTERS = ("first", "second", "third")
RANK = 8
TERMS = 0.1  # standard deviation of an adapter's numbers
COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def write(folder: Path) -> None:
    """Write `models/NAME` for each set of weights and `adapters/NAME` for each adapter below a folder."""
    import jax

    from duetto.checkpoints.huggingface import save_hf
    from duetto.model.config import ModelConfig
    from duetto.serve.engine.startup.model_folder import DEMO_FOLDER, read_model

    config, params = read_model(DEMO_FOLDER, "float32", jax.devices("cpu")[0])
    assert isinstance(config, ModelConfig)
    for name, factor in WEIGHTS.items():
        own = folder / "models" / name
        save_hf(
            own,
            config,
            jax.tree.map(lambda x, factor=factor: x * factor, params),
            "float32",
            like=DEMO_FOLDER,
        )
        for file in COPIED:
            shutil.copy(DEMO_FOLDER / file, own)
    shape = json.loads((DEMO_FOLDER / "config.json").read_text())
    for seed, name in enumerate(ADAPTERS):
        write_adapter(folder / "adapters" / name, shape, seed)


def write_adapter(folder: Path, shape: dict[str, Any], seed: int) -> None:
    """Write a random adapter in PEFT's format. `shape`: the fields of the model's `config.json`."""
    import numpy as np
    from safetensors.numpy import save_file

    draw = np.random.default_rng(seed)
    tensors = {
        f"base_model.model.{module}.{name}.weight": TERMS * draw.standard_normal(size).astype(np.float32)
        for module, outer, inner in projections(shape)
        for name, size in (("lora_A", (RANK, inner)), ("lora_B", (outer, RANK)))
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "use_dora": False}
    (folder / "adapter_config.json").write_text(json.dumps(fields | {"target_modules": "all-linear"}))


def projections(shape: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each adapted projection, with its output and input features."""
    width, head, ffn = shape["hidden_size"], shape["head_dim"], shape["intermediate_size"]
    sizes = {
        "self_attn.q_proj": (shape["num_attention_heads"] * head, width),
        "self_attn.v_proj": (shape["num_key_value_heads"] * head, width),
        "mlp.down_proj": (width, ffn),
    }
    for layer in range(shape["num_hidden_layers"]):
        for module, (outer, inner) in sizes.items():
            yield f"model.layers.{layer}.{module}", outer, inner
