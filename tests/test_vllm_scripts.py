"""Scripts in the shape of vLLM's offline examples run as they are: each is a program of its own, over a model
that ships."""

import re
import runpy
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from cases.requests import SMALLEST
from suite.fixtures import with_few_shapes
from suite.marks import full_if

from duetto.serve.llm import loading

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {path.stem: path for path in Path(__file__).parent.glob("vllm_scripts/*/*.py")}
REPETITIONS = "quantization", "logprobs", "prefix_caching", "neutral_options", "profile"

# What each prints, line by line, among other things.
SAYS = {
    "async_streaming": [
        "paused: True",
        "stream-0 finished: '.*'",
        "stream-2 finished: '.*'",
        "as if alone: True",
    ],
    "basic": [r"'import os\\n' -> .* \((length|stop)\)", r"'for line in' -> .*"],
    "beam_search": ["3 beams, best first: True", "3 beams, best first: True"],
    "chat": [r"prompt '.*Reverse it.*', reply '", r"prompt '# system: You write Python\..*', reply '"],
    "default_sampling_params": [r"\d tokens, ", "unchanged None 6"],
    "engine_args_cli": [r"def f\( .* [1-5]$", "class A .* [1-5]$"],
    "engine_seed": ["different draws: True", "same engine seed: True another: False"],
    "kv_connector": [r"computed: \[0, 0\]", "found: True", "same: True"],
    "llm_engine": [
        r"request 0 ended: \['",
        r"request 2 ended: \['.*', '.*'\]",
        "pieces of the last: 4 tokens, at most one each: True",
        "took fewer steps than tokens: True",
    ],
    "logprobs": [
        r"rank 1: \{",
        r"prompt: (\d+) of \d+ scored",
        "sum is cumulative_logprob: True",
        "whole vocabulary: 2048 1.0",
    ],
    "metrics": [
        "in order: True 5",
        r"vllm:generation_tokens \(counter\) = 10",
        r"vllm:time_to_first_token_seconds \(histogram\) of 2, \d+ buckets",
    ],
    "neutral_options": ["refused: unknown option 'max_model_length', did you mean 'max_model_len'"],
    "params_per_prompt": [r"while True: \['.*', '.*'\]", "as if alone: True"],
    "prefix_caching": [
        r"cached tokens: \[(?!0, 0)",
        "same answers: True",
        "forgotten: True",
        "cached afterwards: 0",
    ],
    "profile": [r"\['.*', '.*'\]", "files: True"],
    "quantization": ["'", "refused: quantization='bitsandbytes' is not allowed"],
    "reload_weights": ["random: True", "read: True", "after a sleep: True"],
    "renderer": ["ids: True", r"same: True 'import sys\\n'", "chat: True"],
    "reproducibility": ["another order: True", "alone: True", "another engine: True"],
    "sharded_state": ["same: True", "refused: .*demo: load_format='sharded_state' is not allowed: it reads "],
    "sleep_mode": ["sleeping: True", "as before: True", "sleeping: True", "as before: True"],
    "spec_decode_heads": [r"prompts: True \d", r"drafts: True tokens: \[24, 24\]"],
    "spec_decode_ngram": ["same tokens: True", r"vllm:spec_decode_num_draft_tokens [1-9]"],
    "stop_strings": ["stopped: stop True True", "kept: True", "token: stop True", "banned: True"],
    "streaming": ["whole: True"],
    "structured_outputs": [
        "choice: (Positive|Negative)$",
        r"regex: [a-z]{3}@[a-z]{3}\.com$",
        r"json: \{'age': [34]0\}$",
        "grammar: SELECT [ab] FROM t$",
    ],
    "tokens_prompt": [r"same: True \['def add.*', None, 'as named'\]", "ids: True True", "chat: True"],
    "trace_replay": ["same tokens: True same text: True", "same scores: True"],
}  # fmt: skip
ARGUMENTS = {
    "engine_args_cli": "--max_model_len 256 --max-num-batched-tokens=64 --enforce-eager -tp 1 --max-tokens 5 "
    "--temperature 0",
    "sharded_state": "--model checkpoints/demo --max-model-len 256 --max-num-seqs 8 --block-size 16 "
    "--max-num-batched-tokens 64",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the smallest model that ships has the name of the other."""
    (folder := tmp_path_factory.mktemp("scripts") / "checkpoints").mkdir()
    (folder / "demo").symlink_to(SMALLEST)
    return folder.parent


@pytest.fixture(autouse=True, scope="module")
def warm() -> Iterator[None]:
    """The weights are read once for all scripts: else each script's start takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "load_folder", read_once(loading.load_folder))
        yield


def read_once(load):
    """A loader that gives what it has read of the same folder in the same form before."""
    found = {}

    def loaded(folder, dtype, mesh, options):
        key = Path(folder).resolve(), str(dtype), options.quantization, options.load_format
        if key not in found:
            found[key] = load(folder, dtype, mesh, options)
        return found[key]

    return loaded


@full_if(lambda name: name.startswith("spec_decode_") or name in REPETITIONS)
@pytest.mark.usefixtures("steady_steps")
@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_script(name, place, monkeypatch, capsys):
    is_large = name == "spec_decode_heads"  # the heads are those of the larger model
    monkeypatch.chdir(ROOT if is_large else place)
    monkeypatch.setattr(sys, "argv", [name, *ARGUMENTS.get(name, "").split()])
    with with_few_shapes(verifications=1) if is_large else nullcontext():
        runpy.run_path(str(SCRIPTS[name]), run_name="__main__")
    lines = iter(capsys.readouterr().out.splitlines())
    for pattern in SAYS[name]:
        assert any(re.match(pattern, line) for line in lines), f"no line is {pattern!r}, or not in this order"
