"""Layers of Gemma 4 and Llama 4: keys of earlier layers, heads of two sizes, chunks."""

from cases.families.reading import attention, config_of, ffn, mixers, windows

from duetto.model.config import Dense, Experts


def test_gemma4_layers_share_keys_and_have_heads_of_two_sizes():
    config = config_of("gemma4_text")
    assert [mixer.kv_layers_back for mixer in mixers(config)] == [0, 0, 0, 2, 2, 4, 4]
    assert [layer.ffn.inner_size for layer in config.layers] == [44] * 3 + [88] * 4
    plain = config_of("gemma4_text", num_kv_shared_layers="absent", layer_types="absent", num_hidden_layers=8)
    assert windows(plain) == [5, 5, 5, 5, 5, None, 5, None]
    stated = {"per_layer_config": {"1": {"head_dim": 14}}, "layer_types": None, "num_kv_shared_layers": 0}
    sizes = [mixer.head_size for mixer in mixers(config_of("gemma4_text", **stated))]
    assert sizes == [6, 14, 6, 6, 6, 6, 6]
    keys = config_of("gemma4_text", attention_k_eq_v=True, num_kv_shared_layers=0, num_key_value_heads=5)
    assert [mixer.num_kv_heads for mixer in mixers(keys)] == [5] * 7
    assert [mixer.keys_as_values for mixer in mixers(keys)] == [True, False] * 3 + [True]
    assert attention("gemma4_text", global_head_dim="absent").head_size == 512
    assert config_of("gemma4_text", hidden_size_per_layer_input=None).layer_input is None
    assert config_of("gemma4_text", final_logit_softcapping="absent").logit_softcap is None


def test_layers_of_llama4():
    config = config_of("llama4_text", no_rope_layers=[], no_rope_layer_interval="absent")
    assert windows(config) == [6, 6, 6, None, 6]
    assert [mixer.rotary_dims for mixer in mixers(config)] == [8, 8, 8, 0, 8]
    assert [mixer.qk_norm is None for mixer in mixers(config)] == [False, False, False, True, False]
    assert [isinstance(layer.ffn, Experts) for layer in config.layers] == [False, True, False, True, False]
    assert windows(config_of("llama4_text", attention_chunk_size="absent"))[0] == 8192
    assert config_of("llama4_text", attn_temperature_tuning=4) == config_of("llama4_text")
    assert attention("llama4_text", no_rope_layers=[0] * 5, attn_temperature_tuning=False).rope is None
    assert ffn("llama4_text", moe_layers=[1]) == Dense(23)
    assert not any(mixer.chunked for mixer in mixers(config.drop_unreached_limits(6)))
