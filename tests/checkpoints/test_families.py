"""Every family on sizes of its own against what Transformers computed, without Transformers."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases.families import CASES, LENGTH, LONG, YARN, case_folder, expected_outputs, hub_config, prompts
from safetensors.numpy import load_file, save_file

from duetto.checkpoints.families import FAMILIES
from duetto.checkpoints.huggingface import load, read_config, save
from duetto.checkpoints.layout import groups
from duetto.checkpoints.tensors import CheckpointError
from duetto.model.attention import causal
from duetto.model.config import Dense, Experts, GroupedQuery
from duetto.model.transformer import decoder_spec, forward, unembed
from duetto.model.tree import abstract, paths

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module", params=sorted(CASES))
def case(request, tmp_path_factory):
    """A checkpoint's folder, and what is known of it."""
    folder = tmp_path_factory.mktemp("family")
    return folder, case_folder(request.param, folder)


@partial(jax.jit, static_argnums=1)
def logits(params, config, tokens, length):
    """After each token of a padded row, of which `length` are a sequence."""
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    hidden, _ = forward(params, config, tokens[None], positions, causal, lengths=length[None])
    return unembed(params, config, hidden)[0]


def outputs(params, config, ids: list[int]) -> np.ndarray:
    tokens = np.zeros(LENGTH, np.int32)
    tokens[: len(ids)] = ids
    return np.asarray(logits(params, config, tokens, jnp.int32(len(ids))))[len(ids) - 1]


def test_outputs_are_those_of_transformers(case):
    folder, golden = case
    config, params = load(folder)
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_loaded_is_written_back_bit_for_bit(case, tmp_path, dtype):
    folder, _ = case
    source = load_file(folder / "model.safetensors")
    config, params = load(folder, dtype)
    save(tmp_path, config, params, like=folder)
    written = load_file(tmp_path / "model.safetensors")
    assert written.keys() == source.keys()
    for name, array in source.items():
        own = np.float32 if dtype == "float32" or "e_score_correction" in name else ml_dtypes.bfloat16
        assert written[name].dtype == own
        assert written[name].tobytes() == array.astype(own).tobytes(), name
    assert load(tmp_path)[0] == config


def test_every_family_has_a_case_and_every_name_is_used():
    used: dict[str, set] = {kind: set() for kind in FAMILIES}
    for name in CASES:
        raw = hub_config(name)
        family = FAMILIES[raw["model_type"]]
        found = groups(family, family.config(raw))
        used[raw["model_type"]] |= {p.stored for group in found for p in group.parameters}
        spec = paths(decoder_spec(family.config(raw)))
        assert sorted(p.path for group in found for p in group.parameters) == sorted(spec)
    for kind, family in FAMILIES.items():
        assert used[kind] == set(family.names.values()), kind


# --- what single fields mean


def config_of(kind: str, **fields):
    name = kind if kind in CASES else next(name for name in CASES if name.startswith(kind))
    raw = {key: value for key, value in (hub_config(name) | fields).items() if value != "absent"}
    return FAMILIES[kind].config(raw)


def windows(config) -> list[int | None]:
    return [layer.mixer.window for layer in config.layers]


def test_windows_by_layer():
    assert windows(config_of("mistral", sliding_window="absent")) == [4096] * 3
    assert windows(config_of("mistral", sliding_window=None)) == [None] * 3
    assert windows(config_of("qwen2", use_sliding_window=False)) == [None] * 3
    assert windows(config_of("qwen2", max_window_layers=2)) == [None, None, 5]
    assert windows(config_of("qwen2", max_window_layers="absent")) == [None] * 3
    assert windows(config_of("qwen3_moe", use_sliding_window=False)) == [None] * 3
    assert windows(config_of("gemma2", sliding_window="absent")) == [4096, None, 4096, None, 4096]
    assert windows(config_of("gemma3_text", sliding_window_pattern="absent", num_hidden_layers=7)) == [
        *[5] * 5,
        None,
        5,
    ]
    assert windows(config_of("gpt_oss", sliding_window="absent")) == [128, None, 128]


def test_mixtures_by_layer():
    def mixed(kind: str, **fields) -> list[bool]:
        return [isinstance(layer.ffn, Experts) for layer in config_of(kind, **fields).layers]

    assert mixed("qwen3_moe", mlp_only_layers=None) == [True] * 3
    assert mixed("qwen3_moe", mlp_only_layers=[2], decoder_sparse_step=3) == [False] * 3
    assert mixed("qwen3_moe", mlp_only_layers=[], decoder_sparse_step=3) == [False, False, True]
    assert mixed("deepseek_v2", first_k_dense_replace="absent") == [True] * 3
    assert mixed("deepseek_v3", first_k_dense_replace=0, moe_layer_freq=2) == [True, False, True]
    assert mixed("deepseek_v3", first_k_dense_replace="absent") == [False] * 3


