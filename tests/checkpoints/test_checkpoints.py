"""Hugging Face folders: what is written is read back bit for bit, and what cannot be loaded is refused by
name."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from duetto.checkpoints.families import FAMILIES
from duetto.checkpoints.generation import GenerationDefaults, generation_defaults
from duetto.checkpoints.huggingface import load, read_config, save
from duetto.checkpoints.joined import Joined
from duetto.checkpoints.layout import groups
from duetto.checkpoints.tensors import CheckpointError, contents, read
from duetto.model.config import ModelConfig
from duetto.model.layers import Norm
from duetto.model.rope import Rope
from duetto.model.transformer import Decoder, decoder_spec
from duetto.model.tree import paths
from duetto.serve.loading.folder import load_folder

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
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(0.5, 0.5, s.shape), dtype), decoder_spec(config))


def assert_equal(found: Decoder, expected: Decoder) -> None:
    found_leaves, expected_leaves = paths(found), paths(expected)
    assert found_leaves.keys() == expected_leaves.keys()
    for path, leaf in expected_leaves.items():
        assert found_leaves[path].dtype == leaf.dtype, path
        np.testing.assert_array_equal(np.asarray(found_leaves[path]), np.asarray(leaf), err_msg=path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint as save() writes it."""
    save(tmp_path, CONFIG, decoder(CONFIG))
    return tmp_path


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
        load(folder, **options)
    assert "\n" not in str(e.value)
    assert str(folder) in str(e.value)
    return str(e.value)


# --- out and in again


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        config_with(tied_embeddings=True, rope=Rope(5e5, "llama3", 8.0, 1.0, 4.0, 16)),
        config_with(attention_bias=True, mlp_bias=True, rope=Rope(1e4, "linear", 2.0)),
        config_with(num_heads=3, num_kv_heads=1, head_size=8),
        config_with(rope=Rope(1e4, "yarn", 4.0, original_max_position=16, scale=1.2, truncate=False)),
    ],
    ids=["plain", "tied", "biases", "mqa", "yarn"],
)
def test_what_is_saved_loads_bit_for_bit(tmp_path, config, dtype):
    params = decoder(config, dtype)
    save(tmp_path, config, params)
    found, loaded = load(tmp_path)
    assert found == config == read_config(tmp_path)
    assert_equal(loaded, params)
    assert not list(tmp_path.glob("*.partial"))


def test_axes_are_split_and_turned_as_torch_linear_layers_store_them(folder):
    w, tensors = decoder(CONFIG).layers[1], load_file(folder / "model.safetensors")
    D, F, N, H = (SIZES[name] for name in ("hidden_size", "ffn_size", "num_heads", "head_size"))
    layer = "model.layers.1."
    assert tensors[Q].shape == (N * H, D)
    np.testing.assert_array_equal(tensors[Q].reshape(N, H, D)[2, 5], np.asarray(w.attention.q)[:, 2, 5])
    o = tensors[layer + "self_attn.o_proj.weight"]
    np.testing.assert_array_equal(o.reshape(D, N, H)[:, 3, 1], np.asarray(w.attention.o)[3, 1])
    np.testing.assert_array_equal(tensors[layer + "mlp.gate_proj.weight"], np.asarray(paths(w)["ffn.gate"]).T)
    assert tensors[layer + "mlp.down_proj.weight"].shape == (D, F)


def test_every_name_of_a_family_is_used_and_every_parameter_has_one():
    everything = config_with(attention_bias=True, mlp_bias=True)
    found = groups(FAMILIES["llama"], everything)
    assert [p.path for group in found for p in group.parameters] == list(paths(decoder_spec(everything)))
    assert {p.stored for group in found for p in group.parameters} == set(FAMILIES["llama"].names.values())
    names = [name for group in found for name in group.names]
    assert len(set(names)) == len(names)


def test_shards_load_like_one_file(folder):
    shard(folder)
    assert_equal(load(folder)[1], decoder(CONFIG))


def test_the_single_file_is_taken_where_an_index_lies_beside_it(folder):
    write_index(folder, {"old": "old.safetensors"})
    assert_equal(load(folder)[1], decoder(CONFIG))


