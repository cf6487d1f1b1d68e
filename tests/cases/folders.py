"""Small checkpoints, ways to change them, and the sentence with which they are refused."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from duetto.checkpoints.huggingface import load_hf
from duetto.checkpoints.tensors import CheckpointError
from duetto.model.config import ModelConfig
from duetto.model.transformer import Decoder, decoder_spec
from duetto.model.tree import leaves_by_path

SIZES = {
    "vocab_size": 40,
    "hidden_size": 12,
    "ffn_size": 20,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_size": 6,
    "max_position": 64,
    "norm_eps": 1e-6,
}


def config_with(**changes) -> ModelConfig:
    return ModelConfig.uniform(**(SIZES | changes))


CONFIG = config_with()
Q = "model.layers.1.self_attn.q_proj.weight"


def decoder(config: ModelConfig, dtype=jnp.float32) -> Decoder:
    """Random parameters, every one of them wide of its neutral value."""
    rng = np.random.default_rng(0)
    draw = lambda s: jax.device_put(rng.normal(0.5, 0.5, s.shape).astype(dtype))
    return jax.tree.map(draw, decoder_spec(config))


def assert_equal(found: Decoder, expected: Decoder) -> None:
    found_leaves, expected_leaves = leaves_by_path(found), leaves_by_path(expected)
    assert found_leaves.keys() == expected_leaves.keys()
    for path, leaf in expected_leaves.items():
        assert found_leaves[path].dtype == leaf.dtype, path
        np.testing.assert_array_equal(np.asarray(found_leaves[path]), np.asarray(leaf), err_msg=path)


def change_config(folder: Path, **changes) -> None:
    file = folder / "config.json"
    raw = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in raw.items() if value != "absent"}))


def change_tensors(folder: Path, **changes) -> None:
    """Store tensors anew with the safetensors package; None takes one away."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | changes
    save_file({name: value for name, value in tensors.items() if value is not None}, file)


def shard(folder: Path) -> dict[str, str]:
    """Cut the single file into two shards with an index; gives the index' map."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    places = {name: f"model-0000{i % 2 + 1}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for at in set(places.values()):
        save_file({name: value for name, value in tensors.items() if places[name] == at}, folder / at)
    file.unlink()
    write_index(folder, places)
    return places


def write_index(folder: Path, places) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def refusal(folder: Path, **options) -> str:
    """The one sentence with which a folder is refused; it names the folder."""
    with pytest.raises(CheckpointError) as e:
        load_hf(folder, **options)
    assert "\n" not in str(e.value)
    assert str(folder) in str(e.value)
    return str(e.value)
