"""What scripts for vLLM give to `LLM` without asking for anything, and what is refused."""

import json
import re

import jax
import numpy as np
import pytest

from duetto import SamplingParams
from duetto.checkpoints.configuration.overrides import overridden_folder
from duetto.checkpoints.huggingface import read_config
from duetto.checkpoints.tensors import CheckpointError
from duetto.model.kinds import GroupedQuery
from duetto.neutral_values import EFFECTLESS, NEUTRAL
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER, load_folder
from duetto.serve.engine.startup.model_source import ModelSource
from duetto.serve.options.engine import EngineOptions
from duetto.serve.options.keywords import OTHER_NAMES, options_from_keywords

USUAL = {
    "max_num_seqs": None, "enable_prefix_caching": None, "seed": None, "enable_chunked_prefill": False,
    "enable_lora": False, "disable_custom_all_reduce": True, "distributed_executor_backend": "mp",
    "compilation_config": {"level": 3}, "async_scheduling": True, "runner": "generate",
    "scheduling_policy": "priority", "cpu_offload_gb": 0, "swap_space": 0, "kv_cache_dtype": "auto",
    "load_format": "safetensors", "hf_overrides": {}, "profiler_config": None, "tensor_parallel_size": 1,
    "limit_mm_per_prompt": {"image": 5}, "max_loras": 4, "logits_processors": None, "block_size": None,
}  # fmt: skip


def test_what_asks_for_nothing_changes_nothing():
    assert options_from_keywords(USUAL) == EngineOptions(
        load_format="safetensors", hf_overrides={}, max_loras=4
    )
    everything = {name: values[0] for name, values in NEUTRAL["engine"].items() if values} | EFFECTLESS
    assert options_from_keywords(everything) == EngineOptions()
    assert (
        options_from_keywords(dict.fromkeys([*NEUTRAL["engine"], *EFFECTLESS, *OTHER_NAMES]))
        == EngineOptions()
    )


def test_no_keyword_is_in_two_tables():
    ours = set(vars(EngineOptions()))
    assert not set(NEUTRAL["engine"]) & set(EFFECTLESS) and not ours & {*NEUTRAL["engine"], *EFFECTLESS}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"kv_cache_dtype": "int4"},
            "kv_cache_dtype='int4' is not allowed: auto, int8, fp8_e4m3, fp8_e5m2, fp8$",
        ),
        ({"lora_dtype": "float16"}, "lora_dtype='float16' is not supported: only 'auto'"),
        ({"cpu_offload_gb": 2}, "cpu_offload_gb=2 is not supported: only 0"),
        ({"runner": "pooling"}, "runner='pooling' is not supported: only 'auto' or 'generate'"),
        ({"rope_theta": 1e6}, "rope_theta=1000000.0 is not supported: only None"),
        ({"load_format": "gguf"}, "load_format='gguf' is not allowed: auto, safetensors, dummy"),
        ({"generation_config": "folder"}, "generation_config='folder' is not allowed: auto, vllm"),
    ],
)
def test_what_would_change_results_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        options_from_keywords(given)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("max_num_batch_tokens", "max_num_batched_tokens"),
        ("dtypes", "dtype"),
    ],
)
def test_the_nearest_name_is_named(name, nearest):
    with pytest.raises(TypeError, match=f"unknown option '{name}', did you mean '{nearest}'"):
        options_from_keywords({name: 1})


def test_generation_config_can_be_left_and_overridden():
    stated = {"temperature": 0.6, "top_k": 20}
    assert EngineOptions().default_sampling(stated) == stated
    assert EngineOptions(generation_config="vllm").default_sampling(stated) == {}
    override = EngineOptions(override_generation_config={"temperature": 0.1, "max_new_tokens": 5})
    assert override.default_sampling(stated) == {"temperature": 0.1, "top_k": 20, "max_tokens": 5}


def test_dummy_weights_need_no_file_and_are_deterministic(tmp_path):
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "head_dim": 4, "vocab_size": 8}
    raw = json.loads((DEMO_FOLDER / "config.json").read_text()) | small
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (config, random, _), (_, again, _) = (
        load_folder(tmp_path, "float32", options=EngineOptions(load_format="dummy")) for _ in range(2)
    )
    assert (config.vocab_size, config.hidden_size) == random.embed.shape == (8, 8)
    assert all(map(np.array_equal, jax.tree.leaves(random), jax.tree.leaves(again)))
    with pytest.raises(CheckpointError, match="safetensors"):
        load_folder(tmp_path, "float32")


