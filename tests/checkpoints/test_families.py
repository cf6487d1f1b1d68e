"""Every family on sizes of its own against what Transformers computed, without Transformers."""

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases.families.golden import CASES, LENGTH, case_folder, expected_outputs, hub_config, prompts
from cases.programs import StoredJit
from safetensors.numpy import load_file, save_file
from suite.marks import full, full_if

from duetto.checkpoints.families import FAMILIES
from duetto.checkpoints.huggingface import load_hf, read_config, save_hf
from duetto.checkpoints.layout import parameter_groups
from duetto.checkpoints.tensors import CheckpointError
from duetto.model.attention import causal
from duetto.model.transformer import compute_logits, decoder_spec, forward
from duetto.model.tree import leaves_by_path, shapes_from_specs

ROOT = Path(__file__).resolve().parents[2]
# Cases of a family whose layers are those of another family.
VARIANTS = (
    "untied", "tied", "plain", "biases", "interval", "full", "listed", "sparse", "halves", "alone", "dense",
    "lite", "heads", "one", "sum",
)  # fmt: skip

# Families whose tensors have unlike names and forms: of these a model without its head is loaded.
OF_EACH_LOADER = (
    "codegen", "deepseek_v3", "falcon", "falcon_h1", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss",
    "granitemoehybrid", "kimi_linear", "llama", "llama4_text", "mamba2", "phi3", "qwen3_next", "stablelm",
)  # fmt: skip
# Families whose layers and settings other families have too.
LIKE_OTHERS = (
    "arcee", "cwm", "dots1", "ernie4_5", "exaone", "exaone4", "exaone_moe", "flex_olmo", "glm4_moe",
    "glm4_moe_lite", "glm4v_moe_text", "glm4v_text", "granite_swa", "granitemoe", "granitemoe_swa",
    "granitemoeshared", "helium", "hunyuan_v1_moe", "hy_v3", "internlm3", "iquestcoder", "jais2", "kimi_k2",
    "lfm2_moe", "ministral3", "mistral", "mixtral", "qwen2", "qwen2_5_vl_text", "qwen2_vl_text",
    "qwen3_5_text", "qwen3_moe", "qwen3_vl_text", "sarvam_mla", "sarvam_moe", "seed_oss", "solar_open",
    "vaultgemma", "youtu",
)  # fmt: skip


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request, tmp_path_factory):
    """A checkpoint's folder, and what is known of it."""
    folder = tmp_path_factory.mktemp("family")
    return folder, case_folder(request.param, folder)


@partial(StoredJit, static_argnames=["config"])
def logits(params, config, tokens, length):
    """After each token of a padded row, of which `length` are a sequence."""
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    hidden, _ = forward(params, config, tokens[None], positions, causal, lengths=length[None])
    return compute_logits(params, config, hidden)[0]


def outputs(params, config, ids: list[int]) -> np.ndarray:
    tokens = np.zeros(LENGTH, np.int32)
    tokens[: len(ids)] = ids
    return np.asarray(logits(params, config, tokens, jnp.int32(len(ids))))[len(ids) - 1]


@full_if(lambda case: case.partition(" ")[2] in VARIANTS or case in LIKE_OTHERS)
def test_outputs_are_those_of_transformers(case):
    folder, golden = case
    config, params = load_hf(folder)
    for prompt, expected, greedy in zip(prompts(), golden["logits"], golden["greedy"], strict=True):
        np.testing.assert_allclose(outputs(params, config, prompt), expected, atol=5e-4, rtol=0)
        ids = list(prompt)
        for token in greedy:
            assert int(outputs(params, config, ids).argmax()) == token
            ids.append(token)


def test_both_styles_of_configuration_say_the_same(case, tmp_path):
    folder, golden = case
    (tmp_path / "config.json").write_text(json.dumps(golden["v5"]))
    assert read_config(tmp_path) == read_config(folder)


