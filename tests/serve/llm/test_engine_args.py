"""`EngineArgs` and the parser that scripts for vLLM make their command lines with; and the modules under
vLLM's names."""

import json
import subprocess
import sys
from dataclasses import asdict, fields, replace
from importlib import import_module

import pytest

from duetto import AsyncEngineArgs, EngineArgs, TextPrompt, TokensPrompt
from duetto.compat.argparse_utils import FlexibleArgumentParser
from duetto.serve.options.engine import EngineOptions
from duetto.serve.options.keywords import LLM_KEYWORDS, options_from_keywords

NAMES = {
    "sampling_params": "BeamSearchParams RequestOutputKind SamplingParams",
    "inputs": "PromptType TextPrompt TokensPrompt",
    "outputs": "CompletionOutput RequestOutput",
    "logprobs": "Logprob",
    "benchmarks.datasets": "SampleRequest add_dataset_parser get_samples",
    "config": "CompilationConfig KVTransferConfig ProfilerConfig",
    "config.kv_transfer": "KVTransferConfig",
    "distributed": "cleanup_dist_env_and_memory",
    "beam_search": "BeamSearchOutput BeamSearchSequence",
    "engine.arg_utils": "AsyncEngineArgs EngineArgs",
    "engine.llm_engine": "LLMEngine",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "entrypoints.llm": "LLM",
    "model_executor.model_loader": "ShardedStateLoader",
    "platforms": "current_platform",
    "renderers": "ChatParams Renderer TokenizeParams",
    "renderers.inputs.preprocess": "parse_model_prompt",
    "utils": "FlexibleArgumentParser",
    "utils.network_utils": "get_open_port",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.metrics.reader": "Counter Gauge Histogram Metric Vector",
}


def parser() -> FlexibleArgumentParser:
    made = FlexibleArgumentParser(exit_on_error=False)
    EngineArgs.add_cli_args(made)
    made.set_defaults(model="folder")
    made.add_argument("--my_own", type=int)
    return made


def options(given: dict) -> EngineOptions:
    return options_from_keywords({name: value for name, value in given.items() if name not in LLM_KEYWORDS})


@pytest.mark.parametrize("module", NAMES)
def test_names_are_where_they_are_in_vllm(module):
    found = import_module(f"duetto.{module}")
    assert all(hasattr(found, name) for name in NAMES[module].split())


def test_what_nobody_set_asks_for_nothing():
    assert options(vars(EngineArgs())) == options(asdict(EngineArgs())) == EngineOptions()
    given = vars(parser().parse_args([]))
    assert given.pop("model") == "folder" and given.pop("my_own") is None
    assert options(given) == EngineOptions()
    assert {f.name for f in fields(EngineArgs)} >= {
        *(f.name for f in fields(EngineOptions)),
        "tensor_parallel_size",
        "enable_lora",
    }


def test_a_command_line_becomes_options():
    words = [
        "--max_model_len", "256", "--max-num-batched-tokens=64", "-tp", "1", "--enforce-eager",
        "--my-own", "4", "--speculative-config.method", "ngram",
        "--speculative_config.num_speculative_tokens=3", "--seed", "none", "--no-enable-prefix-caching",
        "--kv_cache_dtype", "auto", "--revision", "main",
    ]  # fmt: skip
    args = parser().parse_args(words)
    engine_args = EngineArgs.from_cli_args(args)
    assert (args.my_own, engine_args.model, engine_args.revision) == (4, "folder", "main")
    assert options(vars(engine_args)) == EngineOptions(
        max_model_len=256,
        max_prefill_tokens=64,
        enable_prefix_caching=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )


def test_options_from_a_file_count_less_than_the_command_line(tmp_path):
    file = tmp_path / "options.yaml"
    said = {
        "max-model-len": 128,
        "max_num_seqs": 2,
        "enforce-eager": True,
        "speculative_config": {"method": "ngram"},
    }
    file.write_text(json.dumps(said))
    args = parser().parse_args(["--config", str(file), "--max-num-seqs", "4"])
    assert (args.max_model_len, args.max_num_seqs, args.enforce_eager) == (128, 4, True)
    assert args.speculative_config == {"method": "ngram"}
    with pytest.raises(SystemExit):
        parser().parse_args(["--config", str(tmp_path / "nowhere.yaml")])


def test_engine_args_are_settable_and_refuse_unknown_names():
    args = AsyncEngineArgs("folder", max_num_seqs=4)
    args.max_num_seqs, args.hf_overrides = 8, {"a": 1}
    assert replace(args, seed=3).max_num_seqs == 8
    assert options(vars(args)) == EngineOptions(max_num_seqs=8, hf_overrides={"a": 1})
    with pytest.raises(TypeError, match="unknown option 'max_num_seq', did you mean 'max_num_seqs'"):
        EngineArgs(max_num_seq=4)


def test_prompts_are_mappings():
    assert TextPrompt(prompt="a") == {"prompt": "a"}
    assert TokensPrompt(prompt_token_ids=[1], multi_modal_data=None)["prompt_token_ids"] == [1]


def test_importing_an_absent_class_names_its_replacement():
    with pytest.raises(ImportError, match="StructuredOutputsParams has taken its place"):
        from duetto.sampling_params import GuidedDecodingParams  # noqa: F401


def test_vllm_modules_import_without_jax_and_their_classes_pickle():
    code = """
import sys
import duetto.v1.engine.async_llm, duetto.utils
from importlib.util import find_spec
assert find_spec("duetto.entrypoints.llm") and not hasattr(duetto.outputs, "__all__")
assert "jax" not in sys.modules
import pickle
from duetto.engine.arg_utils import EngineArgs
assert pickle.loads(pickle.dumps(EngineArgs("m", seed=3))) == EngineArgs("m", seed=3)
assert duetto.v1.engine.async_llm.AsyncLLM is duetto.AsyncLLMEngine
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
