"""Nemotron-H and Nemotron 3 (NVIDIA, arXiv 2504.03624 and 2512.20856): most mixers are Mamba-2 (arXiv
2405.21060), the others attention without a rope. Feed-forward layers and experts have no gate.

A file counts a mixer and a feed-forward layer as two blocks. A mixer need not have a feed-forward layer.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...model.config import Activation, Dense, Experts, GroupedQuery, LayerKind, ModelConfig, NormKind
from ...model.recurrent.kinds import Mamba
from ...refusals import quote
from . import deepseek, fields, mamba2, parts
from .family import Family
from .storage import Stored

MIXER, FFN = "backbone.layers.{mixer}.", "backbone.layers.{ffn}."
NAMES = (
    mamba2.mixer_names(MIXER + "mixer.")
    | parts.plain_ffn_names("mixer.up_proj", "mixer.down_proj", FFN)
    | {
        "embed": Stored("backbone.embeddings.weight", "V,D->VD"),
        "norm.gain": Stored("backbone.norm_f.weight", "D->D"),
        "head": Stored("lm_head.weight", "V,D->VD"),
        "layers.{}.attention_norm.gain": Stored(MIXER + "norm.weight", "D->D"),
        "layers.{}.attention.q": Stored(MIXER + "mixer.q_proj.weight", "NH,D->DNH"),
        "layers.{}.attention.k": Stored(MIXER + "mixer.k_proj.weight", "KH,D->DKH"),
        "layers.{}.attention.v": Stored(MIXER + "mixer.v_proj.weight", "KH,D->DKH"),
        "layers.{}.attention.o": Stored(MIXER + "mixer.o_proj.weight", "D,NH->NHD"),
        "layers.{}.ffn_norm.gain": Stored(FFN + "norm.weight", "D->D"),
        "layers.{}.ffn.router": Stored(FFN + "mixer.gate.weight", "E,D->DE"),
        "layers.{}.ffn.correction": Stored(FFN + "mixer.gate.e_score_correction_bias", "E->E"),
        "layers.{}.ffn.experts.up": Stored(FFN + "mixer.experts.{}.up_proj.weight", "F,D->EDF"),
        "layers.{}.ffn.experts.down": Stored(FFN + "mixer.experts.{}.down_proj.weight", "D,F->EFD"),
        "layers.{}.ffn.shared.up": Stored(FFN + "mixer.shared_experts.up_proj.weight", "F,D->DF"),
        "layers.{}.ffn.shared.down": Stored(FFN + "mixer.shared_experts.down_proj.weight", "D,F->FD"),
    }
)
LETTERS = {"M": "M", "*": "*", "-": "-", "E": "E"}  # of `hybrid_override_pattern`
BLOCK_TYPES = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
DEFAULT_TYPES = ["linear_attention", "moe", "full_attention", "mlp"]
LAYER_PATTERN = "[M*][-E]?"  # a mixer, and the feed-forward layer after it
EXPERTS = {
    "moe_intermediate_size": 7688,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' NemotronHConfig."""
    fields.allow_only(raw, "tie_word_embeddings", False)
    fields.allow_only(raw, "sliding_window")
    pattern = block_pattern(raw)
    kinds: Any = {letter: BLOCK_READERS[letter](raw) for letter in set(pattern)}
    layers = [
        LayerKind(kinds[layer[0]], kinds.get(layer[1:])) for layer in re.findall(LAYER_PATTERN, pattern)
    ]
    return parts.model_config(raw, layers, max_position=4096, norm=NormKind(eps=norm_eps(raw)))


def block_pattern(raw: fields.Raw) -> str:
    """Return the blocks, a letter each: Mamba-2 "M", attention "*", feed-forward layer "-", experts "E"."""
    name = fields.present_name(raw, "layers_block_type", "layer_types", "hybrid_override_pattern")
    stated = fields.value(raw, name, DEFAULT_TYPES)
    kind, known = (str, LETTERS) if name == "hybrid_override_pattern" else (list, BLOCK_TYPES)
    if not isinstance(stated, kind) or not 0 < len(stated) <= fields.MAX_LAYERS:
        raise ValueError(f"{name} is {quote(stated)}, expected the kinds of 1 to {fields.MAX_LAYERS} blocks")
    pattern = "".join(fields.enum_value({name: block}, name, "", known) for block in stated)
    if not re.fullmatch(f"({LAYER_PATTERN})+", pattern):
        raise ValueError(
            f"{name} is {quote(stated)}, which is not supported: "
            "expected a mixer before each feed-forward layer"
        )
    return pattern


def norm_eps(raw: fields.Raw) -> float:
    """Return the number that all norms add to the mean square."""
    return fields.number(raw, "layer_norm_epsilon", 1e-5)


def mamba_config(raw: fields.Raw) -> Mamba:
    """Return the Mamba-2 mixer. Older files have other names of some fields.

    Only the smallest time step is limited, as in a prefill of transformers; `time_step_limit` has no effect.
    """
    heads, size = fields.integer(raw, "mamba_num_heads", 128), fields.integer(raw, "mamba_head_dim", 64)
    shortest = fields.number(raw, fields.present_name(raw, "mamba_dt_min", "time_step_min"), 0.001)
    fields.allow_only(raw, "mamba_hidden_act", "silu", "swish")
    groups = fields.integer(raw, fields.present_name(raw, "mamba_n_groups", "n_groups"), 8)
    bias = fields.flag(raw, "use_bias", False)
    limits = {"time_step_limit": [shortest, float("inf")]}
    return Mamba(
        **mamba2.mixer_sizes(limits, heads * size, heads, groups, size),
        key_size=fields.integer(raw, "ssm_state_size", 128),
        kernel=fields.integer(raw, fields.present_name(raw, "mamba_d_conv", "conv_kernel"), 4),
        conv_bias=fields.flag(raw, fields.present_name(raw, "mamba_conv_bias", "use_conv_bias"), True),
        bias=bias,
        output_bias=bias,
        eps=norm_eps(raw),
    )


def attention_config(raw: fields.Raw) -> GroupedQuery:
    """Return attention without a rope."""
    return parts.grouped_query_config(raw, None, fields.integer(raw, "head_dim", 128), kv_heads=8)


def ffn_activation(raw: fields.Raw) -> Activation:
    """Return the activation of feed-forward layers and experts."""
    return fields.activation(raw, "mlp_hidden_act", "relu2")


def ffn_config(raw: fields.Raw) -> Dense:
    """Return the feed-forward layer."""
    bias = fields.flag(raw, "mlp_bias", False)
    return parts.dense_ffn_config(raw, ffn_activation(raw), gated=False, bias=bias)


def experts_config(raw: fields.Raw) -> Experts:
    """Return experts, chosen as in DeepSeek-V3, with a shared expert of its own size."""
    for name, allowed in {"moe_latent_size": None, "mlp_bias": False, "n_shared_experts": 1}.items():
        fields.allow_only(raw, name, allowed)
    shared = fields.integer(raw, "moe_shared_expert_intermediate_size", 7688)
    chosen = deepseek.corrected_experts_config({**raw, "hidden_act": None}, EXPERTS)
    return replace(chosen, activation=ffn_activation(raw), gated=False, shared=shared)


BLOCK_READERS: Mapping[str, Callable[[fields.Raw], Mamba | GroupedQuery | Dense | Experts]] = {
    "M": mamba_config,
    "*": attention_config,
    "-": ffn_config,
    "E": experts_config,
}
FAMILY = Family(parse_config, NAMES, (r"mtp\..*",))
