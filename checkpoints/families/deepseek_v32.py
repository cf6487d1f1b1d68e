"""DeepSeek-V3.2 (arXiv 2512.02556): DeepSeek-V3 whose queries see those keys only that an indexer chooses;
layers that predict several tokens ahead are left out."""

from dataclasses import replace

from ...model.config import Dense, Experts, LayerKind, ModelConfig
from ...model.kinds import Indexer
from . import deepseek, deepseek_v3, fields, parts
from .family import Family
from .stored import Stored

INDEXER = deepseek.ATTENTION + "indexer."
NAMES = {path: stored for path, stored in deepseek.NAMES.items() if path != "layers.{}.attention.q"}
NAMES |= {
    "layers.{}.attention.indexer.q_up": Stored(INDEXER + "wq_b.weight", "NH,Q->QNH"),
    "layers.{}.attention.indexer.k_down": Stored(INDEXER + "wk.weight", "H,D->DH"),
    "layers.{}.attention.indexer.k_norm.gain": Stored(INDEXER + "k_norm.weight", "H->H"),
    "layers.{}.attention.indexer.k_norm.bias": Stored(INDEXER + "k_norm.bias", "H->H"),
    "layers.{}.attention.indexer.weigh": Stored(INDEXER + "weights_proj.weight", "N,D->DN"),
}


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' DeepseekV32Config."""
    fields.only(raw, "scoring_func", "sigmoid")
    fields.only(raw, "rope_interleave", True)
    fields.layer_types(raw, ["indexed_attention"] * parts.num_layers(raw), ("indexed_attention",))
    attention = deepseek.latent(raw, 163840, interleaved=True)
    if attention.query_rank is None:
        raise ValueError(
            "q_lora_rank is null, expected a positive integer: the indexer's queries are made of it"
        )
    attention = replace(attention, indexer=indexer(raw, attention.rope_size))
    layers = [LayerKind(attention, ffn) for ffn in ffns(raw)]
    return parts.decoder(raw, layers, max_position=163840, norm=parts.rms(raw))


def indexer(raw: fields.Raw, turned: int) -> Indexer:
    """The indexer, whose heads rotate as many dimensions as the attention's heads: `turned`."""
    size = fields.integer(raw, "index_head_dim", 128)
    if size < turned:
        raise ValueError(f"index_head_dim is {size}, expected qk_rope_head_dim {turned} or more")
    heads, keys = fields.integer(raw, "index_n_heads", 64), fields.integer(raw, "index_topk", 2048)
    return Indexer(heads, size, keys)


def ffns(raw: fields.Raw) -> list[Dense | Experts]:
    """By `mlp_layer_types`, or else as in DeepSeek-V3."""
    experts = deepseek.corrected_experts(raw, deepseek_v3.EXPERTS)
    plain = [
        "sparse" if isinstance(ffn, Experts) else "dense" for ffn in deepseek.ffns(raw, experts, dense=3)
    ]
    kinds = fields.layer_types(raw, plain, ("dense", "sparse"), "mlp_layer_types")
    return [experts if kind == "sparse" else parts.dense(raw) for kind in kinds]


FAMILY = Family(config, NAMES | deepseek.CORRECTION, parts.IGNORED + parts.BEYOND)
