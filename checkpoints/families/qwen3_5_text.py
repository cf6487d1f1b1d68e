"""Text model of Qwen 3.5 and 3.6: Qwen3-Next with separate projections, and without experts."""

from ...model.config import ModelConfig
from . import fields, parts, qwen3_next
from .family import Family
from .storage import Stored

LINEAR = qwen3_next.LINEAR
PROJECTIONS = {
    "layers.{}.recurrent.q": Stored(LINEAR + "in_proj_qkv.weight", "[KH],D->DKH"),
    "layers.{}.recurrent.k": Stored(LINEAR + "in_proj_qkv.weight", "[KH],D->DKH"),
    "layers.{}.recurrent.v": Stored(LINEAR + "in_proj_qkv.weight", "[KGU],D->DKGU"),
    "layers.{}.recurrent.gate": Stored(LINEAR + "in_proj_z.weight", "KGU,D->DKGU"),
    "layers.{}.recurrent.rate": Stored(LINEAR + "in_proj_b.weight", "KG,D->DKG"),
    "layers.{}.recurrent.decay": Stored(LINEAR + "in_proj_a.weight", "KG,D->DKG"),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    Qwen3_5TextConfig."""
    fields.allow_only(raw, "attn_output_gate", True)
    return qwen3_next.model_config(raw, [parts.dense_ffn_config(raw)] * parts.num_layers(raw), kv_heads=4)


FAMILY = Family(parse_config, qwen3_next.COMMON_NAMES | PROJECTIONS | parts.FFN, qwen3_next.IGNORED)
