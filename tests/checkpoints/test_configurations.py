"""A folder's configuration: both styles of RoPE's fields, and what is refused by field and value."""

import math

import pytest
from cases.folders import change_config, config_with, refusal

from duetto.checkpoints.huggingface import read_config
from duetto.model.rope import Rope

V5 = {"rope_theta": "absent", "rope_scaling": "absent"}
YARN = Rope(1e4, "yarn", 4.0, original_max_position=16, scale=0.1 * math.log(4) + 1)
LONGROPE = Rope(
    1e4,
    "longrope",
    4.0,
    original_max_position=16,
    short_factors=(1.0, 2.0, 3.0),
    long_factors=(2.0, 3.0, 4.0),
    scale=math.sqrt(1.5),
)
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("fields", "changes"),
    [
        ({"head_dim": None, "hidden_size": 24}, {"hidden_size": 24}),
        ({"head_dim": "absent", "hidden_size": 24}, {"hidden_size": 24}),
        ({"num_key_value_heads": "absent"}, {"num_kv_heads": 4}),
        ({"rms_norm_eps": "absent"}, {"norm_eps": 1e-6}),
        ({"max_position_embeddings": "absent"}, {"max_position": 2048}),
        ({"rope_theta": 500000}, {"rope": Rope(5e5)}),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, {"rope": Rope(1e4, "linear", 4.0)}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3"} | LLAMA3},
            {"rope": Rope(5e5, "llama3", 8.0, 1.0, 4.0, 16)},
        ),
        (
            V5 | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5} | LLAMA3},
            {"rope": Rope(5e5, "llama3", 8.0, 1.0, 4.0, 16)},
        ),
        (V5 | {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, {"rope": Rope(7e4)}),
        (V5 | {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7e4}, {"rope": Rope(7e4)}),
        (V5, {}),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 16}},
            {"rope": YARN},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}},
            {"rope": YARN},
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1, 2, 3], "long_factor": [2, 3, 4]}}
            | {"original_max_position_embeddings": 16},
            {"rope": LONGROPE},
        ),
        ({"sliding_window": None, "layer_types": ["full_attention"] * 2, "use_cache": False, "note": {}}, {}),
    ],
)
def test_both_styles_of_configuration_are_read(folder, fields, changes):
    change_config(folder, **fields)
    assert read_config(folder) == config_with(**changes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba', expected one of llama"),
        ({"model_type": "absent"}, "model_type is None"),
        (
            {"model_type": "Yi", "architectures": ["YiForCausalLM"], "use_cache": True, "note": 3},
            "the nearest is 'llama', which does not read note: hf_overrides={\"model_type\": ",
        ),
        (
            {"model_type": "tele", "architectures": ["Qwen2ForCausalLM"]},
            "the nearest is 'qwen2', which does not read attention_bias, mlp_bias: hf_overrides",
        ),
        ({"model_type": ["llama"]}, "model_type is ['llama']"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish', which is not supported: expected one of 'silu'"),
        ({"sliding_window": 128}, "sliding_window is 128, which is not supported: expected null"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is 'sliding_attention'",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config: quant_method is 'hqq'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"vocab_size": "absent"}, "vocab_size is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"intermediate_size": "20"}, "intermediate_size is '20', expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a positive integer"),
        (
            {"num_hidden_layers": 10**5},
            "num_hidden_layers is 100000, expected a positive integer, at most 10000",
        ),
        ({"num_hidden_layers": 10**4}, "a model of 10000 layers, but only 21 tensors are stored"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings is 1000000000000000000000000000000,"),
        ({"num_attention_heads": 4.0}, "num_attention_heads is 4.0"),
        ({"num_key_value_heads": True}, "num_key_value_heads is True"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 5}, "head_size 5 is odd"),
        ({"head_dim": None, "hidden_size": 14}, "hidden_size 14 is not a multiple of 4 heads"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small', expected a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps is 1e+300, expected a number above 0: 1e-30 to 1e+30"),
        ({"rope_theta": 1e300}, "rope_theta is 1e+300"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes', expected true or false"),
        ({"attention_bias": 1}, "attention_bias is 1"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"rope_scaling": 2.0}, "rope_scaling is 2.0, expected one flat object"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling: rope_type is 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling: rope_type is missing in {'factor': 2}"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": [1]},
            "rope_parameters is [1], expected one flat object",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope_scaling: factor is 0"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8}},
            "rope_parameters: low_freq_factor is missing",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3"} | LLAMA3 | {"low_freq_factor": 4}},
            "high_freq_factor is 4.0, expected more than low_freq_factor 4.0",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "expected one flat object"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn', expected one of float32"),
    ],
    ids=lambda x: x[:30] if isinstance(x, str) else None,
)
def test_unsupported_configurations_are_refused_by_field_and_value(folder, fields, words):
    change_config(folder, **fields)
    message = refusal(folder)
    assert words in message and "config.json" in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b'{"a": "\xff"}', "not valid JSON"),
        (b"[1]", "holds a JSON list, expected an object"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_broken_configuration_is_refused(folder, text, words):
    (folder / "config.json").write_bytes(text)
    assert words in refusal(folder)


def test_what_is_no_checkpoint_is_refused(folder):
    assert "absent: no such folder" in refusal(folder / "absent")
    assert "model.safetensors: a file, expected the folder" in refusal(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    assert "holds no *.safetensors" in refusal(folder)


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
        "pytorch_model-00001-of-00002.bin",
        "consolidated.00.pth",
    ],
)
def test_pickled_weights_are_refused_with_the_reason(folder, name):
    (folder / "model.safetensors").rename(folder / name)
    message = refusal(folder)
    assert name in message and "reading them can run any code" in message


def test_unsupported_dtypes_are_refused_with_every_dtype_option(folder):
    change_config(folder, torch_dtype="int8")
    for dtype in ("auto", "float32", "bfloat16"):
        assert "config.json: dtype is 'int8', expected one of float32" in refusal(folder, dtype=dtype)
