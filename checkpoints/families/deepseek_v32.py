"""DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3 with an indexer, which chooses the keys that a query sees.
Layers that predict several tokens ahead are left out."""

from dataclasses import replace

from ...model.config import Latent, LayerKind, ModelConfig
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
    experts = deepseek.corrected_experts_config(raw, deepseek_v3.EXPERTS)
    attention = deepseek.latent_attention_config(raw, 163840, interleaved=True)
    attention = indexed_attention_config(raw, attention, heads=64, interleaved=False)
    layers = [LayerKind(attention, ffn) for ffn in deepseek.listed_ffn_configs(raw, experts, dense=3)]
    return parts.model_config(raw, layers, max_position=163840, norm=parts.rms_norm_config(raw))


def indexed_attention_config(raw: fields.Raw, latent: Latent, heads: int, interleaved: bool) -> Latent:
    """Return latent attention with an indexer; `heads` is the default of `index_n_heads`.

    As many dimensions of the indexer's heads are rotated as of the attention's.
    """
    if latent.query_rank is None:
        raise ValueError(
            "q_lora_rank is null, expected a positive integer: the indexer's queries are made of it"
        )
    rope_size = latent.rope_size
    size = fields.integer(raw, "index_head_dim", 128)
    if size < rope_size:
        raise ValueError(f"index_head_dim is {size}, expected qk_rope_head_dim {rope_size} or more")
    heads, keys = fields.integer(raw, "index_n_heads", heads), fields.integer(raw, "index_topk", 2048)
    return replace(latent, indexer=Indexer(heads, size, keys, interleaved))


FAMILY = Family(parse_config, NAMES | deepseek.CORRECTION, parts.MTP_LAYERS)
