"""Folders of adapters: read as PEFT means them, or refused in a sentence."""

import re
import warnings
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from cases.adapters import ATTENTION, merged, read, write, written
from cases.families.latent import LATENT
from cases.families.recurrent import DELTA, QWEN_EXPERTS
from cases.models import TINY

from duetto.checkpoints.adapters.adapter import AdapterReader
from duetto.checkpoints.families import FAMILIES
from duetto.checkpoints.huggingface import load_hf, read_family_config
from duetto.checkpoints.tensors import CheckpointError, list_tensors
from duetto.model.attention import causal
from duetto.model.config import Experts, LayerKind
from duetto.model.transformer import compute_logits, forward

Q = "base_model.model.model.layers.0.self_attn.q_proj"


def tensors_in(folder):
    found = list_tensors(folder / "adapter_model.safetensors")
    return {name: t.read_rows(0, t.shape[0]).astype(np.float32) for name, t in found.items()}


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"lora_alpha": 8}, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"lora_alpha": 8, "alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"lora_alpha": 8, "r": 2, "rank_pattern": {r"layers\.\d+\.self_attn\.q_proj": 4}}, 2.0),
    ],
)
def test_adapter_terms_have_weight_axes_and_b_is_scaled(tmp_path, fields, scale):
    folder = write(
        tmp_path / "a",
        TINY,
        4,
        0,
        ("q_proj", "o_proj"),
        **fields | {"rank_pattern": {"o_proj": 4} | fields.get("rank_pattern", {})},
    )
    adapter, stored = read(folder, TINY), tensors_in(folder)
    a, b = adapter.terms["layers.0.attention.q"]
    np.testing.assert_array_equal(a, stored[f"{Q}.lora_A.weight"].T)
    np.testing.assert_allclose(b.reshape(4, -1), scale * stored[f"{Q}.lora_B.weight"].T, rtol=1e-6)
    a, _ = adapter.terms["layers.1.attention.o"]
    one = Q.replace("layers.0", "layers.1").replace("q_proj", "o_proj")
    np.testing.assert_array_equal(a.reshape(-1, 4), stored[f"{one}.lora_A.weight"].T)
    assert sorted(adapter.terms) == [f"layers.{i}.attention.{x}" for i in range(2) for x in "oq"]


TRAINED = {  # names of the layers in the model that was trained
    "the text model": "model.layers", "nested": "model.language_model.layers",
    "nested, on the hub": "language_model.model.layers", "without a head": "layers",
    "nested, without a head": "language_model.layers",
}  # fmt: skip


@pytest.mark.parametrize("layers", TRAINED.values(), ids=TRAINED)
def test_patterns_match_names_of_the_model_that_was_trained(tmp_path, layers):
    source = write(tmp_path / "source", TINY, 4, 0, ("q_proj",))
    stored = {name.replace("model.layers", layers): x for name, x in tensors_in(source).items()}
    patterns = {
        "rank_pattern": {re.escape(f"{layers}.") + r"\d+\.self_attn\.q_proj": 4},
        "alpha_pattern": {f"{layers}.1.self_attn.q_proj": 2, "elsewhere.layers.0.self_attn.q_proj": 6},
    }
    adapter = read(written(tmp_path / "a", stored, {"r": 2, "lora_alpha": 8, **patterns}), TINY)
    for i, scale in enumerate((2.0, 0.5)):
        _, b = adapter.terms[f"layers.{i}.attention.q"]
        expected = stored[f"base_model.model.{layers}.{i}.self_attn.q_proj.lora_B.weight"].T
        np.testing.assert_allclose(b.reshape(4, -1), scale * expected, rtol=1e-6)


def test_a_refusal_names_a_module_as_the_adapter_does(tmp_path):
    stored = {f"base_model.model.vision_tower.q_proj.lora_{x}.weight": np.zeros((2, 2), "f4") for x in "AB"}
    folder = written(tmp_path / "a", stored, {"r": 2, "lora_alpha": 4})
    with pytest.raises(CheckpointError, match="module 'vision_tower.q_proj' cannot have an adapter here"):
        read(folder, TINY)


