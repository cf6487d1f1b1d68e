"""Fields of `quantization_config` as programs write them are accepted; an odd value is refused by name."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from cases.packers import LLAMA_CASES

from duetto.checkpoints.quantised.activations import stated_activations
from duetto.checkpoints.quantised.config import check_quantization, read_weight_args

WEIGHTS = {
    "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
    "observer": "minmax", "observer_kwargs": {}, "scale_dtype": None, "strategy": "channel",
    "symmetric": True, "type": "float", "zp_dtype": None,
}  # fmt: skip
GROUPS = {
    "group_0": {
        "format": None, "input_activations": WEIGHTS | {"dynamic": True}, "output_activations": None,
        "targets": ["Linear"], "weights": WEIGHTS,
    }
}  # fmt: skip
# as the programs that quantise write them
WRITTEN: dict[str, dict[str, Any]] = {
    "llm-compressor": {
        "config_groups": GROUPS, "format": "float-quantized", "global_compression_ratio": None,
        "ignore": ["lm_head"], "kv_cache_scheme": None, "quant_method": "compressed-tensors",
        "quantization_status": "compressed", "sparsity_config": {}, "transform_config": {},
        "version": "0.13.0",
    },
    "llm-compressor of 2024": {
        "config_groups": GROUPS, "format": "float-quantized", "global_compression_ratio": 1.24, "ignore": [],
        "kv_cache_scheme": WEIGHTS, "quant_method": "compressed-tensors", "quantization_status": "frozen",
        "sparsity_config": {
            "format": "dense", "global_sparsity": 0.14, "ignore": [], "registry_requires_subclass": False,
            "sparsity_structure": "unstructured", "targets": [],
        },
    },
    "AutoFP8": {
        "activation_scheme": "static", "ignored_layers": ["lm_head"], "kv_cache_scheme": "static",
        "quant_method": "fp8",
    },
    "DeepSeek": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "Mistral": {
        "activation_scheme": "static", "dequantize": False, "modules_to_not_convert": ["lm_head"],
        "quant_method": "fp8", "weight_block_size": None,
    },
    "fbgemm": {
        "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"], "quant_method": "fbgemm_fp8",
    },
    "ModelOpt": {
        "config_groups": {"group_0": {
            "input_activations": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "targets": ["Linear"],
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
        }},
        "ignore": ["lm_head"], "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.29.0"}, "quant_algo": "NVFP4",
        "quant_method": "modelopt",
    },
    "gpt-oss": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"},
    "AutoGPTQ": {
        "bits": 4, "damp_percent": 0.1, "desc_act": True, "group_size": 128, "model_file_base_name": "model",
        "model_name_or_path": None, "quant_method": "gptq", "static_groups": False, "sym": True,
        "true_sequential": True,
    },
    "Optimum": {
        "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True,
        "damp_percent": 0.01, "dataset": None, "desc_act": False, "exllama_config": {"version": 1},
        "group_size": 128, "max_input_length": None, "model_seqlen": 2048,
        "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None, "pad_token_id": None,
        "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True,
        "use_cuda_fp16": False, "use_exllama": True,
    },
    "GPTQModel": {
        "bits": 4, "checkpoint_format": "gptq", "desc_act": False, "dynamic": {"-:lm_head": {}},
        "format": "gptq", "group_size": 128, "lm_head": False, "meta": {"quantizer": ["gptqmodel:5.0.0"]},
        "method": "gptq", "pack_dtype": "int32", "quant_method": "gptq", "sym": True,
    },
    "AutoAWQ": {
        "backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None, "fuse_max_seq_len": None,
        "group_size": 128, "modules_to_fuse": None, "modules_to_not_convert": ["visual"],
        "quant_method": "awq", "version": "gemm", "zero_point": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("writer", WRITTEN)
def test_what_programs_write_beside_the_weights_is_accepted(writer: str):
    check_quantization({"quantization_config": WRITTEN[writer]})


ACTIVATIONS = {  # by writer; None: in 16 bits
    "llm-compressor": "fp8", "llm-compressor of 2024": "fp8", "AutoFP8": "fp8", "DeepSeek": "fp8",
    "Mistral": "fp8", "fbgemm": "fp8", "gpt-oss": None, "AutoGPTQ": None, "AutoAWQ": None,
}  # fmt: skip


@pytest.mark.parametrize("writer", ACTIVATIONS)
def test_activations_that_programs_state(writer: str):
    assert stated_activations(WRITTEN[writer]) == ACTIVATIONS[writer]


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ([{"type": "int", "num_bits": 8}], "int8"),
        ([None], None),
        ([], None),
        (
            [{"type": "int", "num_bits": 4}],
            "input_activations are 'int' of 4 bits, expected int or float of 8",
        ),
        (["int8"], "input_activations are 'int8', expected an object"),
        ([{"type": ["int"]}], r"input_activations are \['int'\] of 8 bits"),
        ([{"type": "int"}, None], "activations are in None and int8, expected one scheme"),
        ([{"type": "int"}, {"type": "float"}], "activations are in fp8 and int8, expected one scheme"),
    ],
)
def test_activations_of_groups(inputs: list[Any], expected: str | None):
    groups = {str(i): {"weights": WEIGHTS, "input_activations": x} for i, x in enumerate(inputs)}
    config = {"quant_method": "compressed-tensors", "config_groups": groups}
    if expected in ("int8", None):
        assert stated_activations(config) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            stated_activations(config)


def test_activations_of_modelopt():
    def stated(**fields: Any) -> str | None:
        return stated_activations({"quant_method": "modelopt", **fields})

    assert stated(quant_algo="FP8") == stated(quant_algo="FP8_PER_CHANNEL_PER_TOKEN") == "fp8"
    assert stated(quant_algo="W4A16_NVFP4") is None
    with pytest.raises(ValueError, match="quant_algo is 'NVFP4', whose activations are not supported"):
        stated_activations(WRITTEN["ModelOpt"])
    mixed = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "FP8"}}}
    assert stated(**mixed) == "fp8"


ODD = (
    None, True, False, 0, -1, 1.5, "", "x", [], {}, [1], {"a": 1}, {"a": {}}, {"a": {"weights": [1]}},
    {"a": {"weights": {"group_size": []}}}, 10**30,
)  # fmt: skip


def paths(fields: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items() if isinstance(fields, dict) else ():
        yield (*path, name)
        yield from paths(value, (*path, name))


@pytest.mark.parametrize("case", LLAMA_CASES)
def test_an_odd_value_is_refused_or_read(case: str):
    method, _ = LLAMA_CASES[case]
    for *above, last in paths(method):
        for odd in ODD:
            config = inner = deepcopy(method)
            for name in above:
                inner = inner[name]
            inner[last] = odd
            try:
                check_quantization({"quantization_config": config})
                read_weight_args(config)
            except ValueError as refusal:
                assert "\n" not in str(refusal)
