"""DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3 with an indexer, which chooses the keys that a query sees.
Layers that predict several tokens ahead are left out."""

from dataclasses import replace

from ...model.config import Dense, Experts, LayerKind, ModelConfig
from ...model.kinds import Indexer
from . import deepseek, deepseek_v3, fields, parts
from .family import Family
from .storage import Stored

INDEXER = deepseek.ATTENTION + "indexer."
NAMES = {path: stored for path, stored in deepseek.NAMES.items() if path != "layers.{}.attention.q"}
NAMES |= {
    "layers.{}.attention.indexer.q_up": Stored(INDEXER + "wq_b.weight", "NH,Q->QNH"),
    "layers.{}.attention.indexer.k_down": Stored(INDEXER + "wk.weight", "H,D->DH"),
    "layers.{}.attention.indexer.k_norm.gain": Stored(INDEXER + "k_norm.weight", "H->H"),
    "layers.{}.attention.indexer.k_norm.bias": Stored(INDEXER + "k_norm.bias", "H->H"),
    "layers.{}.attention.indexer.weigh": Stored(INDEXER + "weights_proj.weight", "N,D->DN"),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    DeepseekV32Config."""
    fields.allow_only(raw, "scoring_func", "sigmoid")
    fields.allow_only(raw, "rope_interleave", True)
    fields.layer_types(raw, ["indexed_attention"] * parts.num_layers(raw), ("indexed_attention",))
    attention = deepseek.latent_attention_config(raw, 163840, interleaved=True)
    if attention.query_rank is None:
        raise ValueError(
            "q_lora_rank is null, expected a positive integer: the indexer's queries are made of it"
        )
    attention = replace(attention, indexer=indexer_config(raw, attention.rope_size))
    layers = [LayerKind(attention, ffn) for ffn in ffn_configs(raw)]
    return parts.model_config(raw, layers, max_position=163840, norm=parts.rms_norm_config(raw))


def indexer_config(raw: fields.Raw, rope_size: int) -> Indexer:
    """Return the indexer; `rope_size` dimensions of its heads are rotated, as in the attention's heads."""
    size = fields.integer(raw, "index_head_dim", 128)
    if size < rope_size:
        raise ValueError(f"index_head_dim is {size}, expected qk_rope_head_dim {rope_size} or more")
    heads, keys = fields.integer(raw, "index_n_heads", 64), fields.integer(raw, "index_topk", 2048)
    return Indexer(heads, size, keys)


def ffn_configs(raw: fields.Raw) -> list[Dense | Experts]:
    """Return each layer's feed-forward layer, by `mlp_layer_types`, or else as in DeepSeek-V3."""
    experts = deepseek.corrected_experts_config(raw, deepseek_v3.EXPERTS)
    default_types = [
        "sparse" if isinstance(ffn, Experts) else "dense"
        for ffn in deepseek.ffn_configs(raw, experts, dense=3)
    ]
    kinds = fields.layer_types(raw, default_types, ("dense", "sparse"), "mlp_layer_types")
    return [experts if kind == "sparse" else parts.dense_ffn_config(raw) for kind in kinds]


FAMILY = Family(parse_config, NAMES | deepseek.CORRECTION, parts.MTP_LAYERS)