@pytest.mark.filterwarnings("default")
@pytest.mark.extras
def test_transformers_reads_what_save_writes(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from duetto.model.attention import causal
    from duetto.model.transformer import forward, unembed

    config = config_with(rope=Rope(1e4, "llama3", 8.0, 1.0, 4.0, 16), attention_bias=True, mlp_bias=True)
    params = decoder(config)
    save(tmp_path, config, params)
    model, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = np.arange(30)[None] % CONFIG.vocab_size
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    hidden, _ = forward(params, config, jnp.asarray(tokens), jnp.arange(30)[None], causal)
    np.testing.assert_allclose(np.asarray(unembed(params, config, hidden)), expected, atol=2e-4)


def test_save_refuses_what_is_not_the_configuration_and_leaves_nothing(tmp_path):
    params = decoder(CONFIG)
    with pytest.raises(ValueError, match=r"head has shape \(40, 12\), the configuration says None"):
        save(tmp_path, config_with(tied_embeddings=True), params)
    with pytest.raises(ValueError, match=r"layers\.0\.ffn\.gate has shape \(12, 20\).*\(12, 24\)"):
        save(tmp_path, config_with(ffn_size=24), params)
    with pytest.raises(ValueError, match="dtypes bfloat16, float32"):
        save(tmp_path, CONFIG, replace(params, norm=Norm(params.norm.gain.astype(jnp.bfloat16))))
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' holds NaN or infinity as float32"):
        save(tmp_path, CONFIG, replace(params, norm=Norm(params.norm.gain.at[3].set(jnp.nan))))
    with pytest.raises(ValueError, match="cannot express"):
        save(tmp_path, config_with(rope=Rope(factor=2.0)), params)
    assert not list(tmp_path.iterdir())


# --- dtypes and memory


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "absent", "dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.bfloat16"}, "bfloat16"),
        ({"torch_dtype": "absent"}, "float32"),
    ],
)
def test_auto_is_the_dtype_that_the_configuration_names(folder, fields, expected):
    change_config(folder, **fields)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(load(folder)[1])} == {expected}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16", np.dtype(ml_dtypes.bfloat16)])
def test_a_dtype_casts(folder, dtype):
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16), decoder(CONFIG))
    assert_equal(load(folder, dtype)[1], expected)
    save(folder, CONFIG, decoder(CONFIG), dtype)
    assert_equal(load(folder)[1], expected)


@pytest.mark.parametrize("dtype", ["int8", "float64", "fast", jnp.int32])
def test_an_unknown_dtype_is_refused(folder, dtype):
    with pytest.raises(ValueError, match="expected 'auto' or one of float32, float16, bfloat16"):
        load(folder, dtype)


def test_a_parameter_owns_its_memory(folder):
    _, kept = load(folder, place=lambda array, _: array)
    assert all(type(leaf) is np.ndarray and leaf.flags.writeable for leaf in jax.tree.leaves(kept))
    for leaf in jax.tree.leaves(kept):
        leaf[...] = 0
    _, params = load(folder)
    assert_equal(params, decoder(CONFIG))
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    expected = jax.tree.map(lambda x: x + 1, decoder(CONFIG))
    assert_equal(add(params), expected)