def test_a_name_follows_from_the_content_alone(tmp_path):
    first, again, other, scaled = (
        read(write(tmp_path / name, TINY, 2, seed, ATTENTION, lora_alpha=alpha), TINY)
        for name, seed, alpha in (("x", 0, 4), ("y", 0, 4), ("x", 1, 4), ("x", 0, 8))
    )
    assert first.digest == again.digest and len({first.digest, other.digest, scaled.digest}) == 3
    assert (first.name, again.name) == ("x", "y")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"use_dora": True}, "use_dora=True is not supported: only False"),
        ({"bias": "all"}, "bias='all' is not supported: only 'none'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] is not supported"),
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported: only 'LORA'"),
        ({"init_lora_weights": "pissa_niter_16"}, "it changes the base weights"),
        ({"layer_replication": [[0, 2]]}, "layer_replication=[[0, 2]] is not supported"),
        ({"r": 0}, "r is 0, expected a positive integer"),
        ({"lora_alpha": "x"}, "lora_alpha is 'x', expected a number"),
        ({"alpha_pattern": {"(": 1}}, "alpha_pattern has the pattern '('"),
        ({"r": 3}, "lora_A.weight' has shape (2, 48) in F32, expected (3, 48)"),
    ],
)
def test_unsupported_adapter_configurations_are_refused_by_field(tmp_path, fields, said):
    folder = write(tmp_path / "a", TINY, 2, 0, ATTENTION, **fields)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read(folder, TINY)


def changed(folder, change):
    tensors = tensors_in(folder)
    change(tensors)
    return written(folder, tensors, {"r": 2, "lora_alpha": 4})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(f"{Q}.lora_B.weight"), "self_attn.q_proj' lacks one of lora_A and lora_B"),
        (
            lambda t: t.update({f"{Q}.lora_B.weight": np.zeros((40, 2), np.float32)}),
            "has shape (40, 2) in F32, expected (48, 2)",
        ),
        (lambda t: t.update({f"{Q}.lora_A.weight": np.full((2, 48), np.nan, np.float32)}), "NaN"),
        (
            lambda t: t.update({"base_model.model.lm_head.lora_A.weight": np.zeros((2, 48), np.float32)}),
            "module 'lm_head' cannot have an adapter here",
        ),
        (lambda t: t.update({"base_model.model.lm_head.weight": np.zeros(3, np.float32)}), "is none of an"),
        (lambda t: t.clear(), "holds no tensor"),
        (
            lambda t: t.update({f"{Q}.lora_B.weight": np.zeros((48, 2), np.int32)}),
            "in I32, expected (48, 2) in F32, F16 or BF16",
        ),
    ],
)
def test_adapter_tensors_that_do_not_fit_are_refused(tmp_path, change, said):
    folder = changed(write(tmp_path / "a", TINY, 2, 0, ATTENTION), change)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        read(folder, TINY)


def test_ranks_above_the_limit_and_incomplete_folders_are_refused(tmp_path):
    folder = write(tmp_path / "a", TINY, 9, 0, ATTENTION)
    with pytest.raises(CheckpointError, match="rank 9, max_lora_rank allows 8"):
        read(folder, TINY, most=8)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=re.escape("has no adapter_model.safetensors")):
        read(folder, TINY)
    for name in ("x" * 5000, "x\0"):
        with pytest.raises(CheckpointError, match=re.escape("has no adapter_config.json")):
            read(tmp_path / name, TINY)