def test_fields_of_config_json_can_be_overridden():
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
        "rope_theta": 10000.0,
    }
    changes = {"rope_parameters": yarn, "max_position_embeddings": 4096}
    with overridden_folder(DEMO_FOLDER, changes) as folder:
        config = read_config(folder)
        assert {file.name for file in folder.iterdir()} == {file.name for file in DEMO_FOLDER.iterdir()}
    assert not folder.exists()
    assert config.max_position == 4096 and read_config(DEMO_FOLDER).max_position == 1024
    mixer = config.layers[0].mixer
    assert isinstance(mixer, GroupedQuery) and mixer.rope is not None and mixer.rope.kind == "yarn"
    with overridden_folder(DEMO_FOLDER, {}) as folder:
        assert folder == DEMO_FOLDER


def test_overridden_fields_count_for_quantization_and_errors_name_the_folder():
    stored = {"quantization_config": {"quant_method": "awq"}}
    options = EngineOptions(quantization="awq", hf_overrides=stored)
    assert ModelSource.resolve_names(None).resolve_options(options).quantization is None
    with (
        pytest.raises(CheckpointError, match=re.escape(f"{DEMO_FOLDER / 'config.json'}: ")),
        overridden_folder(DEMO_FOLDER, {"hidden_size": "x"}) as folder,
    ):
        read_config(folder)


# ---------------------------------------------------------------- sampling parameters


def test_sampling_parameters_are_settable_and_checked():
    params = SamplingParams()
    params.max_tokens, params.stop, params.temperature = 100, "a", 0
    assert params == SamplingParams(max_tokens=100, stop=["a"], temperature=0.0)
    assert type(params.temperature) is float and params.stop == ("a",)
    with pytest.raises(ValueError, match="max_tokens=0 is not allowed"):
        params.max_tokens = 0
    with pytest.raises(TypeError, match="max_tokens='5': expected"):
        params.max_tokens = "5"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(
        AttributeError, match="unknown sampling parameter 'max_token', did you mean 'max_tokens'"
    ):
        params.max_token = 5
    assert params.max_tokens == 100


def test_what_fields_must_agree_on_is_checked_by_clone():
    params, bias = SamplingParams(temperature=0.5), {3: 1.0}
    params.logit_bias, params.min_tokens = bias, 50
    with pytest.raises(ValueError, match="min_tokens=50 is not allowed"):
        params.clone()
    params.max_tokens = 60
    own = params.clone()
    params.max_tokens, bias[3] = 70, 2.0
    assert (own.max_tokens, own.min_tokens, own.logit_bias) == (60, 50, {3: 1.0})
    with pytest.raises(ValueError, match=r"logit_bias\[4\]=nan"):
        params.logit_bias = {4: float("nan")}


def test_positions_are_vllms():
    params = SamplingParams(2, 0.1, 0.2, 1.1, 0.5, 0.9, 40, 0.05, 7, "x", [3], True, 32, 4, 5, 6)
    assert params == SamplingParams(
        n=2, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1, temperature=0.5, top_p=0.9,
        top_k=40, min_p=0.05, seed=7, stop="x", stop_token_ids=[3], ignore_eos=True, max_tokens=32,
        min_tokens=4, logprobs=5, prompt_logprobs=6,
    )  # fmt: skip


def test_neutral_sampling_parameters_are_accepted_and_no_others():
    neutral = {name: values[0] for name, values in NEUTRAL["sampling"].items()}
    params = SamplingParams(**neutral, temperature=0.5)
    assert params == SamplingParams(temperature=0.5)
    assert {name: getattr(params, name) for name in NEUTRAL["sampling"]} == neutral
    params.extra_args = {}
    with pytest.raises(ValueError, match="truncate_prompt_tokens=5 is not supported: only None"):
        SamplingParams.from_dict({"truncate_prompt_tokens": 5})
    with pytest.raises(ValueError, match="logits_processors=.* is not supported"):
        params.logits_processors = [print]


def test_from_optional_takes_none_for_a_default():
    params = SamplingParams.from_optional(
        n=None, temperature=None, top_p=None, max_tokens=None, stop=None, logit_bias={"5": 1e9}, logprobs=True
    )
    assert params == SamplingParams(max_tokens=None, logit_bias={5: 100.0}, logprobs=1)