MEASURE = """
import re, sys
from pathlib import Path
import jax, jax.numpy as jnp
from duetto.checkpoints.huggingface import load
from duetto.model.tree import nbytes

def resident(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

jax.block_until_ready(jnp.ones(3) + 1)
before = resident("VmRSS")
config, params = load(sys.argv[1], sys.argv[2])
print((resident("VmHWM") - before) / nbytes(params))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux' /proc")
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_loading_takes_less_than_a_third_more_than_the_model(tmp_path, dtype):
    """The peak of a process' resident memory, files mapped into it included; 60 % of this model is one
    tensor."""
    sizes = {"vocab_size": 48000, "hidden_size": 1024, "ffn_size": 2560, "num_heads": 16, "head_size": 64}
    config = config_with(**sizes, tied_embeddings=True)
    params = jax.tree.map(lambda s: jnp.full(s.shape, 0.5, jnp.bfloat16), decoder_spec(config))
    save(tmp_path, config, params)
    command = [sys.executable, "-c", MEASURE, str(tmp_path), dtype]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert 0.9 < float(done.stdout) < 1.3


# --- config.json

V5 = {"rope_theta": "absent", "rope_scaling": "absent"}
YARN = Rope(1e4, "yarn", 4.0, original_max_position=16, scale=0.1 * math.log(4) + 1)
LONGROPE = Rope(
    1e4,
    "longrope",
    4.0,
    original_max_position=16,
    short_factors=(1.0, 2.0, 3.0),
    long_factors=(2.0, 3.0, 4.0),
    scale=math.sqrt(1.5),
)
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({"head_dim": None, "hidden_size": 24}, {"hidden_size": 24}),
        ({"head_dim": "absent", "hidden_size": 24}, {"hidden_size": 24}),
        ({"num_key_value_heads": "absent"}, {"num_kv_heads": 4}),
        ({"rms_norm_eps": "absent"}, {"norm_eps": 1e-6}),
        ({"max_position_embeddings": "absent"}, {"max_position": 2048}),
        ({"rope_theta": 500000}, {"rope": Rope(5e5)}),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, {"rope": Rope(1e4, "linear", 4.0)}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
            {"rope": Rope(5e5, "llama3", 8.0, 1.0, 4.0, 16)},
        ),
        (
            V5 | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3},
            {"rope": Rope(5e5, "llama3", 8.0, 1.0, 4.0, 16)},
        ),
        (V5 | {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, {"rope": Rope(7e4)}),
        (V5 | {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7e4}, {"rope": Rope(7e4)}),
        (V5, {}),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16}},
            {"rope": YARN},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}},
            {"rope": YARN},
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1, 2, 3], "long_factor": [2, 3, 4]}}
            | {"original_max_position_embeddings": 16},
            {"rope": LONGROPE},
        ),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 2, "use_cache": False, "note": {}}, {}),
    ],
)
def test_both_styles_of_configuration_are_read(folder, fields, changes):
    change_config(folder, **fields)
    assert read_config(folder) == config_with(**changes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba', expected one of llama"),
        ({"model_type": "absent"}, "model_type is None"),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        ({"hidden_act": "relu2"}, "hidden_act is 'relu2', which is not supported: expected one of 'silu'"),
        ({"sliding_window": 128}, "sliding_window is 128, which is not supported: expected null"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is 'sliding_attention'",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config: quant_method is 'hqq'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"vocab_size": "absent"}, "vocab_size is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"intermediate_size": "20"}, "intermediate_size is '20', expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a positive integer"),
        (
            {"num_hidden_layers": 10**5},
            "num_hidden_layers is 100000, expected a positive integer, at most 10000",
        ),
        ({"num_hidden_layers": 10**4}, "a model of 10000 layers, but only 21 tensors are stored"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings is 1000000000000000000000000000000,"),
        ({"num_attention_heads": 4.0}, "num_attention_heads is 4.0"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 5}, "head_size 5 is odd"),
        ({"head_dim": None, "hidden_size": 14}, "hidden_size 14 is not a multiple of 4 heads"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps is 1e+300, expected a number above 0: 1e-30 to 1e+30"),
        ({"rope_theta": 1e300}, "rope_theta is 1e+300"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_scaling": 2.0}, "rope_scaling is 2.0, expected one flat object"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling: rope_type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling: rope_type is missing in {'factor': 2}"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": [1]},
            "rope_parameters is [1], expected one flat object",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: factor is 0"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8}},
            "rope_parameters: low_freq_factor is missing",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": 4}},
            "high_freq_factor is 4.0, expected more than low_freq_factor 4.0",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "expected one flat object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn', expected one of float32"),
    ],
    ids=lambda x: x[:30] if isinstance(x, str) else None,
)
def test_a_configuration_that_is_not_supported_is_refused_by_field_and_value(folder, fields, words):
    change_config(folder, **fields)
    message = refusal(folder)
    assert words in message and "config.json" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"[1]", "holds a JSON list, expected an object"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_broken_configuration_is_refused(folder, text, words):
    (folder / "config.json").write_bytes(text)
    assert words in refusal(folder)


def test_what_is_no_checkpoint_is_refused(folder):
    assert "absent: no such folder" in refusal(folder / "absent")
    assert "model.safetensors: a file, expected the folder" in refusal(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    assert "holds no *.safetensors" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "pytorch_model-00001-of-00002.bin",
        "consolidated.00.pth",
    ],
)
def test_pickled_weights_are_refused_with_the_reason(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    message = refusal(folder)
    assert name in message and "reading them can run any code" in message


# --- tensors


@pytest.mark.parametrize("length", [0, 7, 100, 4000, -1])
def test_a_file_cut_off_is_refused(folder, length):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    assert "model.safetensors: cut off, or not a safetensors file" in refusal(folder)


def test_a_file_cut_off_after_its_header_was_read_is_refused(folder):
    file = folder / "model.safetensors"
    tensor = max(contents(file).values(), key=lambda t: t.start)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"cut off inside tensor '{re.escape(tensor.name)}'"):
        read(tensor, Joined((np.empty((1, *tensor.shape), np.float32),)))


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
    found = np.asarray(load(folder, dtype)[1].layers[1].attention.q)[:4, 0, 0]
    assert found.tobytes() == extremes[0, :4].tobytes()


def test_a_cast_beyond_the_range_of_a_dtype_is_refused(folder):
    change_tensors(folder, **{Q: np.full((24, 12), 1e5, np.float32)})
    load(folder, jnp.bfloat16)
    assert f"tensor {Q!r} holds NaN or infinity as float16" in refusal(folder, dtype=jnp.float16)


def test_known_buffers_and_a_tied_head_are_harmless(tmp_path):
    config = config_with(tied_embeddings=True)
    params = decoder(config)
    save(tmp_path, config, params)
    embed = np.asarray(params.embed)
    inv_freq = np.ones(3, np.float32)
    change_tensors(
        tmp_path, **{"lm_head.weight": embed, "model.layers.0.self_attn.rotary_emb.inv_freq": inv_freq}
    )
    assert_equal(load(tmp_path)[1], params)
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


# --- generation_config.json


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, GenerationDefaults()),
        ({"eos_token_id": 2, "bos_token_id": 1}, None, GenerationDefaults((2,), 1)),
        ({"eos_token_id": [2, 3]}, {}, GenerationDefaults((2, 3))),
        (
            {"eos_token_id": 2, "bos_token_id": 1},
            {"eos_token_id": [7, 0]},
            GenerationDefaults((7, 0, 2), 1),
        ),
        ({"eos_token_id": 2}, {"eos_token_id": None, "bos_token_id": 0}, GenerationDefaults((2,), 0)),
        (
            {},
            {
                "do_sample": True,
                "temperature": 0.6,
                "top_k": 20,
                "top_p": 0.9,
                "min_p": None,
                "max_length": 9,
            },
            GenerationDefaults(sampling={"temperature": 0.6, "top_k": 20, "top_p": 0.9}),
        ),
        ({}, {"repetition_penalty": 1.1}, GenerationDefaults(sampling={"repetition_penalty": 1.1})),
        ({}, {"do_sample": False, "temperature": 0.6}, GenerationDefaults(sampling={"temperature": 0.6})),
        (
            {},
            {"do_sample": False, "repetition_penalty": 1.1},
            GenerationDefaults(sampling={"repetition_penalty": 1.1}),
        ),
        ({"eos_token_id": 99999}, None, GenerationDefaults((99999,))),  # beyond the vocabulary: never drawn
    ],
)
def test_generation_defaults(folder, config, generation, expected):
    change_config(folder, **config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert generation_defaults(folder) == expected


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>', expected a token id or a list of them"),
        ({"eos_token_id": [1, -1]}, "eos_token_id is [1, -1]"),
        ({"eos_token_id": 2**40}, "eos_token_id is 1099511627776, expected a token id or a list of them"),
        ({"temperature": "hot"}, "temperature is 'hot', expected a number"),
        ({"top_k": 1.5}, "top_k is 1.5, expected an integer"),
        ({"top_p": True}, "top_p is True"),
    ],
)
def test_generation_defaults_of_wrong_types_are_refused(folder, generation, words):
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(CheckpointError, match=re.escape("generation_config.json: " + words)):
        generation_defaults(folder)


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        ({"temperature": -1}, "generation_config.json: temperature=-1 is not allowed"),
        ({"temperature": float("nan")}, "generation_config.json: temperature=nan is not allowed"),
        ({"temperature": 10**400}, "generation_config.json: "),
        ({"top_p": 7}, "generation_config.json: top_p=7 is not allowed"),
        ({"top_k": -5}, "generation_config.json: top_k=-5 is not allowed"),
        ({"repetition_penalty": 0}, "generation_config.json: repetition_penalty=0 is not allowed"),
        ({"eos_token_id": list(range(65))}, "eos_token_id has 65 ids, expected at most 64"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_generation_defaults_beyond_the_sampler_are_refused(folder, generation, words):
    (folder / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(CheckpointError, match=re.escape(words)) as e:
        load_folder(folder, "auto")
    assert "\n" not in str(e.value) and str(folder) in str(e.value)


def test_a_dtype_that_is_none_is_refused_on_every_device(folder):
    change_config(folder, torch_dtype="int8")
    for dtype in ("auto", "float32", "bfloat16"):
        assert "config.json: dtype is 'int8', expected one of float32" in refusal(folder, dtype=dtype)


def test_an_end_token_of_the_wrong_type_is_refused_with_its_file(folder):
    change_config(folder, eos_token_id=2.5)
    with pytest.raises(CheckpointError, match=r"/config\.json: eos_token_id is 2\.5"):
        generation_defaults(folder)
