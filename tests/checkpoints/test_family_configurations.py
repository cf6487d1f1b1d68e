"""What single fields of a family's configuration mean, and which are refused by field and value."""

import json
import re

import pytest
from cases.families.dense import LONG, YARN
from cases.families.golden import hub_config
from cases.families.reading import attention, config_of, ffn, windows

from duetto.checkpoints.huggingface import read_config
from duetto.checkpoints.tensors import CheckpointError
from duetto.model.config import Dense, Experts, GroupedQuery


def test_windows_by_layer():
    assert windows(config_of("mistral", sliding_window="absent")) == [4096] * 3
    assert windows(config_of("mistral", sliding_window=None)) == [None] * 3
    assert windows(config_of("qwen2", use_sliding_window=False)) == [None] * 3
    assert windows(config_of("qwen2", max_window_layers=2)) == [None, None, 5]
    assert windows(config_of("qwen2", max_window_layers="absent")) == [None] * 3
    assert windows(config_of("qwen3_moe", use_sliding_window=False)) == [None] * 3
    assert windows(config_of("gemma2", sliding_window="absent")) == [4096, None, 4096, None, 4096]
    assert windows(config_of("gemma3_text", sliding_window_pattern="absent", num_hidden_layers=7)) == [
        *[5] * 5,
        None,
        5,
    ]
    assert windows(config_of("gpt_oss", sliding_window="absent")) == [128, None, 128]
    assert windows(config_of("smollm3", use_sliding_window=False)) == [None] * 3
    assert windows(config_of("dots1")) == [None, None, 5]
    assert windows(config_of("dots1", sliding_window=None)) == [None] * 3
    assert windows(config_of("starcoder2", sliding_window="absent")) == [None] * 3
    assert windows(config_of("cohere2", sliding_window_pattern="absent")) == [5, 5, 5, None, 5]
    assert windows(config_of("exaone4", sliding_window_pattern=3)) == [5, 5, None, 5, 5]
    assert windows(config_of("exaone4", sliding_window=None, sliding_window_pattern=None)) == [None] * 5


def test_mixtures_by_layer():
    def mixed(kind: str, **fields) -> list[bool]:
        return [isinstance(layer.ffn, Experts) for layer in config_of(kind, **fields).layers]

    assert mixed("qwen3_moe", mlp_only_layers=None) == [True] * 3
    assert mixed("qwen3_moe", mlp_only_layers=[2], decoder_sparse_step=3) == [False] * 3
    assert mixed("qwen3_moe", mlp_only_layers=[], decoder_sparse_step=3) == [False, False, True]
    assert mixed("deepseek_v2", first_k_dense_replace="absent") == [True] * 3
    assert mixed("deepseek_v3", first_k_dense_replace=0, moe_layer_freq=2) == [True, False, True]
    assert mixed("deepseek_v3", first_k_dense_replace="absent") == [False] * 3
    assert mixed("deepseek_v32", mlp_layer_types=["sparse", "dense", "dense"]) == [True, False, False]
    assert mixed("glm4_moe", first_k_dense_replace="absent") == [False, True, True]
    assert mixed("ernie4_5_moe") == [False, True, False, False, False]
    assert mixed("ernie4_5_moe", moe_layer_end_index="absent") == [False, True, False, True, False]
    assert mixed("ernie4_5_moe", moe_layer_end_index=4, moe_layer_interval="absent") == [False] + [True] * 4


def test_null_and_absence_differ_where_transformers_says_so():
    assert config_of("gemma2", final_logit_softcapping="absent").logit_softcap == 30.0
    assert config_of("gemma2", final_logit_softcapping=None).logit_softcap is None
    assert attention("deepseek_v2", q_lora_rank="absent").query_rank == 1536
    assert attention("deepseek_v2", q_lora_rank=None).query_rank is None
    eight = {"head_dim": 6, "num_attention_heads": 8}
    assert attention("mistral", num_key_value_heads="absent", **eight).num_kv_heads == 8
    assert attention("mistral", num_key_value_heads=None).num_kv_heads == 5
    assert attention("ernie4_5", head_dim="absent").head_size == 128
    assert attention("ernie4_5", head_dim=None).head_size == 6
    assert ffn("deepseek_v3", n_shared_experts=None).shared == 0
    assert ffn("gpt2", n_inner=None) == Dense(120, "gelu_tanh", gated=False, bias=True)


