"""Text models of Qwen3-VL's mixtures of experts (arXiv 2511.21631): Qwen 3's without windows, with all
experts in one tensor, inputs first. Positions are those of `qwen3_vl_text`."""

from ...model.config import ModelConfig
from . import fields, parts, qwen3_moe, qwen3_vl_text
from .family import Family
from .storage import Stored

EXPERTS = parts.LAYER + "mlp.experts."
NAMES = qwen3_moe.NAMES | {
    "layers.{}.ffn.experts.gate": Stored(EXPERTS + "gate_up_proj", "E,D,[F]->EDF"),
    "layers.{}.ffn.experts.up": Stored(EXPERTS + "gate_up_proj", "E,D,[F]->EDF"),
    "layers.{}.ffn.experts.down": Stored(EXPERTS + "down_proj", "E,F,D->EFD"),
}
DEFAULTS = qwen3_vl_text.DEFAULTS | {
    "num_key_value_heads": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "tie_word_embeddings": True,
}
FIXED = {"use_sliding_window": False, "layer_types": None, "norm_topk_prob": True}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    Qwen3VLMoeTextConfig."""
    count = fields.expert_count(raw, "num_experts", fields.expert_count(raw, "num_local_experts", 60))
    return qwen3_moe.parse_config({**DEFAULTS, **raw, **FIXED, "num_experts": count})


FAMILY = Family(parse_config, NAMES)