@full_if(lambda case: case not in OF_EACH_LOADER)
def test_a_model_that_was_saved_without_its_head_loads(case, tmp_path):
    """As AutoModel.save_pretrained writes it: all names lack their first part."""
    folder, _ = case
    (config, params), source = load_hf(folder), load_file(folder / "model.safetensors")
    family = FAMILIES[json.loads((folder / "config.json").read_text())["model_type"]]
    kept = {n.removeprefix(family.prefix): x for n, x in source.items() if n.startswith(family.prefix)}
    save_file(kept, tmp_path / "model.safetensors")
    shutil.copy(folder / "config.json", tmp_path)
    found_config, found = load_hf(tmp_path)
    expected = {path: x for path, x in leaves_by_path(params).items() if path not in ("head", "head_bias")}
    assert found_config == replace(config, has_head=len(expected) == len(leaves_by_path(params)))
    assert leaves_by_path(found).keys() == expected.keys()
    for path, leaf in leaves_by_path(found).items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(expected[path]), err_msg=path)
    save_hf(tmp_path / "again", found_config, found, like=tmp_path)
    assert len(load_file(tmp_path / "again" / "model.safetensors")) == len(kept)


@pytest.mark.parametrize("dtype", ["float32", full("bfloat16")])
def test_what_was_loaded_is_written_back_bit_for_bit(case, tmp_path, dtype):
    folder, _ = case
    source = load_file(folder / "model.safetensors")
    config, params = load_hf(folder, dtype)
    save_hf(tmp_path, config, params, like=folder)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == source.keys()
    for name, array in source.items():
        kept = re.search("e_score_correction|expert_bias", name)
        own = np.float32 if dtype == "float32" or kept else ml_dtypes.bfloat16
        assert written[name].dtype == own
        assert written[name].tobytes() == array.astype(own).tobytes(), name
    assert load_hf(tmp_path)[0] == config


def test_every_family_has_a_case_and_every_name_is_used():
    used: dict[str, set] = {kind: set() for kind in FAMILIES}
    for name in CASES:
        raw = hub_config(name)
        family = FAMILIES[raw["model_type"]]
        found = parameter_groups(family.names, family.parse_config(raw))
        used[raw["model_type"]] |= {p.stored for group in found for p in group.parameters}
        spec = leaves_by_path(decoder_spec(family.parse_config(raw)))
        assert sorted(p.path for group in found for p in group.parameters) == sorted(spec)
    for kind, family in FAMILIES.items():
        assert used[kind] == set(family.names.values()), kind


def make(tmp_path: Path, name: str) -> dict[str, np.ndarray]:
    case_folder(name, tmp_path)
    return load_file(tmp_path / "model.safetensors")


def test_blocks_that_predict_several_tokens_ahead_are_left_out(tmp_path):
    tensors = make(tmp_path, "nemotron_h")
    save_file(
        {**tensors, "mtp.layers.0.norm.weight": np.zeros(30, np.float32)}, tmp_path / "model.safetensors"
    )
    config, params = load_hf(tmp_path)
    assert leaves_by_path(params).keys() == leaves_by_path(decoder_spec(config)).keys()


