"""Fields of `config.json` that tests of families without experts give: sizes that no released model has."""

from typing import Any

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.2],
    "long_factor": [1.0, 2.0, 3.5, 5.0],
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8, "rope_scaling": YARN | {"beta_fast": 8}, "tie_word_embeddings": True},
    "llama biases": {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "mistral": {"num_key_value_heads": 5, "sliding_window": 7, "rope_theta": 500.0},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {
        "head_dim": 14,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 3, "factor": 5.0}
        | {"original_max_position_embeddings": 24},
    },
    "gemma2": {"head_dim": 12, "num_hidden_layers": 5, "sliding_window": 4, "attn_logit_softcapping": None},
    "gemma2 untied": {
        "model_type": "gemma2",
        "tie_word_embeddings": False,
        "num_key_value_heads": 5,
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": None,
        "hidden_activation": "gelu",
        "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": 9,
        "head_dim": 6,
    },
    "gemma3_text": {
        "head_dim": 12,
        "num_hidden_layers": 5,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "sliding_window": 5,
        "query_pre_attn_scalar": 10,
        "final_logit_softcapping": 6.0,
        "rope_local_base_freq": 50.0,
        "rope_theta": 3000.0,
    },
    "phi3": {
        "partial_rotary_factor": 0.8,
        "head_dim": 10,
        "hidden_size": 50,
        "sliding_window": 11,
        "original_max_position_embeddings": 17,
        "rope_scaling": LONG,
    },
    "phi3 plain": {"model_type": "phi3", "num_key_value_heads": 5, "tie_word_embeddings": True},
    "gpt2": {"n_embd": 30, "n_head": 5, "n_layer": 3, "n_positions": 64, "n_inner": 41},
    "gpt2 untied": {
        "model_type": "gpt2",
        "n_embd": 24,
        "n_head": 3,
        "n_layer": 2,
        "n_positions": 64,
        "activation_function": "relu",
        "scale_attn_weights": False,
        "layer_norm_epsilon": 1e-3,
        "tie_word_embeddings": False,
    },
}
