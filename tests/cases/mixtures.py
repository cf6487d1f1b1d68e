"""Fields of `config.json` that tests of families with experts give: sizes that no released model has."""

from typing import Any

from cases.dense import YARN

LATENT = {
    "num_key_value_heads": 5,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 10,
    "v_head_dim": 9,
    "moe_intermediate_size": 13,
    "rms_norm_eps": 1e-3,
    "attention_bias": True,
}
CASES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 6, "head_dim": 12},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 11,
        "mlp_only_layers": [0],
        "use_sliding_window": True,
        "sliding_window": 6,
        "tie_word_embeddings": True,
    },
    "qwen3_moe sparse": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 11,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "attention_bias": True,
    },
    "deepseek_v2": LATENT
    | {
        "q_lora_rank": 12,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 3,
        "topk_group": 2,
        "topk_method": "group_limited_greedy",
        "first_k_dense_replace": 2,
        "routed_scaling_factor": 1.7,
        "n_shared_experts": 1,
    },
    "deepseek_v2 lite": LATENT
    | {
        "model_type": "deepseek_v2",
        "attention_bias": False,
        "q_lora_rank": None,
        "n_routed_experts": 5,
        "num_experts_per_tok": 3,
        "rope_scaling": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5},
    },
    "deepseek_v3": LATENT
    | {
        "q_lora_rank": 12,
        "n_routed_experts": 12,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 3,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "tie_word_embeddings": True,
        "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    },
    "deepseek_v3 halves": LATENT
    | {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "rope_interleave": False,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
    },
    "gpt_oss": {
        "head_dim": 12,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "sliding_window": 6,
        "swiglu_limit": 1.5,
    },
    "gpt_oss plain": {
        "model_type": "gpt_oss",
        "head_dim": 6,
        "attention_bias": False,
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention", "full_attention", "sliding_attention"],
        "rope_scaling": YARN | {"truncate": True, "attention_factor": 1.3},
    },
}
