"""Speculative decoding whole: guesses of the device change no bit, and what is refused."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from cases.weights import drawn
from suite.fixtures import with_few_shapes

from duetto import LLM, RequestOutput, SamplingParams
from duetto.checkpoints.huggingface import CheckpointError, save_hf
from duetto.model.config import ModelConfig
from duetto.model.transformer import decoder_spec
from duetto.serve.options.keywords import options_from_keywords

pytestmark = pytest.mark.as_served

SMALLEST = Path(__file__).resolve().parents[4] / "checkpoints" / "demo-draft"
SIZES = {
    "max_num_seqs": 2,
    "max_prefill_tokens": 64,
    "max_model_len": 96,
    "page_size": 16,
    "max_batched_token_mem": 96,
}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=40, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, top_p=0.9, max_tokens=40, logprobs=1, ignore_eos=True),
    SamplingParams(
        temperature=0.7, seed=4, frequency_penalty=0.4, max_tokens=40, logprobs=1, ignore_eos=True
    ),
]
TEXTS = [
    "def area(width: float, height: float) -> float:\n",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\nimport sys\n\n\ndef main():\n    for name in sys.argv[1:]:\n",
]
GUIDES = {
    "heads": {"method": "heads", "model": "demo-heads", "num_speculative_tokens": 3},
    "draft model": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3},
    "tree of heads": {"method": "tree", "model": "demo-heads", "num_speculative_tokens": 7},
    "tree of a draft model": {"method": "tree", "model": "demo-draft", "num_speculative_tokens": 7},
}


def bits(output: RequestOutput) -> list[tuple[int, bytes]]:
    completion = output.outputs[0]
    steps = zip(completion.token_ids, completion.logprobs or [], strict=True)
    return [(t, np.array([x.logprob for x in at.values()]).tobytes()) for t, at in steps]


@pytest.fixture
def compiled(kept: str) -> Iterator[None]:
    """Where keys are kept in eight bits, quickly: what users' optimisations do is shown without."""
    jax.config.update("jax_disable_most_optimizations", kept != "auto")
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@cache
def expected(kv_cache_dtype: str) -> list[list[tuple[int, bytes]]]:
    with with_few_shapes():
        llm = LLM(**SIZES, kv_cache_dtype=kv_cache_dtype)
    with llm:
        assert not llm.engine.classes.verify and "speculation" not in llm.report()
        return [
            bits(llm.generate(t, p, use_tqdm=False)[0])
            for t, p in itertools.islice(itertools.product(TEXTS, PARAMS), 9)
        ]


@pytest.mark.full
@pytest.mark.parametrize(
    "name, kept",
    [
        ("heads", "auto"),
        ("tree of a draft model", "auto"),
        ("draft model", "int8"),
        ("tree of heads", "fp8"),
    ],
)
@pytest.mark.usefixtures("compiled")
def test_draft_tokens_of_the_device_change_no_bit(name, kept):
    """Tokens and log-probabilities, through preemption and prefix hits, in an engine that verifies at every
    step."""
    texts, params = zip(*itertools.product(TEXTS, PARAMS), strict=True)
    own = {"speculative_config": GUIDES[name] | {"adaptive": False}, "kv_cache_dtype": kept}
    with nullcontext() if "tree" in name else with_few_shapes():  # whose decode no tree equals
        llm = LLM(**SIZES, **own)
    with llm:
        for _ in range(2):
            found = llm.generate(list(texts), list(params), use_tqdm=False)
            assert [bits(o) for o in found] == expected(kept)
        report = llm.report()
    assert report["preemptions"] > 0 and report["cached_tokens"] > 0
    assert report["speculation"]["tokens_per_pass"] > 1.3


@pytest.mark.full
@pytest.mark.usefixtures("few_shapes")
def test_a_model_that_drafts_for_itself_is_always_right():
    config = {"method": "draft_model", "model": str(SMALLEST), "num_speculative_tokens": 3, "adaptive": False}
    with LLM(SMALLEST, **SIZES, speculative_config=config) as llm:
        llm.generate(TEXTS, PARAMS, use_tqdm=False)
        report = llm.report()["speculation"]
    assert report["accepted"] == report["drafted"] > 0


# ------------------------------------------------------------ at the border


@pytest.mark.parametrize(
    "options, message",
    [
        ({"speculative_config": {"method": "magic"}}, "method='magic'"),
        ({"speculative_config": {"method": "ngram", "k": 3}}, "unknown key 'k'"),
        ({"speculative_config": {"method": "ngram"}, "decode_steps": 4}, "decode_steps 4"),
        (
            {"speculative_config": {"method": "tree", "model": "x", "speculative_token_tree": [[1]]}},
            r"speculative_token_tree: path \(1,\)",
        ),
    ],
)
def test_what_is_refused_before_a_model_is_read(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        options_from_keywords(options)


def test_a_speculator_that_does_not_fit_is_refused(tmp_path):
    other = ModelConfig.uniform(7, 16, 24, 1, 2, 1, 8, max_position=32)
    save_hf(tmp_path / "other", other, drawn(decoder_spec(other)))
    with pytest.raises(ValueError, match="vocabulary of 7, the model that it drafts for one of 2048"):
        LLM(speculative_config={"method": "draft_model", "model": str(tmp_path / "other")})
    headless = replace(other, vocab_size=2048, has_head=False)
    save_hf(tmp_path / "headless", headless, drawn(decoder_spec(headless)))
    with pytest.raises(ValueError, match="stores no lm_head: it cannot draft"):
        LLM(speculative_config={"method": "draft_model", "model": str(tmp_path / "headless")})
    with pytest.raises(CheckpointError, match="nowhere"):
        LLM(speculative_config={"method": "heads", "model": str(tmp_path / "nowhere")})
    wide = {"method": "tree", "model": "demo-draft", "speculative_token_tree": [[0], [1], [1, 0]]}
    with pytest.raises(ValueError, match="only the first child of a node has children"):
        LLM(speculative_config=wide)


@pytest.mark.full
@pytest.mark.usefixtures("steady_steps")
@pytest.mark.usefixtures("few_shapes")
def test_the_controller_learns_step_times_and_what_is_accepted():
    config = {"method": "ngram", "num_speculative_tokens": 3}
    with LLM(**SIZES, speculative_config=config) as llm:
        speculation = llm.engine.speculation
        controller = speculation.controller
        assert set(controller.call_seconds) == {(8, 0), (8, 3)}
        before = controller.acceptance.expected_gains()
        results = [llm.generate(TEXTS[0] * 3, PARAMS[0], use_tqdm=False)[0] for _ in range(3)]
        report = llm.report()
    assert any(time.measured > 1 for time in controller.speculative_times.measured.values())
    assert any(time.measured > 1 for time in controller.plain_times.measured.values())
    assert report["compilations"] == 0 and 0 < report["speculation"]["acceptance"][0] <= 1
    assert controller.acceptance.expected_gains() != before
    assert not speculation.draft_states
    place, completion = 0, results[-1].outputs[0]
    passes = completion.passes or []
    assert sum(p.tokens for p in passes) == len(completion.token_ids)
    assert any(p.accepted for result in results for p in result.outputs[0].passes or ())
    for p in passes:
        assert list(p.guesses[: p.accepted]) == completion.token_ids[place : place + p.accepted]
        place += p.tokens
