"""Log-probabilities of temperatures, and of weights before and after an update, are those of the reports."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from cases.trained import MODELS, draw_params, sample_texts

from duetto import LLM, SamplingParams
from duetto.cpu_kernels.library import load_library

pytestmark = pytest.mark.skipif(not load_library().isas, reason=load_library().refusal or "there are kernels")
SIZES = {"cpu_kernels": True, "max_num_seqs": 8, "max_model_len": 128, "max_prefill_tokens": 64}


@pytest.fixture(scope="module")
def small() -> Any:
    """A model of one layer."""
    config = replace(MODELS["dense"], layers=MODELS["dense"].layers[:1])
    return SimpleNamespace(config=config, params=draw_params(config, 2))


def test_processed_reports_are_those_of_the_temperature(small):
    temperatures = np.array([0.3, 1.7, 1.0], np.float32)
    samplings = [SamplingParams(temperature=float(t), seed=3) for t in temperatures]
    options = SIZES | {"logprobs_mode": "processed_logprobs"}
    with LLM.from_params(small.config, small.params, **options) as llm:
        texts = sample_texts(llm, (5, 40, 9), samplings)
        compute = jax.jit(llm.logprobs_fn())
        texts.assert_reported(compute(small.params, texts.tokens, texts.lengths, temperatures))
        others = texts.sampled(compute(small.params, texts.tokens, texts.lengths, 0.9))
        assert all((mine != reported).any() for mine, reported in zip(others, texts.reported, strict=True))


@pytest.mark.parametrize("has_kernels", [True, False])
def test_after_an_update_each_segment_has_its_weights(small, has_kernels):
    second = jax.tree.map(lambda x: x * 1.01, small.params)
    with LLM.from_params(small.config, small.params, **SIZES | {"cpu_kernels": has_kernels}) as llm:
        llm.add_request([5, 6, 7], SamplingParams(seed=1, max_tokens=30, logprobs=0, ignore_eos=True))
        for _ in range(8):
            llm.step()
        llm.update_params(second, mode="keep")
        while not (done := llm.step()):
            pass
        (answer,) = done[0].outputs
        segments: Any = answer.weights
        (_, old), (start, new) = segments
        assert (old, new) == (0, 1) and 0 < start < 30
        tokens, compute = np.array([[5, 6, 7, *answer.token_ids]]), jax.jit(llm.logprobs_fn())
        before, after = (
            np.asarray(compute(w, tokens, prompt_lengths=np.array([3])))[0, 2:]
            for w in (small.params, second)
        )
        np.testing.assert_array_equal(before[:start], answer.logprob_array[:start])
        np.testing.assert_array_equal(after[start:], answer.logprob_array[start:])
        assert (before[start:] != after[start:]).any()
