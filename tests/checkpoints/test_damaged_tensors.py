"""Files of tensors that are cut off, incomplete or hold what is no weight: refused in one sentence."""

import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases.folders import Q, assert_equal, change_tensors, config_with, decoder, refusal, shard, write_index

from duetto.checkpoints.huggingface import load_hf, save_hf
from duetto.checkpoints.tensors import CheckpointError, JoinedViews, list_tensors, read_into_views


@pytest.mark.parametrize("length", [0, 7, 100, 4000, -1])
def test_a_file_cut_off_is_refused(folder, length):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    assert "model.safetensors: cut off, or not a safetensors file" in refusal(folder)


def test_a_file_cut_off_behind_its_header_is_refused(folder):
    file = folder / "model.safetensors"
    tensor = max(list_tensors(file).values(), key=lambda t: t.start)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"cut off inside tensor '{re.escape(tensor.name)}'"):
        read_into_views(tensor, JoinedViews((np.empty((1, *tensor.shape), np.float32),)))


@pytest.mark.parametrize(
    "text", [b"version https://git-lfs.github.com/spec/v1\n" * 3, b"\x80\x04pickle" * 50]
)
def test_a_file_of_another_kind_is_refused(folder, text):
    (folder / "model.safetensors").write_bytes(text)
    assert "not a safetensors file" in refusal(folder)


def test_a_folder_in_place_of_the_file_is_refused(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert "model.safetensors: cut off, or not a safetensors file" in refusal(folder)


def test_a_missing_tensor_is_refused(folder):
    change_tensors(folder, **{Q: None})
    assert f"tensor {Q!r} is missing, expected one of shape (24, 12)" in refusal(folder)


def test_a_surplus_tensor_is_refused(folder):
    change_tensors(folder, **{"model.layers.2.mlp.up_proj.weight": np.zeros((20, 12), np.float32)})
    assert "'model.layers.2.mlp.up_proj.weight' is not a parameter of this model" in refusal(folder)


def test_a_surplus_bias_is_refused_unless_it_is_zero(folder):
    bias = {"model.layers.1.mlp.down_proj.bias": np.zeros(12, np.float16)}
    change_tensors(folder, **bias)
    assert_equal(load_hf(folder)[1], decoder(config_with()))
    bias["model.layers.1.mlp.down_proj.bias"][11] = 6e-8
    change_tensors(folder, **bias)
    assert "'model.layers.1.mlp.down_proj.bias' is not a parameter of this model" in refusal(folder)


@pytest.mark.parametrize("name", ["layers.1.self_attn.rotary_emb.inv_freq", "rotary_emb.original_inv_freq"])
def test_tables_of_a_rope_change_nothing(folder, name):
    change_tensors(folder, **{f"model.{name}": np.ones(3, np.float32)})
    assert_equal(load_hf(folder)[1], decoder(config_with()))


def test_a_tensor_of_another_shape_or_dtype_is_refused(folder):
    change_tensors(folder, **{Q: np.zeros((12, 24), np.float32)})
    assert f"tensor {Q!r} has shape (12, 24), expected (24, 12)" in refusal(folder)
    change_tensors(folder, **{Q: np.zeros((24, 12), np.int8)})
    assert f"tensor {Q!r} has dtype I8, expected one of F32, F16, BF16" in refusal(folder)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_weights_that_are_not_finite_are_refused(folder, dtype, value):
    bad = np.zeros((24, 12), dtype)
    bad[23, 11] = value
    change_tensors(folder, **{Q: bad})
    assert f"model.safetensors: tensor {Q!r} holds NaN or infinity as float32" in refusal(folder)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_the_largest_and_smallest_numbers_are_finite(folder, dtype):
    limits = ml_dtypes.finfo(dtype)
    extremes = np.zeros((24, 12), dtype)
    extremes[0, :4] = [limits.max, limits.min, limits.smallest_subnormal, -0.0]
    change_tensors(folder, **{Q: extremes})
    found = np.asarray(load_hf(folder, dtype)[1].layers[1].attention.q)[:4, 0, 0]
    assert found.tobytes() == extremes[0, :4].tobytes()


def test_a_cast_beyond_the_range_of_a_dtype_is_refused(folder):
    change_tensors(folder, **{Q: np.full((24, 12), 1e5, np.float32)})
    load_hf(folder, jnp.bfloat16)
    assert f"tensor {Q!r} holds NaN or infinity as float16" in refusal(folder, dtype=jnp.float16)


def test_known_buffers_and_a_tied_head_are_harmless(tmp_path):
    config = config_with(tied_embeddings=True)
    params = decoder(config)
    save_hf(tmp_path, config, params)
    embed = np.asarray(params.embed)
    inv_freq = np.ones(3, np.float32)
    change_tensors(
        tmp_path, **{"lm_head.weight": embed, "model.layers.0.self_attn.rotary_emb.inv_freq": inv_freq}
    )
    assert_equal(load_hf(tmp_path)[1], params)
    change_tensors(tmp_path, **{"lm_head.weight": embed + 1})
    assert "'lm_head.weight' is not the embedding, which tie_word_embeddings says" in refusal(tmp_path)


def test_shards_and_index_must_agree(folder):
    places = shard(folder)
    write_index(folder, places | {Q: "model-00003-of-00003.safetensors"})
    assert "names the shard 'model-00003-of-00003.safetensors', which is not in the folder" in refusal(folder)
    write_index(folder, places | {"model.extra": places[Q]})
    assert f"{places[Q]}: lacks tensor 'model.extra'" in refusal(folder)
    write_index(folder, {name: at for name, at in places.items() if name != Q})
    assert f"{places[Q]}: holds tensor {Q!r}, which model.safetensors.index.json does not" in refusal(folder)
    write_index(folder, places | {Q: "../other.safetensors"})
    assert "names the shard '../other.safetensors'" in refusal(folder)
    write_index(folder, places | {Q: "x" * 5000})
    assert len(refusal(folder)) < 400
    write_index(folder, None)
    assert "weight_map is None, expected an object" in refusal(folder)
    write_index(folder, places)
    (folder / places[Q]).write_bytes((folder / places[Q]).read_bytes()[:-8])
    assert f"{places[Q]}: cut off" in refusal(folder)
