"""`max_logprobs`: how many log-probabilities a step reports changes nothing else."""

import math
from dataclasses import replace

import numpy as np
import pytest
from cases.requests import SIZES
from suite.fixtures import with_few_shapes
from suite.marks import full

from duetto import LLM, SamplingParams
from duetto.model.draft_pair import PairConfig
from duetto.serve.options.engine import EngineOptions
from duetto.serve.runtime.compiled import executable_cache
from duetto.serve.runtime.compiled.lowering import LocalLowering
from duetto.serve.runtime.compiled.shapes import Shape
from duetto.serve.runtime.compiled.sizing import choose_sizes, max_scratch_bytes
from duetto.serve.runtime.steps.phases import TargetOnly
from duetto.serve.text.openai.replies import top_logprobs

PROMPTS = [[7, 8, 9, 10], list(range(20, 60))]


@pytest.fixture(scope="module")
def usual(tiny):
    with LLM.from_params(tiny.config, tiny.params, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def whole(tiny):
    options = SIZES | {"max_logprobs": -1}
    with with_few_shapes(), LLM.from_params(tiny.config, tiny.params, **options) as llm:
        yield llm


def scores(entries: list, top: int) -> list[tuple]:
    """The bits of each position's own score and of the `top` best, in order."""
    found = [entry.items() for entry in entries if entry is not None]
    return [
        tuple((t, x.logprob.hex(), x.rank) for t, x in e if x.rank <= top or t == next(iter(e))[0])
        for e in found
    ]


@pytest.mark.parametrize("temperature", [0.0, full(0.8)])
def test_tokens_and_the_first_twenty_are_the_usual_engines(usual, whole, temperature):
    few = SamplingParams(temperature=temperature, seed=3, max_tokens=8, logprobs=20, prompt_logprobs=20)
    all = replace(few, logprobs=-1, prompt_logprobs=-1)
    results = [
        llm.generate(PROMPTS, p, use_tqdm=False) for llm, p in ((usual, few), (whole, few), (whole, all))
    ]
    for a, b, c in zip(*results, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids == c.outputs[0].token_ids
        assert a.outputs[0].logprobs == b.outputs[0].logprobs and a.prompt_logprobs == b.prompt_logprobs
        for x, y in ((a.outputs[0].logprobs, c.outputs[0].logprobs), (a.prompt_logprobs, c.prompt_logprobs)):
            assert scores(x, 20) == scores(y, 20)


def test_minus_one_is_the_whole_vocabulary(whole, tiny):
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=-1, prompt_logprobs=-1)
    (result,) = whole.generate(PROMPTS[:1], params, use_tqdm=False)
    assert result.prompt_logprobs is not None and result.outputs[0].logprobs is not None
    for entry in (*result.outputs[0].logprobs, *result.prompt_logprobs[1:]):
        assert sorted(entry) == list(range(tiny.config.vocab_size))
        assert np.exp([x.logprob for x in entry.values()]).sum() == pytest.approx(1, abs=1e-4)
        assert len(top_logprobs(entry, math.inf)) == tiny.config.vocab_size


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("wanted", [-1, 21])
def test_more_than_the_engine_reports_is_refused_by_name(usual, name, wanted):
    with pytest.raises(
        ValueError, match=f"{name}={wanted} is not allowed: this engine reports max_logprobs=20"
    ):
        usual.generate(PROMPTS, SamplingParams(**{name: wanted}), use_tqdm=False)
    with pytest.raises(ValueError, match="max_logprobs -2 is not allowed"):
        EngineOptions(max_logprobs=-2)


def test_fewer_than_usual_are_the_usual_programs():
    assert [EngineOptions(max_logprobs=n).num_logprobs(300) for n in (0, 20, 21, 1000, -1)] == [
        20,
        20,
        21,
        300,
        300,
    ]


def test_max_logprobs_changes_program_keys_and_planned_memory(tiny):
    config, params, phases = PairConfig(tiny.config), tiny.params, TargetOnly(tiny.config)
    keys, scratch = set(), []
    for most in (20, 100, -1):
        options = EngineOptions(**SIZES, max_logprobs=most)
        sizes = choose_sizes(config, options, params, None)
        _, given = LocalLowering.from_params(phases, params, sizes).describe(Shape("decode", 8, 1))
        keys.add(executable_cache.executable_key(phases, "decode", given))
        scratch.append(max_scratch_bytes(config, options, "float32"))
    assert len(keys - {None}) == 3
    assert scratch == sorted(set(scratch))


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("most", [-1, 5000])
def test_more_than_the_vocabulary_has_are_refused(tiny, name, most):
    V = tiny.config.vocab_size
    params = SamplingParams(**{name: V})
    params.check_logprobs(most, V)
    with pytest.raises(ValueError, match=f"{name}={V + 1} is not allowed: the vocabulary has {V} tokens"):
        SamplingParams(**{name: V + 1}).check_logprobs(most, V)
