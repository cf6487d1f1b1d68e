"""Every family through the engine, in pages, chunks and batches, against what Transformers computed for the same checkpoints."""

import json
from pathlib import Path

import numpy as np
import pytest

from duetto import LLM, SamplingParams

TINY = Path(__file__).resolve().parents[1].parent / "shared" / "data" / "tiny"
FOLDERS = sorted(path.parent.name for path in TINY.glob("*/golden.json"))
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, logprobs=8, ignore_eos=True)


def tolerance(name: str) -> float:
    """Small enough that the two forms of gelu are told apart."""
    return 5e-4 if name.startswith(("gemma", "gpt2")) else 1e-3


def log_softmax(logits: list[float]) -> np.ndarray:
    x = np.array(logits, np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


@pytest.mark.skipif(not FOLDERS, reason="the fixtures of tiny checkpoints are not on this machine")
def test_all_fixtures_are_there():
    assert len(FOLDERS) == 15


@pytest.mark.parametrize("name", FOLDERS)
def test_engine_equals_transformers(name):
    """Pages of 16 tokens, so that a window of 16 leaves pages behind, and a prompt of 50 in two chunks."""
    cases = json.loads((TINY / name / "golden.json").read_text())["cases"]
    options = {"max_num_seqs": 4, "max_prefill_tokens": 40, "page_size": 16, "compilation_cache": None}
    with LLM(TINY / name, dtype="float32", max_model_len=80, **options) as llm:
        outputs = llm.generate([case["prompt_ids"] for case in cases], GREEDY, use_tqdm=False)
        again = llm.generate([case["prompt_ids"] for case in cases], GREEDY, use_tqdm=False)
        assert llm._engine.tables.occupancy == 0
    for case, output in zip(cases, outputs, strict=True):
        completion = output.outputs[0]
        assert list(completion.token_ids) == case["greedy_ids"]
        expected = log_softmax(case["last_logits"])
        for token, found in completion.logprobs[0].items():
            assert abs(found.logprob - expected[token]) < tolerance(name)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]
    assert sum(o.num_cached_tokens for o in again) > 0
