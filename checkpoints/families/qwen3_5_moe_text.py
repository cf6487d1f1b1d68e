"""The text's model of Qwen 3.5's and 3.6's mixtures of experts, which lie in one tensor for each projection,
or, in folders of 8-bit floats and those that transformers saves, in one for each expert."""

from ...model.config import ModelConfig
from . import fields, parts, qwen2_moe, qwen3_5_text, qwen3_moe, qwen3_next
from .family import Family
from .stored import Stored

EXPERTS = parts.LAYER + "mlp.experts."
TOGETHER = {
    "layers.{}.ffn.experts.gate": Stored(EXPERTS + "gate_up_proj", "E,[F],D->EDF"),
    "layers.{}.ffn.experts.up": Stored(EXPERTS + "gate_up_proj", "E,[F],D->EDF"),
    "layers.{}.ffn.experts.down": Stored(EXPERTS + "down_proj", "E,[D],F->EFD"),
}
DEFAULTS = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
ALWAYS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Qwen3_5MoeTextConfig."""
    fields.only(raw, "attn_output_gate", True)
    shared = fields.integer(raw, "shared_expert_intermediate_size", 512)
    stated = DEFAULTS | qwen2_moe.given(raw) | ALWAYS
    ffns = [qwen2_moe.with_shared(ffn, shared) for ffn in qwen3_moe.ffns(stated)]
    return qwen3_next.decoder(raw, ffns)


NAMES = qwen3_next.OTHERS | qwen3_5_text.PROJECTIONS | qwen2_moe.SHARED | qwen3_next.EXPERTS | TOGETHER
FAMILY = Family(config, NAMES, qwen3_next.IGNORED, also=qwen3_next.EXPERTS)