def test_layers_that_predict_several_tokens_ahead_are_left_out(tmp_path):
    tensors = make(tmp_path, "deepseek_v3")
    _, expected = load_hf(tmp_path)
    ahead = {n.replace("layers.2", "layers.3"): x for n, x in tensors.items() if "layers.2" in n}
    save_file(
        {**tensors, **ahead, "model.layers.3.eh_proj.weight": np.zeros((2, 2), np.float32)},
        tmp_path / "model.safetensors",
    )
    _, found = load_hf(tmp_path)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    save_file(
        {**tensors, "model.layers.2.eh_proj.weight": np.zeros((2, 2), np.float32)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"layers\.2\.eh_proj\.weight' is not a parameter"):
        load_hf(tmp_path)


def test_multi_token_prediction_blocks_of_ernie_are_ignored(tmp_path):
    tensors = make(tmp_path, "ernie4_5_moe")
    ahead = {"model.mtp_linear_proj.0.weight": np.zeros((30, 60), np.float32)}
    save_file(tensors | ahead, tmp_path / "model.safetensors")
    assert load_hf(tmp_path)[0].num_layers == 5


def test_the_names_of_older_gpt2_files_lack_their_first_part(tmp_path):
    tensors = make(tmp_path, "gpt2")
    _, expected = load_hf(tmp_path)
    old = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    save_file(old | {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)}, tmp_path / "model.safetensors")
    _, found = load_hf(tmp_path)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_masks_and_frequencies_in_older_gpt_neox_files_change_nothing(tmp_path):
    tensors = make(tmp_path, "gpt_neox")
    _, expected = load_hf(tmp_path)
    for name in ("bias", "masked_bias", "rotary_emb.inv_freq"):
        tensors[f"gpt_neox.layers.1.attention.{name}"] = np.ones((1, 1), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    _, found = load_hf(tmp_path)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    ("name", "tensor", "shape", "words"),
    [
        (
            "phi3",
            "model.layers.1.self_attn.qkv_proj.weight",
            (60, 50),
            "has shape (60, 50), expected (70, 50)",
        ),
        ("phi3", "model.layers.1.mlp.gate_up_proj.weight", (44, 50), "has shape (44, 50), expected (88, 50)"),
        ("gpt2", "transformer.h.2.attn.c_attn.weight", (90, 30), "has shape (90, 30), expected (30, 90)"),
        ("deepseek_v2", "model.layers.0.self_attn.kv_b_proj.weight", (75, 15), "expected (75, 14)"),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", (5, 88, 30), "expected (5, 30, 88)"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.2.w1.weight", (30, 44), "expected (44, 30)"),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value.weight", (70, 50), "expected (150, 50)"),
        ("stablelm parallel", "model.layers.0.self_attn.q_layernorm.norms.9.weight", (2,), "expected (8,)"),
    ],
)
def test_joined_and_stacked_tensors_of_another_shape_are_refused(tmp_path, name, tensor, shape, words):
    tensors = make(tmp_path, name)
    save_file(tensors | {tensor: np.zeros(shape, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{re.escape(tensor)}.*{re.escape(words)}"):
        load_hf(tmp_path)
    del tensors[tensor]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{re.escape(tensor)}' is missing, expected one of shape"):
        load_hf(tmp_path)


def test_a_family_is_written_only_with_its_own_fields(tmp_path):
    make(tmp_path, "gpt2")
    config, params = load_hf(tmp_path)
    with pytest.raises(ValueError, match="only models shaped like Llama"):
        save_hf(tmp_path / "out", config, params)
    with pytest.raises(ValueError, match="like describes another model"):
        save_hf(tmp_path / "out", config, params, like=hub_config("gpt2") | {"n_layer": 2})
    assert not (tmp_path / "out").exists()


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_stays_bfloat16(name, tmp_path):
    """No part of any family promotes its activations, or mixes dtypes (tests forbid it)."""
    (tmp_path / "config.json").write_text(json.dumps(hub_config(name)))
    config = read_config(tmp_path)
    params, ids = (
        shapes_from_specs(decoder_spec(config), jnp.dtype(jnp.bfloat16)),
        np.zeros((1, 40), np.int32),
    )
    hidden = jax.eval_shape(lambda w, ids: forward(w, config, ids, ids, causal)[0], params, ids)
    assert hidden.dtype == jnp.bfloat16


def test_the_documentation_lists_the_families():
    text = (ROOT / "docs" / "families.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    assert listed == ["model_type", *FAMILIES]


@pytest.mark.filterwarnings("default")
@pytest.mark.extras
def test_transformers_computes_the_same_of_what_save_writes(case, tmp_path):
    """So the golden outputs are those of the transformers installed, and what is written is what was read."""
    for package in ("torch", "transformers"):
        pytest.importorskip(package)
    folder, golden = case
    save_hf(tmp_path, *load_hf(folder), like=folder)
    found, greedy = expected_outputs(tmp_path)
    np.testing.assert_allclose(found, golden["logits"], atol=2e-4, rtol=0)
    assert greedy == golden["greedy"]
