"""Fields of `config.json` that tests of families with experts and latent attention give: sizes that no
released model has."""

from typing import Any

from cases.families.dense import YARN

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
    "deepseek_v32": LATENT
    | {
        "q_lora_rank": 12,
        "index_n_heads": 7,
        "index_head_dim": 15,
        "index_topk": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "tie_word_embeddings": True,
        "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    },
    "deepseek_v32 few": LATENT
    | {
        "model_type": "deepseek_v32",
        "attention_bias": False,
        "q_lora_rank": 13,
        "index_n_heads": 9,
        "index_head_dim": 10,
        "index_topk": 9,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.7,
    },
    "kimi_k2": LATENT
    | {
        "q_lora_rank": 12,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
        "rope_theta": 5e4,
        "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 1.0, "beta_slow": 1.0},
    },
    "kimi_k2 halves": LATENT
    | {
        "model_type": "kimi_k2",
        "q_lora_rank": None,
        "rope_interleave": False,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 2,
        "norm_topk_prob": False,
    },
    "glm4_moe_lite": LATENT
    | {
        "q_lora_rank": 12,
        "n_routed_experts": 12,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 3,
        "n_shared_experts": 2,
        "tie_word_embeddings": True,
        "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    },
    "glm4_moe_lite halves": LATENT
    | {
        "model_type": "glm4_moe_lite",
        "attention_bias": False,
        "q_lora_rank": None,
        "rope_interleave": False,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["sparse", "dense", "sparse"],
        "norm_topk_prob": False,
        "routed_scaling_factor": 2.7,
    },
    "sarvam_mla": LATENT
    | {
        "q_lora_rank": 12,
        "num_experts": 12,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 3,
        "num_shared_experts": 2,
        "tie_word_embeddings": True,
        "rope_scaling": YARN | {"type": "deepseek_yarn", "mscale": 0.7, "mscale_all_dim": 1.2},
    },
    "sarvam_mla plain": LATENT
    | {
        "model_type": "sarvam_mla",
        "attention_bias": False,
        "num_key_value_heads": None,
        "n_routed_experts": 5,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 0,
    },
    "axk1": LATENT
    | {
        "q_lora_rank": 12,
        "n_routed_experts": 12,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 3,
        "n_shared_experts": 2,
        "first_k_dense_replace": 2,
        "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    },
    "glm_moe_dsa": LATENT
    | {
        "q_lora_rank": 12,
        "index_n_heads": 7,
        "index_head_dim": 15,
        "index_topk": 6,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "n_shared_experts": 2,
        "rope_scaling": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2},
    },
}