def test_partial_rotary_sizes_are_read():
    assert attention("glm", partial_rotary_factor="absent").rotary_dims == 6
    assert (
        attention("glm", rope_parameters={"partial_rotary_factor": 1}, rope_scaling=None).rotary_size is None
    )
    assert attention("glm4_moe", partial_rotary_factor="absent").rotary_dims == 6
    assert attention("minimax_m2", rotary_dim="absent").rotary_dims == 12
    assert attention("minimax_m2", partial_rotary_factor=0.5).rotary_dims == 6


def test_the_gelu_of_gemma_is_its_tanh_form():
    assert ffn("gemma", hidden_act="gelu").activation == ffn("gemma", hidden_act="absent").activation
    assert ffn("gemma", hidden_act="gelu_python").activation == "gelu"


def test_defaults_of_gpt_oss():
    config = config_of("gpt_oss", swiglu_limit="absent", head_dim="absent")
    mixer, ffn = config.layers[0].mixer, config.layers[0].ffn
    assert isinstance(mixer, GroupedQuery) and isinstance(ffn, Experts) and mixer.rope is not None
    assert (mixer.head_size, ffn.clamp, mixer.sinks) == (64, 7.0, True)
    assert (mixer.rope.kind, mixer.rope.factor, mixer.rope.theta, mixer.rope.truncate) == (
        "yarn",
        32.0,
        150000.0,
        False,
    )


def has_rope(kind: str, **fields) -> list[bool]:
    mixers = [layer.mixer for layer in config_of(kind, **fields).layers]
    return [isinstance(mixer, GroupedQuery) and mixer.rope is not None for mixer in mixers]


def test_layers_without_a_rope():
    assert has_rope("smollm3") == [False, True, False]
    assert has_rope("smollm3", no_rope_layers=[1, 1, 0, 0, 0]) == [True, True, False]
    assert has_rope("smollm3", no_rope_layers=None) == [True, False, True]
    assert has_rope("smollm3", no_rope_layers=None, no_rope_layer_interval="absent") == [True] * 3
    assert has_rope("cohere2") == has_rope("exaone4") == [True, False, True, False, True]
    assert has_rope("exaone4", sliding_window=None, layer_types=["full_attention"] * 5) == [True] * 5
    full = {"num_hidden_layers": 2, "sliding_window": None, "layer_types": ["full_attention"] * 2}
    assert has_rope("cohere2", **full) == [False] * 2


def test_rotary_sizes_are_rounded_down_to_even_numbers():
    assert attention("phi", partial_rotary_factor="absent", head_dim=12).rotary_dims == 6
    assert attention("phi", partial_rotary_factor=0.4, head_dim=16).rotary_dims == 6
    assert attention("stablelm", partial_rotary_factor="absent", num_attention_heads=4).rotary_dims == 2
    assert attention("gpt_neox", rotary_pct=1.0).rotary_size is None
    assert (
        attention("nemotron", rope_parameters={"partial_rotary_factor": 0.5}, rope_scaling=None).rotary_dims
        == 6
    )


def test_contexts_of_command_r_are_longer_than_its_positions():
    assert config_of("cohere").max_position == 200
    assert config_of("cohere", model_max_length="absent").max_position == 96


def test_internlm3_has_biases_by_two_flags():
    mixer, wide = attention("internlm3", bias=False), ffn("internlm3", bias=False)
    assert (mixer.bias, mixer.output_bias, wide.bias) == (True, False, False)
    assert attention("internlm3", head_dim="absent").head_size == 128
    assert attention("internlm3", head_dim=None).head_size == 6
    assert attention("internlm3", num_key_value_heads="absent", num_attention_heads=6).num_kv_heads == 2
    assert attention("internlm3").rope == attention("internlm3", rope_scaling=None).rope


def test_fields_of_families_after_gpt2_have_two_names():
    assert config_of("gptj", n_embd="absent", hidden_size=20).hidden_size == 20
    assert config_of("gptj", n_embd=40, hidden_size=20).hidden_size == 20
    assert config_of("falcon", n_embed=40).hidden_size == 40
    assert len(config_of("exaone", num_layers="absent").layers) == 3


def test_the_base_of_the_rope_of_dbrx():
    def base(**fields) -> float:
        return attention("dbrx", **fields).rope.theta

    assert base() == 300.0
    assert base(rope_theta="absent", attn_config={"rope_theta": 500.0}) == 500.0
    assert base(rope_theta="absent", attn_config="absent") == 10000.0


