"""Hugging Face folders: what is written is read back bit for bit, in the dtype and the memory that were
asked for."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases.folders import (
    CONFIG,
    SIZES,
    Q,
    assert_equal,
    change_config,
    config_with,
    decoder,
    shard,
    write_index,
)
from safetensors.numpy import load_file
from suite.marks import full

from duetto.checkpoints.families import FAMILIES
from duetto.checkpoints.huggingface import load_hf, read_config, save_hf
from duetto.checkpoints.layout import parameter_groups
from duetto.model.layers import Norm
from duetto.model.rope import Rope
from duetto.model.transformer import decoder_spec
from duetto.model.tree import leaves_by_path


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
    save_hf(tmp_path, config, params)
    found, loaded = load_hf(tmp_path)
    assert found == config == read_config(tmp_path)
    assert_equal(loaded, params)
    assert not list(tmp_path.glob("*.partial"))


def test_stored_weights_have_the_axes_of_torch_linear_layers(folder):
    w, tensors = decoder(CONFIG).layers[1], load_file(folder / "model.safetensors")
    D, F, N, H = (SIZES[name] for name in ("hidden_size", "ffn_size", "num_heads", "head_size"))
    layer = "model.layers.1."
    assert tensors[Q].shape == (N * H, D)
    np.testing.assert_array_equal(tensors[Q].reshape(N, H, D)[2, 5], np.asarray(w.attention.q)[:, 2, 5])
    o = tensors[layer + "self_attn.o_proj.weight"]
    np.testing.assert_array_equal(o.reshape(D, N, H)[:, 3, 1], np.asarray(w.attention.o)[3, 1])
    np.testing.assert_array_equal(
        tensors[layer + "mlp.gate_proj.weight"], np.asarray(leaves_by_path(w)["ffn.gate"]).T
    )
    assert tensors[layer + "mlp.down_proj.weight"].shape == (D, F)


def test_every_stored_name_is_used_and_every_parameter_has_one():
    everything = config_with(attention_bias=True, mlp_bias=True)
    found = parameter_groups(FAMILIES["llama"].names, everything)
    assert [p.path for group in found for p in group.parameters] == list(
        leaves_by_path(decoder_spec(everything))
    )
    assert {p.stored for group in found for p in group.parameters} == set(FAMILIES["llama"].names.values())
    names = [name for group in found for name in group.names]
    assert len(set(names)) == len(names)


def test_shards_load_like_one_file(folder):
    shard(folder)
    assert_equal(load_hf(folder)[1], decoder(CONFIG))


def test_a_single_file_is_preferred_to_an_index(folder):
    write_index(folder, {"old": "old.safetensors"})
    assert_equal(load_hf(folder)[1], decoder(CONFIG))


@pytest.mark.filterwarnings("default")
@pytest.mark.extras
def test_transformers_reads_what_save_writes(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from duetto.model.attention import causal
    from duetto.model.transformer import compute_logits, forward

    config = config_with(rope=Rope(1e4, "llama3", 8.0, 1.0, 4.0, 16), attention_bias=True, mlp_bias=True)
    params = decoder(config)
    save_hf(tmp_path, config, params)
    model, report = transformers.LlamaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = np.arange(30)[None] % CONFIG.vocab_size
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    hidden, _ = forward(params, config, jnp.asarray(tokens), jnp.arange(30)[None], causal)
    np.testing.assert_allclose(np.asarray(compute_logits(params, config, hidden)), expected, atol=2e-4)


def test_save_refuses_what_is_not_the_configuration_and_leaves_nothing(tmp_path):
    params = decoder(CONFIG)
    with pytest.raises(ValueError, match=r"head has shape \(40, 12\), the configuration says None"):
        save_hf(tmp_path, config_with(tied_embeddings=True), params)
    with pytest.raises(ValueError, match=r"layers\.0\.ffn\.gate has shape \(12, 20\).*\(12, 24\)"):
        save_hf(tmp_path, config_with(ffn_size=24), params)
    with pytest.raises(ValueError, match="dtypes bfloat16, float32"):
        save_hf(tmp_path, CONFIG, replace(params, norm=Norm(params.norm.gain.astype(jnp.bfloat16))))
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' holds NaN or infinity as float32"):
        save_hf(tmp_path, CONFIG, replace(params, norm=Norm(params.norm.gain.at[3].set(jnp.nan))))
    with pytest.raises(ValueError, match="cannot express"):
        save_hf(tmp_path, config_with(rope=Rope(factor=2.0)), params)
    assert not list(tmp_path.iterdir())


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
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(load_hf(folder)[1])} == {expected}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, "bfloat16", np.dtype(ml_dtypes.bfloat16)])
def test_a_dtype_casts(folder, dtype):
    expected = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), decoder(CONFIG))
    assert_equal(load_hf(folder, dtype)[1], expected)
    save_hf(folder, CONFIG, decoder(CONFIG), dtype)
    assert_equal(load_hf(folder)[1], expected)


@pytest.mark.parametrize("dtype", ["int8", "float64", "fast", jnp.int32])
def test_an_unknown_dtype_is_refused(folder, dtype):
    with pytest.raises(ValueError, match="expected 'auto' or one of float32, float16, bfloat16"):
        load_hf(folder, dtype)


def test_a_parameter_owns_its_memory(folder):
    _, kept = load_hf(folder, place=lambda array, _: array)
    assert all(type(leaf) is np.ndarray and leaf.flags.writeable for leaf in jax.tree.leaves(kept))
    for leaf in jax.tree.leaves(kept):
        leaf[...] = 0
    _, params = load_hf(folder)
    assert_equal(params, decoder(CONFIG))
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    expected = jax.tree.map(lambda x: np.asarray(x) + 1, decoder(CONFIG))
    assert_equal(add(params), expected)


MEASURE = """
import re, sys
from pathlib import Path
import jax, jax.numpy as jnp
from duetto.checkpoints.huggingface import load
from duetto.model.tree import tree_bytes

def resident(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

jax.block_until_ready(jnp.ones(3) + 1)
before = resident("VmRSS")
config, params = load(sys.argv[1], sys.argv[2])
print((resident("VmHWM") - before) / tree_bytes(params))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which 60 % is one tensor."""
    sizes = {"vocab_size": 48000, "hidden_size": 1024, "ffn_size": 2560, "num_heads": 16, "head_size": 64}
    config, folder = config_with(**sizes, tied_embeddings=True), tmp_path_factory.mktemp("large")
    half = lambda s: jax.device_put(np.full(s.shape, 0.5, ml_dtypes.bfloat16))
    save_hf(folder, config, jax.tree.map(half, decoder_spec(config)))
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux' /proc")
@pytest.mark.parametrize("dtype", ["auto", full("float32")])
def test_loading_takes_less_than_a_third_more_than_the_model(large, dtype):
    """The peak of a process' resident memory, files mapped into it included."""
    command = [sys.executable, "-c", MEASURE, str(large), dtype]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert 0.9 < float(done.stdout) < 1.3