def test_adapters_may_have_modules_of_single_experts(tmp_path):
    """Of any rank each; those without one have zeros."""
    kind = LayerKind(TINY.layers[0].mixer, Experts(4, 2, 24))
    config, rng = replace(TINY, layers=(kind,)), np.random.default_rng(0)
    ranks, tensors = {("gate_proj", 1): 2, ("gate_proj", 3): 3, ("down_proj", 0): 3}, {}
    for (name, e), rank in ranks.items():
        out, inner = (24, 48) if name == "gate_proj" else (48, 24)
        module = f"base_model.model.model.layers.0.mlp.experts.{e}.{name}"
        tensors[f"{module}.lora_A.weight"] = rng.standard_normal((rank, inner)).astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = rng.standard_normal((out, rank)).astype(np.float32)
    patterns = {rf"experts\.{e}\.{name}": rank for (name, e), rank in ranks.items()}
    folder = written(tmp_path / "a", tensors, {"r": 2, "lora_alpha": 6, "rank_pattern": patterns})
    family = FAMILIES["qwen3_moe"]
    adapter = AdapterReader(family, config, np.float32, 8, adapts_routed=True).read(folder, "a")
    assert adapter.rank == 3 and sorted(adapter.terms) == [
        f"layers.0.ffn.experts.{x}" for x in ("down", "gate")
    ]
    for (name, e), rank in ranks.items():
        a, b = adapter.terms[f"layers.0.ffn.experts.{name.removesuffix('_proj')}"]
        module = f"base_model.model.model.layers.0.mlp.experts.{e}.{name}"
        stored = tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
        np.testing.assert_allclose(a[e] @ b[e], 6 / rank * stored.T, rtol=1e-4, atol=1e-5)
        used = {number for other, number in ranks if other == name}
        assert all(a[i].any() == b[i].any() == (i in used) for i in range(4))
    with pytest.raises(CheckpointError, match=r"mlp.experts.\d.\w+' cannot have an adapter here"):
        AdapterReader(family, config, np.float32, 8).read(folder, "a")


# ------------------------------------------------------------ PEFT itself

MODELS = {
    "llama": ({"num_key_value_heads": 2}, ["q_proj", "v_proj", "o_proj", "down_proj"]),
    "phi3": ({"num_key_value_heads": 2, "pad_token_id": 0}, ["qkv_proj", "o_proj", "gate_up_proj"]),
    "gpt2": ({}, ["c_attn", "c_proj", "c_fc"]),
    "deepseek_v3": (
        LATENT | {"num_key_value_heads": 4, "q_lora_rank": 12, "n_routed_experts": 4, "n_group": 2,
                  "num_experts_per_tok": 2, "topk_group": 1, "first_k_dense_replace": 1,
                  "n_shared_experts": 1, "moe_intermediate_size": 12},
        ["kv_a_proj_with_mqa", "kv_b_proj", "q_a_proj", "q_b_proj", "o_proj"],
    ),
    "qwen3_next": (
        DELTA | QWEN_EXPERTS | {
            "num_key_value_heads": 2, "head_dim": 16, "moe_intermediate_size": 12, "layer_types":
            ["linear_attention", "full_attention", "linear_attention", "full_attention"]},
        ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj"],
    ),
    "lfm2": (
        {"num_key_value_heads": 2, "layer_types": ["conv", "full_attention"],
         "block_auto_adjust_ff_dim": False},
        ["in_proj", "conv.out_proj", "w2"],
    ),
    "mamba2": (
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "expand": 2},
        ["in_proj"],  # PEFT refuses the others
    ),
}  # fmt: skip
SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.extras
@pytest.mark.parametrize("family", MODELS)
def test_logits_equal_those_of_peft(family, tmp_path):
    """Of an adapter that PEFT has written, with ranks and scales of its own in some modules."""
    torch, peft, transformers = (pytest.importorskip(name) for name in ("torch", "peft", "transformers"))
    more, targets = MODELS[family]
    sizes = (SIZES if family == "gpt2" else SIZES | {"intermediate_size": 48}) | more
    torch.manual_seed(0)
    plain = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **sizes))
    plain.save_pretrained(tmp_path / "model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lora = peft.LoraConfig(
            r=4, lora_alpha=6, target_modules=targets, use_rslora=family == "llama",
            rank_pattern={targets[-1]: 3}, alpha_pattern={targets[0]: 2}, init_lora_weights=False,
        )  # fmt: skip
        model = peft.get_peft_model(plain, lora).eval()
        model.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        wanted = model(ids).logits.numpy()[0]
    config, params = load_hf(tmp_path / "model", jnp.float32)
    reader = AdapterReader(read_family_config(tmp_path / "model")[0], config, np.float32, 8)
    params = merged(params, reader.read(tmp_path / "adapter", "a"))
    places = jnp.arange(17, dtype=jnp.int32)[None]
    hidden, _ = forward(params, config, jnp.asarray(ids.numpy(), jnp.int32), places, causal)
    np.testing.assert_allclose(compute_logits(params, config, hidden)[0], wanted, atol=1e-3)
