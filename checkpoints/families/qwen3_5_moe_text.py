"""Text model of Qwen 3.5's and 3.6's mixtures of experts. A projection of all experts is one tensor. Folders
in 8-bit floats have a tensor for each expert, as do folders that transformers saves."""

from ...model.config import ModelConfig
from . import fields, parts, qwen2_moe, qwen3_5_text, qwen3_moe, qwen3_next
from .family import Family
from .storage import Stored

EXPERTS = parts.LAYER + "mlp.experts."
STACKED_EXPERTS = {
    "layers.{}.ffn.experts.gate": Stored(EXPERTS + "gate_up_proj", "E,[F],D->EDF"),
    "layers.{}.ffn.experts.up": Stored(EXPERTS + "gate_up_proj", "E,[F],D->EDF"),
    "layers.{}.ffn.experts.down": Stored(EXPERTS + "down_proj", "E,[D],F->EFD"),
}
DEFAULTS = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
FIXED_FIELDS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    Qwen3_5MoeTextConfig."""
    fields.allow_only(raw, "attn_output_gate", True)
    shared = fields.integer(raw, "shared_expert_intermediate_size", 512)
    stated = DEFAULTS | qwen2_moe.drop_nulls(raw) | FIXED_FIELDS
    ffns = [qwen2_moe.with_shared_expert(ffn, shared) for ffn in qwen3_moe.ffn_configs(stated)]
    return qwen3_next.model_config(raw, ffns)


NAMES = (
    qwen3_next.COMMON_NAMES
    | qwen3_5_text.PROJECTIONS
    | qwen2_moe.SHARED
    | qwen3_next.EXPERTS
    | STACKED_EXPERTS
)
FAMILY = Family(parse_config, NAMES, qwen3_next.IGNORED, alternative_names=qwen3_next.EXPERTS)
