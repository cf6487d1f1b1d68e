"""Names of parameters in the trees of trainers, and the order of their axes, by our path.

Sources: Tunix 0.1.7 (`tunix.models`), MaxText (`param_mapping.py` and `layers/` of AI-Hypercomputer/maxtext)
and Levanter (`to_torch_compatible_state_dict` of haliax). Of alternatives a state has one. `[1]` is an axis
along which parameters are stacked: queries, keys and values, or all layers of a scan.
"""

from collections.abc import Mapping

from . import parts
from .storage import Stored

Alternatives = Stored | tuple[Stored, ...]

TUNIX: Mapping[str, Alternatives] = {
    "embed": Stored("embedder.input_embedding", "V,D->VD"),
    "norm.gain": (Stored("final_norm.w", "D->D"), Stored("final_norm.scale", "D->D")),
    "head": Stored("lm_head.w", "D,V->VD"),
    "layers.{}.attention_norm.gain": (
        Stored("layers.{}.input_layernorm.w", "D->D"),
        Stored("layers.{}.pre_attention_norm.scale", "D->D"),
    ),
    "layers.{}.attention_post_norm.gain": (
        Stored("layers.{}.post_attn_norm.scale", "D->D"),  # Gemma 2
        Stored("layers.{}.post_attention_norm.scale", "D->D"),  # Gemma 3
    ),
    "layers.{}.ffn_norm.gain": (
        Stored("layers.{}.post_attention_layernorm.w", "D->D"),
        Stored("layers.{}.pre_ffw_norm.scale", "D->D"),
    ),
    "layers.{}.ffn_post_norm.gain": Stored("layers.{}.post_ffw_norm.scale", "D->D"),
    "layers.{}.attention.q": (
        Stored("layers.{}.attn.q_proj.w", "D,N,H->DNH"),
        Stored("layers.{}.attn.q_einsum.w", "N,D,H->DNH"),
        Stored("layers.{}.attn.qkv_einsum.w", "[1],N,D,H->DNH"),  # as many heads of keys as of queries
    ),
    "layers.{}.attention.k": (
        Stored("layers.{}.attn.k_proj.w", "D,K,H->DKH"),
        Stored("layers.{}.attn.kv_einsum.w", "[1],K,D,H->DKH"),
        Stored("layers.{}.attn.qkv_einsum.w", "[1],K,D,H->DKH"),
    ),
    "layers.{}.attention.v": (
        Stored("layers.{}.attn.v_proj.w", "D,K,H->DKH"),
        Stored("layers.{}.attn.kv_einsum.w", "[1],K,D,H->DKH"),
        Stored("layers.{}.attn.qkv_einsum.w", "[1],K,D,H->DKH"),
    ),
    "layers.{}.attention.o": (
        Stored("layers.{}.attn.o_proj.w", "N,H,D->NHD"),
        Stored("layers.{}.attn.attn_vec_einsum.w", "N,H,D->NHD"),
    ),
    "layers.{}.attention.q_bias": Stored("layers.{}.attn.q_bias", "NH->NH"),
    "layers.{}.attention.k_bias": Stored("layers.{}.attn.k_bias", "KH->KH"),
    "layers.{}.attention.v_bias": Stored("layers.{}.attn.v_bias", "KH->KH"),
    "layers.{}.attention.q_norm": (
        Stored("layers.{}.attn.q_norm.w", "H->H"),
        Stored("layers.{}.attn._query_norm.scale", "H->H"),
    ),
    "layers.{}.attention.k_norm": (
        Stored("layers.{}.attn.k_norm.w", "H->H"),
        Stored("layers.{}.attn._key_norm.scale", "H->H"),
    ),
    "layers.{}.ffn.gate": Stored("layers.{}.mlp.gate_proj.kernel", "D,F->DF"),
    "layers.{}.ffn.up": Stored("layers.{}.mlp.up_proj.kernel", "D,F->DF"),
    "layers.{}.ffn.down": Stored("layers.{}.mlp.down_proj.kernel", "F,D->FD"),
    "layers.{}.ffn.router": Stored("layers.{}.mlp.router.kernel", "D,E->DE"),
    "layers.{}.ffn.experts.gate": Stored("layers.{}.mlp.gate_proj", "E,D,F->EDF"),
    "layers.{}.ffn.experts.up": Stored("layers.{}.mlp.up_proj", "E,D,F->EDF"),
    "layers.{}.ffn.experts.down": Stored("layers.{}.mlp.down_proj", "E,F,D->EFD"),
}

MAXTEXT_OUTER = {
    "embed": Stored("token_embedder.embedding", "V,D->VD"),
    "norm.gain": Stored("decoder.decoder_norm.scale", "D->D"),
    "head": Stored("decoder.logits_dense.kernel", "D,V->VD"),
}
MAXTEXT_LAYER = {  # their path, and the letters of axes, which lie as ours
    "attention_norm.gain": ("pre_self_attention_layer_norm.scale", "D"),
    "ffn_norm.gain": ("post_self_attention_layer_norm.scale", "D"),
    "attention.q": ("self_attention.query.kernel", "DNH"),
    "attention.k": ("self_attention.key.kernel", "DKH"),
    "attention.v": ("self_attention.value.kernel", "DKH"),
    "attention.o": ("self_attention.out.kernel", "NHD"),
    "attention.q_bias": ("self_attention.query.bias", "NH"),
    "attention.k_bias": ("self_attention.key.bias", "KH"),
    "attention.v_bias": ("self_attention.value.bias", "KH"),
    "attention.q_norm": ("self_attention.query_norm.scale", "H"),
    "attention.k_norm": ("self_attention.key_norm.scale", "H"),
    "ffn.gate": ("mlp.wi_0.kernel", "DF"),
    "ffn.up": ("mlp.wi_1.kernel", "DF"),
    "ffn.down": ("mlp.wo.kernel", "FD"),
    "ffn.router": ("moe_block.gate.kernel", "DE"),
    "ffn.experts.gate": ("moe_block.wi_0", "EDF"),
    "ffn.experts.up": ("moe_block.wi_1", "EDF"),
    "ffn.experts.down": ("moe_block.wo", "EFD"),
}
# Llama, Mistral, Qwen 2 and 3: layers that are scanned with `param_scan_axis` 1, or one by one.
MAXTEXT: Mapping[str, Alternatives] = MAXTEXT_OUTER | {
    f"layers.{{}}.{ours}": (
        Stored(f"decoder.layers.{theirs}", f"{','.join((axes[0], '[1]', *axes[1:]))}->{axes}"),
        Stored(f"decoder.layers_{{}}.{theirs}", f"{','.join(axes)}->{axes}"),
    )
    for ours, (theirs, axes) in MAXTEXT_LAYER.items()
}

LEVANTER: Mapping[str, Alternatives] = parts.LLAMA | parts.QK_NORMS | parts.BIASES | parts.FFN_BIASES

TRAINERS = {"tunix": TUNIX, "maxtext": MAXTEXT, "levanter": LEVANTER}