def attention(kind: str, **fields) -> Any:
    return config_of(kind, **fields).layers[0].mixer


def ffn(kind: str, **fields) -> Any:
    return config_of(kind, **fields).layers[-1].ffn


def test_null_and_absence_differ_where_transformers_says_so():
    assert config_of("gemma2", final_logit_softcapping="absent").logit_softcap == 30.0
    assert config_of("gemma2", final_logit_softcapping=None).logit_softcap is None
    assert attention("deepseek_v2", q_lora_rank="absent").query_rank == 1536
    assert attention("deepseek_v2", q_lora_rank=None).query_rank is None
    eight = {"head_dim": 6, "num_attention_heads": 8}
    assert attention("mistral", num_key_value_heads="absent", **eight).num_kv_heads == 8
    assert attention("mistral", num_key_value_heads=None).num_kv_heads == 5
    assert ffn("deepseek_v3", n_shared_experts=None).shared == 0
    assert ffn("gpt2", n_inner=None) == Dense(120, "gelu_tanh", gated=False, bias=True)


def test_defaults_of_gpt_oss():
    config = config_of("gpt_oss", swiglu_limit="absent", head_dim="absent")
    mixer, ffn = config.layers[0].mixer, config.layers[0].ffn
    assert isinstance(mixer, GroupedQuery) and isinstance(ffn, Experts) and mixer.rope is not None
    assert (mixer.head_size, ffn.clamp, mixer.sinks) == (64, 7.0, True)
    assert (mixer.rope.kind, mixer.rope.factor, mixer.rope.theta, mixer.rope.truncate) == (
        "yarn",
        32.0,
        150000.0,
        False,
    )