def test_heads_of_falcon():
    def kv_heads(**fields) -> int:
        return attention("falcon", **fields).num_kv_heads

    assert (kv_heads(), kv_heads(multi_query=False)) == (1, 5)
    assert kv_heads(new_decoder_architecture=True, parallel_attn=True) == 5
    assert kv_heads(new_decoder_architecture=True, parallel_attn=True, num_kv_heads=1) == 1


ROPED = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "deepseek_v2", "gpt_oss"),
    *("starcoder2", "arcee", "cohere", "cohere2", "exaone4"),
)
PARTLY = ("stablelm", "gpt_neox", "phi", "nemotron")


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        *(
            (kind, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'")
            for kind in ROPED + PARTLY
        ),
        *((kind, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5") for kind in ROPED),
        *((kind, {"hidden_act": "mish"}, "hidden_act is 'mish'") for kind in ("mistral", "qwen2", "phi3")),
        ("llama", {"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        (
            "llama",
            {"rope_scaling": YARN | {"rope_theta": 1}},
            "rope_scaling: rope_theta is 1.0, expected more than 1",
        ),
        ("llama", {"rope_scaling": YARN | {"truncate": 1}}, "truncate is 1"),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types is 'full_attention'"),
        (
            "mistral",
            {"num_key_value_heads": 2},
            "num_attention_heads 5 is not a multiple of num_key_value_heads 2",
        ),
        ("mixtral", {"num_experts_per_tok": 4}, "4 of 3 experts cannot be active"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts is 0"),
        *(
            (kind, {"num_local_experts": 10**6}, "num_local_experts is 1000000")
            for kind in ("mixtral", "gpt_oss")
        ),
        (
            "qwen3_moe",
            {"num_experts": 10**6},
            "num_experts is 1000000, expected a positive integer, at most 100000",
        ),
        ("deepseek_v3", {"n_routed_experts": 10**6}, "n_routed_experts is 1000000"),
        ("deepseek_v3", {"rope_scaling": YARN | {"mscale_all_dim": 1e300}}, "mscale_all_dim is 1e+300"),
        ("gpt2", {"n_layer": 10**5}, "n_layer is 100000"),
        ("qwen2", {"layer_types": ["full_attention"]}, "expected a list of 3"),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, "layer_types holds 'linear_attention'"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window is 1"),
        ("qwen3", {"use_sliding_window": False}, "there is no sliding_window"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma2", {"hidden_activation": "tanh"}, "hidden_activation is 'tanh'"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3_text", {"rope_parameters": {"rope_theta": 1.0}}, "expected objects for full_attention"),
        ("gemma3_text", {"rope_scaling": {"rope_type": "ntk"}}, "rope of full_attention: rope_type is 'ntk'"),
        ("gemma3_text", {"rope_scaling": {"factor": 2}}, "rope_scaling: rope_type is missing"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("gemma4_text", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6, expected layers of every"),
        ("gemma4_text", {"num_kv_shared_layers": 9}, "num_kv_shared_layers is 9, expected layers of every"),
        ("gemma4_text", {"per_layer_config": {"6": {"head_dim": 8}}}, "layer 6 has other heads than layer 2"),
        ("gemma4_text", {"per_layer_config": {"1": {"rms_norm_eps": 1}}}, "per_layer_config holds"),
        ("gemma4_text", {"per_layer_config": {"7": {}}}, "per_layer_config is {'7': {}}"),
        ("gemma4_text", {"vocab_size_per_layer_input": 52}, "vocab_size_per_layer_input is 52"),
        ("gemma4_text", {"rope_parameters": {"rope_theta": 1.0}}, "expected objects for the types of layers"),
        ("gemma4_text", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling is {"),
        ("gemma4_text", {"enable_moe_block": True}, "num_experts is missing"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 5}, "layer_types holds 'sliding_attention'"),
        ("llama4_text", {"attention_chunk_size": None}, "there is no attention_chunk_size"),
        ("llama4_text", {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning is 'yes'"),
        ("llama4_text", {"moe_layers": 3}, "moe_layers is 3, expected a list"),
        ("llama4_text", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("phi3", {"rope_scaling": {"factor": 2}}, "rope_scaling: rope_type is missing"),
        ("phi3", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type is 'linear'"),
        (
            "phi3",
            {"rope_scaling": LONG | {"long_factor": [1.0]}},
            "long_factor is [1.0], expected a list of 4",
        ),
        ("phi3", {"rope_scaling": LONG | {"short_factor": [1, 1, 1, 0]}}, "short_factor is 0"),
        ("phi3", {"rope_scaling": LONG | {"short_mscale": 1.1}}, "short_mscale is 1.1"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, expected at most 1"),
        ("phi3", {"attention_bias": True}, "attention_bias is True"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob is True"),
        ("deepseek_v2", {"mlp_bias": True}, "mlp_bias is True"),
        ("deepseek_v2", {"n_group": 4}, "6 experts are not a multiple of 4 groups"),
        ("deepseek_v2", {"topk_group": 4}, "4 of 3 groups"),
        ("deepseek_v2", {"num_experts_per_tok": "absent"}, "num_experts_per_tok is missing"),
        ("deepseek_v2", {"qk_rope_head_dim": 5}, "rope_size 5 is odd"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("deepseek_v3", {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank is null"),
        ("deepseek_v32", {"index_head_dim": 8}, "index_head_dim is 8, expected qk_rope_head_dim 10"),
        ("deepseek_v32", {"index_topk": 0}, "index_topk is 0"),
        ("deepseek_v32", {"rope_interleave": False}, "rope_interleave is False"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 3}, "layer_types holds 'full_attention'"),
        (
            "deepseek_v32",
            {"mlp_layer_types": ["dense"]},
            "mlp_layer_types is ['dense'], expected a list of 3",
        ),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha is 1.5"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("kimi_k2", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0], expected a list of 3"),
        ("smollm3", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers is [1, 0, 2]"),
        ("smollm3", {"layer_types": ["chunked_attention"] * 3}, "layer_types holds 'chunked_attention'"),
        ("smollm3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("glm", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, expected at most 1"),
        ("glm", {"head_dim": 10, "partial_rotary_factor": 0.5}, "rotary_size 5 is odd"),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("glm4_moe", {"topk_group": 4}, "4 of 3 groups"),
        ("glm4_moe", {"use_qk_norm": 1}, "use_qk_norm is 1"),
        ("ernie4_5", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias is True"),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}, "moe_norm_min is 0.1"),
        ("ernie4_5_moe", {"moe_layer_end_index": -2}, "moe_layer_end_index is -2"),
        ("ernie4_5_moe", {"moe_k": 6}, "6 of 5 experts cannot be active"),
        ("ernie4_5_moe", {"moe_intermediate_size": [13, 4]}, "moe_intermediate_size is [13, 4]"),
        ("seed_oss", {"attention_out_bias": 1}, "attention_out_bias is 1"),
        ("dots1", {"n_routed_experts": "absent"}, "n_routed_experts is missing"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("minimax_m2", {"rotary_dim": 14}, "rotary_dim is 14, expected a positive integer, at most 12"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1]}, "attn_type_list is [1, 0, 1]"),
        ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm is False"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "shared_intermediate_size is 8"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt2", {"activation_function": "mish"}, "activation_function is 'mish'"),
        ("gpt2", {"n_head": 4}, "n_embd 30 is not a multiple of n_head 4"),
        ("starcoder2", {"layer_types": ["full_attention"] * 3}, "layer_types is 'full_attention'"),
        ("starcoder2", {"use_bias": 1}, "use_bias is 1"),
        ("stablelm", {"head_dim": 12}, "head_dim is 12, which is not supported: expected 8"),
        ("stablelm", {"partial_rotary_factor": 0.7}, "rotary_size 5 is odd"),
        ("stablelm", {"partial_rotary_factor": 0.1}, "partial_rotary_factor is 0.1, too little of 8"),
        ("nemotron", {"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5, expected at most 1"),
        ("gpt_neox", {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ("gpt_neox", {"rotary_pct": 0}, "rotary_pct is 0"),
        ("gpt_neox", {"rotary_emb_base": "10000"}, "rotary_emb_base is '10000'"),
        ("gpt_neox", {"num_attention_heads": 4, "num_key_value_heads": None}, "50 is not a multiple of 4"),
        ("phi", {"qk_layernorm": True}, "qk_layernorm is True"),
        ("nemotron", {"norm_eps": 0}, "norm_eps is 0"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("olmoe", {"head_dim": 12}, "head_dim is 12, which is not supported: expected 6"),
        ("arcee", {"hidden_act": "xielu"}, "hidden_act is 'xielu'"),
        ("cohere", {"logit_scale": 0}, "logit_scale is 0"),
        ("cohere", {"model_max_length": 1e30}, "model_max_length is 1e+30"),
        ("cohere2", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("cohere2", {"rotary_pct": 0.5}, "rotary_pct is 0.5"),
        ("cohere2", {"sliding_window": None}, "there is no sliding_window"),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG'"),
        ("internlm3", {"rope_scaling": {"type": "ntk"}}, "rope_type is 'ntk'"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate is False"),
        ("kimi_linear", {"mla_use_nope": False}, "mla_use_nope is False"),
        ("kimi_linear", {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        (
            "qwen3_next",
            {"linear_num_key_heads": 4},
            "linear_num_value_heads 6 is not a multiple of linear_num_key_heads 4",
        ),
        ("kimi_linear", {"linear_attn_config": {"rope": 1}}, "linear_attn_config is {'rope': 1}"),
        (
            "kimi_linear",
            {"linear_attn_config": {"full_attn_layers": [1], "kda_layers": [2, 4]}},
            "full_attn_layers and kda_layers are [1] and [2, 4], expected lists that have each number",
        ),
        ("kimi_linear", {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ("lfm2", {"block_use_swiglu": False}, "block_use_swiglu is False"),
        ("lfm2_moe", {"layer_types": "absent"}, "layer_types is missing"),
        ("mamba2", {"rms_norm": False}, "rms_norm is False"),
        ("mamba2", {"head_dim": 9}, "6 heads of 9 are not the 60 inner dimensions"),
        ("mamba2", {"n_groups": 4}, "6 heads of Mamba-2 are not a multiple of 4 groups"),
        ("mamba2", {"time_step_limit": [1, 0.5]}, "time_step_limit is [1, 0.5]"),
        ("granitemoehybrid", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers is [1.0], expected a list of 5"),
        ("falcon_h1", {"attn_layer_indices": [0]}, "attn_layer_indices is [0]"),
        ("bamba", {"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ("bamba", {"mamba_n_heads": 7}, "7 heads of 8 are not the 60 inner dimensions"),
        ("nemotron_h", {"moe_latent_size": 8}, "moe_latent_size is 8"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias is True"),
        ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts is 2"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'"),
        ("nemotron_h", {"mlp_hidden_act": "selu"}, "mlp_hidden_act is 'selu'"),
        ("nemotron_h", {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern is 'X'"),
        ("nemotron_h", {"hybrid_override_pattern": "M--"}, "expected a mixer before each feed-forward"),
        ("nemotron_h", {"layers_block_type": []}, "layers_block_type is [], expected the kinds of 1"),
        ("exaone", {"num_layers": 0}, "num_layers is 0"),
        ("vaultgemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("minicpm3", {"scale_depth": 0}, "scale_depth is 0"),
        ("minicpm3", {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ("gptj", {"n_head": 4}, "30 is not a multiple of 4"),
        ("gptj", {"n_layer": 0}, "n_layer is 0"),
        ("gptj", {"rotary_dim": 8}, "rotary_size 8 is more than head_size 6"),
        ("codegen", {"n_head": 6}, "n_head is 6, expected a multiple of 4"),
        ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention is True"),
        ("gpt_neo", {"attention_types": [[["global"], 2]]}, "attention_types is [[['global'], 2]], expected"),
        ("gpt_neo", {"attention_types": [[["global", "dense"], 1], [["local"], 1]]}, "attention_types is"),
        ("gpt_neo", {"attention_types": 3}, "attention_types is 3"),
        ("gpt_neo", {"attention_layers": ["local"] * 3}, "attention_layers is ['local', 'local', 'local']"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is False"),
        ("opt", {"word_embed_proj_dim": 20}, "word_embed_proj_dim is 20"),
        ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm is True"),
        ("olmo", {"clip_qkv": -8.0}, "clip_qkv is -8.0"),
        ("dbrx", {"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ("dbrx", {"attn_config": 3}, "attn_config is 3, expected an object"),
        ("dbrx", {"ffn_config": {"moe_normalize_expert_weights": 2}}, "moe_normalize_expert_weights is 2"),
        ("mpt", {"logit_scale": 0.5}, "logit_scale is 0.5"),
        ("mpt", {"norm_type": "rmsnorm"}, "norm_type is 'rmsnorm'"),
        ("mpt", {"no_bias": False}, "no_bias is False"),
        ("mpt", {"attn_config": {"alibi": False}}, "alibi is False"),
        ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln is True"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is True",
        ),
        ("falcon", {"alibi": True}, "alibi is True"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn is 2"),
        ("falcon", {"multi_query": False, "num_kv_heads": 1}, "num_kv_heads is 1"),
        (
            "falcon",
            {"new_decoder_architecture": True, "parallel_attn": False},
            "parallel_attn is False",
        ),
        ("cwm", {"sliding_window": None}, "there is no sliding_window"),
        ("granitemoeshared", {"shared_intermediate_size": -1}, "shared_intermediate_size is -1"),
        ("exaone_moe", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("exaone_moe", {"topk_group": 4}, "4 of 3 groups"),
        ("hunyuan_v1_moe", {"moe_topk": [2, 3]}, "moe_topk is [2, 3], expected a list of 3"),
        ("hunyuan_v1_moe", {"moe_intermediate_size": [17, 17, 8]}, "moe_intermediate_size is 8"),
        ("hunyuan_v1_moe", {"num_shared_expert": 2}, "num_shared_expert is 2"),
        ("glm4_moe_lite", {"first_k_dense_replace": 2}, "first_k_dense_replace is 2"),
        ("glm4_moe_lite", {"mlp_layer_types": ["moe"] * 3}, "mlp_layer_types holds 'moe'"),
        ("solar_open", {"use_qk_norm": True}, "use_qk_norm is True"),
        ("phimoe", {"num_experts_per_tok": 3}, "3 active experts, expected the 2"),
        ("phimoe", {"rope_scaling": YARN}, "rope_type is 'yarn'"),
        (
            "phimoe",
            {"rope_scaling": LONG | {"short_mscale": 1.2, "long_mscale": 1.3}},
            "long_mscale is 1.3, which is not supported: expected 1.2",
        ),
        ("apertus", {"mlp_bias": True}, "mlp_bias is True"),
        ("axk1", {"q_lora_rank": None}, "q_lora_rank is null"),
        ("glm_moe_dsa", {"indexer_types": ["full", "shared", "full"]}, "indexer_types holds 'shared'"),
        ("glm_moe_dsa", {"index_topk_pattern": "FSF"}, "index_topk_pattern is 'FSF'"),
        ("glm_moe_dsa", {"index_topk_freq": 4}, "index_topk_freq is 4"),
        ("kolibri1", {"sliding_window": None, "layer_types": ["sliding_attention"] * 6}, "no sliding_window"),
        ("laguna", {"gating": False}, "gating is False"),
        ("laguna", {"num_attention_heads_per_layer": [4]}, "num_attention_heads_per_layer is [4]"),
        ("laguna", {"attention_bias": True}, "attention_bias is True"),
        ("hy_v3", {"mlp_bias": True}, "mlp_bias is True"),
        ("afmoe", {"attention_bias": True}, "attention_bias is True"),
        ("afmoe", {"score_func": "softmax"}, "score_func is 'softmax'"),
        ("jais2", {"layer_norm_eps": 0}, "layer_norm_eps is 0"),
        ("mellum", {"rope_parameters": {"rope_theta": 1e4}}, "expected objects for full_attention"),
        ("mellum", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling is {"),
        ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("youtu", {"mlp_bias": True}, "mlp_bias is True"),
        ("granite_swa", {"layer_rope_theta": [1e4]}, "layer_rope_theta is [10000.0], expected a list of 5"),
        ("granite_swa", {"layer_rope_theta": [1e4, -1, 0, 0, 0]}, "layer_rope_theta is -1"),
        ("granitemoe_swa", {"sliding_window": None}, "there is no sliding_window"),
        ("cohere2_moe", {"expert_selection_fn": "relu"}, "expert_selection_fn is 'relu'"),
        ("cohere2_moe", {"shared_expert_combination_strategy": "max"}, "is 'max', which is not supported"),
        ("sarvam_moe", {"use_bias": True}, "use_bias is True"),
        ("sarvam_mla", {"num_key_value_heads": 1}, "num_key_value_heads is 1"),
        ("flex_olmo", {"num_experts_per_tok": 6}, "6 of 5 experts cannot be active"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_is_not_supported_is_refused_by_field_and_value(kind, fields, words):
    with pytest.raises(ValueError, match=re.escape(words)) as e:
        config_of(kind, **fields)
    assert "\n" not in str(e.value)


def test_text_configurations_of_image_models_are_read(tmp_path):
    """Fields beside `text_config` count where it lacks them."""
    inner = hub_config("gemma3_text") | {"tie_word_embeddings": None}
    outer = {"model_type": "gemma3", "text_config": inner, "vision_config": {"hidden_size": 7}}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"tie_word_embeddings": False}))
    assert read_config(tmp_path) == config_of("gemma3_text", tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": [1]}))
    with pytest.raises(CheckpointError, match=r"text_config is \[1\], expected an object"):
        read_config(tmp_path)
