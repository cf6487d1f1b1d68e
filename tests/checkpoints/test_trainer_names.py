"""Parameters under the names of trainers: layers in a scan, queries, keys and values in one array, other
orders of axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.weights import drawn

from duetto.checkpoints.families import FAMILIES
from duetto.checkpoints.families.storage import Stored
from duetto.checkpoints.nnx import params_from_state
from duetto.model.config import Dense, Experts, GroupedQuery, LayerKind, ModelConfig, NormKind
from duetto.model.transformer import Decoder, decoder_spec
from duetto.model.tree import leaves_by_path

LLAMA = ModelConfig.uniform(50, 32, 32, 3, 4, 2, 8, qk_norm=True)  # square matrices
GEMMA = ModelConfig(
    50, 32, (LayerKind(GroupedQuery(4, 2, 8), Dense(48)),) * 2, post_norms=True, tied_embeddings=True
)
EQUAL_HEADS = ModelConfig(
    50, 32, (LayerKind(GroupedQuery(4, 4, 8), Dense(48)),) * 2, post_norms=True, tied_embeddings=True
)
MIXTURE = ModelConfig(50, 32, (LayerKind(GroupedQuery(4, 2, 8, bias=True), Experts(4, 2, 24)),) * 2)
Leaves = dict[str, np.ndarray]


def random_leaves(config: ModelConfig) -> Leaves:
    return {path: np.asarray(x) for path, x in leaves_by_path(drawn(decoder_spec(config))).items()}


def same(params: Decoder, leaves: Leaves) -> bool:
    found = leaves_by_path(params)
    return found.keys() == leaves.keys() and all(np.array_equal(found[p], leaves[p]) for p in leaves)


def tunix_llama(w: Leaves) -> Leaves:
    names = {
        "attention_norm.gain": "input_layernorm.w", "ffn_norm.gain": "post_attention_layernorm.w",
        **{f"attention.{n}": f"attn.{n}_proj.w" for n in "qkvo"},
        **{f"attention.{n}_norm": f"attn.{n}_norm.w" for n in "qk"},
        **{f"ffn.{n}": f"mlp.{n}_proj.kernel" for n in ("gate", "up", "down")},
    }  # fmt: skip
    outer = {
        "embedder.input_embedding": w["embed"], "final_norm.w": w["norm.gain"], "lm_head.w": w["head"].T
    }  # fmt: skip
    return outer | {
        f"layers.{i}.{theirs}": w[f"layers.{i}.{ours}"] for i in range(3) for ours, theirs in names.items()
    }


def tunix_gemma(w: Leaves) -> Leaves:
    state = {"embedder.input_embedding": w["embed"], "final_norm.scale": w["norm.gain"]}
    for ours, x in w.items():
        layer, _, name = ours.removeprefix("layers.").partition(".")
        at = f"layers.{layer}."
        if name.startswith("ffn."):
            state[f"{at}mlp.{name[4:]}_proj.kernel"] = x
        elif name.endswith("norm.gain") and layer.isdigit():
            theirs = {
                "attention_norm": "pre_attention_norm", "attention_post_norm": "post_attn_norm",
                "ffn_norm": "pre_ffw_norm", "ffn_post_norm": "post_ffw_norm",
            }  # fmt: skip
            state[f"{at}{theirs[name.removesuffix('.gain')]}.scale"] = x
        elif name == "attention.q":
            q, k, v = (w[f"layers.{layer}.attention.{n}"].transpose(1, 0, 2) for n in "qkv")
            if q.shape == k.shape:
                state[f"{at}attn.qkv_einsum.w"] = np.stack([q, k, v])
            else:
                state[f"{at}attn.q_einsum.w"] = q
                state[f"{at}attn.kv_einsum.w"] = np.stack([k, v])
        elif name == "attention.o":
            state[f"{at}attn.attn_vec_einsum.w"] = x
    return state


MAXTEXT = {
    "attention_norm.gain": "pre_self_attention_layer_norm.scale",
    "ffn_norm.gain": "post_self_attention_layer_norm.scale",
    "attention.q": "self_attention.query.kernel", "attention.k": "self_attention.key.kernel",
    "attention.v": "self_attention.value.kernel", "attention.o": "self_attention.out.kernel",
    "attention.q_bias": "self_attention.query.bias", "attention.k_bias": "self_attention.key.bias",
    "attention.v_bias": "self_attention.value.bias", "ffn.router": "moe_block.gate.kernel",
    "ffn.experts.gate": "moe_block.wi_0", "ffn.experts.up": "moe_block.wi_1",
    "ffn.experts.down": "moe_block.wo",
}  # fmt: skip


def maxtext_outer(w: Leaves) -> Leaves:
    return {
        "token_embedder.embedding": w["embed"], "decoder.decoder_norm.scale": w["norm.gain"],
        "decoder.logits_dense.kernel": w["head"].T,
    }  # fmt: skip


def maxtext_scanned(w: Leaves) -> Leaves:
    return maxtext_outer(w) | {
        f"decoder.layers.{theirs}": np.stack([w[f"layers.{i}.{ours}"] for i in range(2)], axis=1)
        for ours, theirs in MAXTEXT.items()
    }


def maxtext_unscanned(w: Leaves) -> Leaves:
    return maxtext_outer(w) | {
        f"decoder.layers_{i}.{theirs}": w[f"layers.{i}.{ours}"]
        for ours, theirs in MAXTEXT.items()
        for i in range(2)
    }


def levanter(w: Leaves) -> Leaves:
    """Return tensors as a Hugging Face folder of Qwen 3 has them."""
    state = {
        "model.embed_tokens.weight": w["embed"],
        "lm_head.weight": w["head"],
        "model.norm.weight": w["norm.gain"],
    }
    for i in range(3):
        ours, at = f"layers.{i}.", f"model.layers.{i}."
        state |= {
            f"{at}self_attn.{n}_proj.weight": w[f"{ours}attention.{n}"].reshape(32, -1).T for n in "qkv"
        }
        state |= {f"{at}self_attn.{n}_norm.weight": w[f"{ours}attention.{n}_norm"] for n in "qk"}
        state |= {f"{at}mlp.{n}_proj.weight": w[f"{ours}ffn.{n}"].T for n in ("gate", "up", "down")}
        state |= {
            f"{at}self_attn.o_proj.weight": w[f"{ours}attention.o"].reshape(32, 32).T,
            f"{at}input_layernorm.weight": w[f"{ours}attention_norm.gain"],
            f"{at}post_attention_layernorm.weight": w[f"{ours}ffn_norm.gain"],
        }
    return state


CASES = {
    "tunix": ("tunix", LLAMA, tunix_llama),
    "tunix, keys and values in one": ("tunix", GEMMA, tunix_gemma),
    "tunix, all in one": ("tunix", EQUAL_HEADS, tunix_gemma),
    "maxtext, a scan": ("maxtext", MIXTURE, maxtext_scanned),
    "maxtext, layer by layer": ("maxtext", MIXTURE, maxtext_unscanned),
    "levanter": ("levanter", LLAMA, levanter),
}


@pytest.mark.parametrize("name", CASES)
def test_a_trainers_tree_gives_its_parameters(name):
    trainer, config, export = CASES[name]
    leaves = random_leaves(config)
    state = jax.tree.map(jnp.asarray, export(leaves))
    assert same(params_from_state(config, state, trainer), leaves)


def test_arrays_that_lie_as_ours_are_not_copied():
    state = jax.tree.map(jnp.asarray, tunix_llama(random_leaves(LLAMA)))
    params = leaves_by_path(params_from_state(LLAMA, state, "tunix"))
    held = {id(x) for x in state.values()}
    assert [path for path, x in params.items() if id(x) not in held] == ["head"]


def test_a_familys_own_table_reads_experts_one_by_one():
    """Each expert is a tensor of a folder of Qwen 3."""
    config = ModelConfig(50, 32, (LayerKind(GroupedQuery(4, 2, 8, qk_norm=NormKind()), Experts(2, 1, 24)),))
    leaves, family = random_leaves(config), FAMILIES["qwen3_moe"]
    at = "model.layers.0."
    state = {
        f"{at}mlp.experts.{e}.{n}_proj.weight": leaves[f"layers.0.ffn.experts.{n}"][e].T
        for n in ("gate", "up", "down")
        for e in (0, 1)
    }
    state |= {
        f"{at}self_attn.{n}_proj.weight": leaves[f"layers.0.attention.{n}"].reshape(32, -1).T for n in "qkv"
    }
    state |= {f"{at}self_attn.{n}_norm.weight": leaves[f"layers.0.attention.{n}_norm"] for n in "qk"}
    state |= {
        f"{at}self_attn.o_proj.weight": leaves["layers.0.attention.o"].reshape(32, 32).T,
        f"{at}mlp.gate.weight": leaves["layers.0.ffn.router"].T,
        f"{at}input_layernorm.weight": leaves["layers.0.attention_norm.gain"],
        f"{at}post_attention_layernorm.weight": leaves["layers.0.ffn_norm.gain"],
        "model.embed_tokens.weight": leaves["embed"], "model.norm.weight": leaves["norm.gain"],
        "lm_head.weight": leaves["head"],
    }  # fmt: skip
    assert same(params_from_state(config, state, family.names), leaves)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"lm_head.w": np.zeros((50, 32))}, r"lm_head.w has shape \(50, 32\), expected \(32, 50\) for head"),
        ({"more": np.zeros(2)}, "parameter more is not one of this model"),
        (
            {"layers.1.attn.q_proj.w": None},
            r"layers.1.attn.q_proj.w is missing, .*\(32, 4, 8\) for layers.1.attention.q",
        ),
        ({"layers.0.attn.k_norm.w": np.zeros(7)}, r"k_norm.w has shape \(7,\), expected \(8,\)"),
    ],
)
def test_what_does_not_fit_has_the_trainers_name(change, said):
    state = tunix_llama(random_leaves(LLAMA)) | change
    with pytest.raises(ValueError, match=said):
        params_from_state(LLAMA, {path: x for path, x in state.items() if x is not None}, "tunix")


def test_unknown_trainers_and_parameters_without_a_name_are_refused():
    with pytest.raises(ValueError, match="names is 'torch', expected a table or one of tunix, maxtext"):
        params_from_state(LLAMA, {}, "torch")
    with pytest.raises(
        ValueError, match="parameter layers.0.attention_norm.gain of this model is not in the table"
    ):
        params_from_state(LLAMA, {}, {"embed": Stored("e", "V,D->VD")})