ROPED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "deepseek_v2", "gpt_oss")


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        *((kind, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'") for kind in ROPED),
        *((kind, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5") for kind in ROPED),
        *((kind, {"hidden_act": "relu2"}, "hidden_act is 'relu2'") for kind in ("mistral", "qwen2", "phi3")),
        ("llama", {"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        (
            "llama",
            {"rope_scaling": YARN | {"rope_theta": 1}},
            "rope_scaling: rope_theta is 1.0, expected more than 1",
        ),
        ("llama", {"rope_scaling": YARN | {"truncate": 1}}, "truncate is 1"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types is 'full_attention'"),
        (
            "mistral",
            {"num_key_value_heads": 2},
            "num_attention_heads 5 is not a multiple of num_key_value_heads 2",
        ),
        ("mixtral", {"num_experts_per_tok": 4}, "4 of 3 experts cannot be active"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        *(
            (kind, {"num_local_experts": 10**6}, "num_local_experts is 1000000")
            for kind in ("mixtral", "gpt_oss")
        ),
        (
            "qwen3_moe",
            {"num_experts": 10**6},
            "num_experts is 1000000, expected a positive integer, at most 100000",
        ),
        ("deepseek_v3", {"n_routed_experts": 10**6}, "n_routed_experts is 1000000"),
        ("deepseek_v3", {"rope_scaling": YARN | {"mscale_all_dim": 1e300}}, "mscale_all_dim is 1e+300"),
        ("gpt2", {"n_layer": 10**5}, "n_layer is 100000"),
        ("qwen2", {"layer_types": ["full_attention"]}, "expected a list of 3"),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, "layer_types holds 'linear_attention'"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window is 1"),
        ("qwen3", {"use_sliding_window": False}, "there is no sliding_window"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma2", {"hidden_activation": "tanh"}, "hidden_activation is 'tanh'"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1.0}}, "expected objects for full_attention"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "ntk"}}, "rope of full_attention: rope_type is 'ntk'"),
        ("gemma3_text", {"rope_scaling": {"factor": 2}}, "rope_scaling: rope_type is missing"),
        ("phi3", {"rope_scaling": {"factor": 2}}, "rope_scaling: rope_type is missing"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type is 'linear'"),
        (
            "phi3",
            {"rope_scaling": LONG | {"long_factor": [1.0]}},
            "long_factor is [1.0], expected a list of 4",
        ),
        ("phi3", {"rope_scaling": LONG | {"short_factor": [1, 1, 1, 0]}}, "short_factor is 0"),
        ("phi3", {"rope_scaling": LONG | {"short_mscale": 1.1}}, "short_mscale is 1.1"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, expected at most 1"),
        ("phi3", {"attention_bias": True}, "attention_bias is True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is True"),
        ("deepseek_v2", {"n_group": 4}, "6 experts are not a multiple of 4 groups"),
        ("deepseek_v2", {"topk_group": 4}, "4 of 3 groups"),
        ("deepseek_v2", {"num_experts_per_tok": "absent"}, "num_experts_per_tok is missing"),
        ("deepseek_v2", {"qk_rope_head_dim": 5}, "rope_size 5 is odd"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("deepseek_v3", {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt2", {"activation_function": "mish"}, "activation_function is 'mish'"),
        ("gpt2", {"n_head": 4}, "n_embd 30 is not a multiple of n_head 4"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_is_not_supported_is_refused_by_field_and_value(kind, fields, words):
    with pytest.raises(ValueError, match=re.escape(words)) as e:
        config_of(kind, **fields)
    assert "\n" not in str(e.value)


def test_models_of_images_and_text_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": {}}))
    with pytest.raises(CheckpointError, match="'gemma3', a model of images and text.*expected 'gemma3_text'"):
        read_config(tmp_path)


# --- names


def make(tmp_path: Path, name: str) -> dict[str, np.ndarray]:
    case_folder(name, tmp_path)
    return load_file(tmp_path / "model.safetensors")


def test_layers_that_predict_several_tokens_ahead_are_left_out(tmp_path):
    tensors = make(tmp_path, "deepseek_v3")
    _, expected = load(tmp_path)
    ahead = {n.replace("layers.2", "layers.3"): x for n, x in tensors.items() if "layers.2" in n}
    save_file(
        {**tensors, **ahead, "model.layers.3.eh_proj.weight": np.zeros((2, 2), np.float32)},
        tmp_path / "model.safetensors",
    )
    _, found = load(tmp_path)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    save_file(
        {**tensors, "model.layers.2.eh_proj.weight": np.zeros((2, 2), np.float32)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"layers\.2\.eh_proj\.weight' is not a parameter"):
        load(tmp_path)


def test_the_names_of_older_gpt2_files_lack_their_first_part(tmp_path):
    tensors = make(tmp_path, "gpt2")
    _, expected = load(tmp_path)
    old = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    save_file(old | {"h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)}, tmp_path / "model.safetensors")
    _, found = load(tmp_path)
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
    ],
)
def test_joined_and_stacked_tensors_of_another_shape_are_refused(tmp_path, name, tensor, shape, words):
    tensors = make(tmp_path, name)
    save_file(tensors | {tensor: np.zeros(shape, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{re.escape(tensor)}.*{re.escape(words)}"):
        load(tmp_path)
    del tensors[tensor]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{re.escape(tensor)}' is missing, expected one of shape"):
        load(tmp_path)


def test_a_family_is_written_only_with_its_own_fields(tmp_path):
    make(tmp_path, "gpt2")
    config, params = load(tmp_path)
    with pytest.raises(ValueError, match="only models shaped like Llama"):
        save(tmp_path / "out", config, params)
    with pytest.raises(ValueError, match="like describes another model"):
        save(tmp_path / "out", config, params, like=hub_config("gpt2") | {"n_layer": 2})
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_stays_bfloat16(name, tmp_path):
    """No part of any family promotes its activations, or mixes dtypes (tests forbid it)."""
    (tmp_path / "config.json").write_text(json.dumps(hub_config(name)))
    config = read_config(tmp_path)
    params, ids = abstract(decoder_spec(config), jnp.dtype(jnp.bfloat16)), jnp.zeros((1, 40), jnp.int32)
    hidden = jax.eval_shape(lambda w, ids: forward(w, config, ids, ids, causal)[0], params, ids)
    assert hidden.dtype == jnp.bfloat16


def test_the_documentation_lists_the_families():
    text = (ROOT / "docs" / "families.md").read_text()
    listed = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    assert listed == ["model_type", *FAMILIES]


# --- against Transformers itself


@pytest.mark.filterwarnings("default")
@pytest.mark.extras
def test_transformers_computes_the_same_of_what_save_writes(case, tmp_path):
    """So the golden outputs are those of the transformers installed, and what is written is what was read."""
    for package in ("torch", "transformers"):
        pytest.importorskip(package)
    folder, golden = case
    save(tmp_path, *load(folder), like=folder)
    found, greedy = expected_outputs(tmp_path)
    np.testing.assert_allclose(found, golden["logits"], atol=2e-4, rtol=0)
    assert greedy == golden["greedy"]
