"""`logprobs_mode`: processed log-probabilities of an engine; what is not drawn from them stays raw."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from cases.requests import GREEDY, PARAMS, PROMPTS, SIZES, exact, tokens
from suite.fixtures import with_few_shapes
from suite.marks import full

from duetto import LLM, BeamSearchParams, SamplingParams
from duetto.model.draft_pair import PairConfig
from duetto.sampling.checks import LOGPROBS_MODES, PROCESSED_LOGPROBS
from duetto.sampling.processors import scale_by_temperature
from duetto.sampling.sample import score_tokens
from duetto.serve.jobs.verify.claims import Claims
from duetto.serve.jobs.verify.replay import LogVerifier
from duetto.serve.llm.audit.facts import replay_options
from duetto.serve.options.engine import EngineOptions
from duetto.serve.options.keywords import options_from_keywords
from duetto.serve.runtime.compiled import executable_cache
from duetto.serve.runtime.compiled.lowering import LocalLowering
from duetto.serve.runtime.compiled.shapes import Shape
from duetto.serve.runtime.compiled.sizing import choose_sizes
from duetto.serve.runtime.steps.phases import TargetOnly
from duetto.serve.text.openai.replies import logprobs_by_id

WARM = SamplingParams(temperature=0.6, seed=7, max_tokens=6, logprobs=-1)
NARROW = replace(WARM, top_k=3, logprobs=4, prompt_logprobs=2)
REPEATED = [5, 6, 7, 8] * 6  # of which n-grams are drafted
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}


@pytest.fixture(scope="module")
def audit_log(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("modes") / "log"


@pytest.fixture(scope="module")
def raw(tiny) -> Iterator[LLM]:
    with with_few_shapes(), LLM.from_params(tiny.config, tiny.params, max_logprobs=-1, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def processed(tiny, audit_log) -> Iterator[LLM]:
    options = SIZES | {"max_logprobs": -1, "logprobs_mode": PROCESSED_LOGPROBS, "audit_log": str(audit_log)}
    with with_few_shapes(), LLM.from_params(tiny.config, tiny.params, **options) as llm:
        yield llm


def scores(llm: LLM, params: SamplingParams, prompt: list[int] = PROMPTS[0]):
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output.outputs[0].logprobs, output


def test_scores_of_a_temperature_are_those_of_scaled_logits(raw, processed):
    """The raw log-probabilities of the whole vocabulary are logits too, up to rounding."""
    (before, raw_output), (after, output) = scores(raw, WARM), scores(processed, WARM)
    assert tokens([raw_output]) == tokens([output])
    for token, raw_entry, entry in zip(output.outputs[0].token_ids, before, after, strict=True):
        assert next(iter(entry)) == token
        logits = np.array([raw_entry[i].logprob for i in range(len(raw_entry))], np.float32)
        want = score_tokens(scale_by_temperature(jnp.array(logits[None]), 0.6), jnp.array([token]))
        assert entry[token].logprob == pytest.approx(float(want.logprob[0]), abs=1e-4)
        assert entry[token].rank == int(want.rank[0])
        assert sum(math.exp(x.logprob) for x in entry.values()) == pytest.approx(1, abs=1e-4)


def test_narrowed_scores_end_with_minus_infinity(raw, processed):
    (before, raw_output), (after, output) = scores(raw, NARROW), scores(processed, NARROW)
    assert tokens([raw_output]) == tokens([output])
    assert raw_output.prompt_logprobs == output.prompt_logprobs
    for raw_entry, entry in zip(before, after, strict=True):
        kept = [x.logprob for x in entry.values() if x.rank <= 3]
        assert sum(map(math.exp, kept)) == pytest.approx(1, abs=1e-5)
        assert [x.logprob for x in entry.values() if x.rank > 3] == [-math.inf]
        assert all(math.isfinite(x.logprob) for x in raw_entry.values())
        assert min(x["logprob"] for x in logprobs_by_id(entry).values()) > -math.inf


def test_greedy_beams_and_likelihoods_are_raw(raw, processed):
    texts = [PROMPTS[0], PROMPTS[2]]
    greedy = replace(GREEDY, logprobs=3)
    beam = BeamSearchParams(beam_width=2, max_tokens=4, temperature=0.5)
    found = [
        (
            exact(llm.generate(texts, greedy, use_tqdm=False)),
            [[(s.tokens, s.cum_logprob) for s in o.sequences] for o in llm.beam_search(texts, beam)],
            llm.log_likelihood(texts, [[9, 8, 7], [1]], by="decode"),
            llm.log_likelihood(texts, [[9, 8, 7], [1]]),
        )
        for llm in (raw, processed)
    ]
    assert found[0] == found[1]
    assert all(x < -0.01 for likelihood in found[1][2] for x in likelihood.logprobs)


@pytest.mark.parametrize("acceptance", ["coupled", full("rejection")])
def test_drafts_change_no_processed_score(tiny, processed, acceptance):
    few = replace(WARM, allowed_token_ids=[5, 6], max_tokens=16, frequency_penalty=0.1, ignore_eos=True)
    params = [replace(p, logprobs=3) for p in (few, NARROW, *PARAMS)]
    texts = [REPEATED] * len(params)
    alone = [exact(processed.generate(t, p, use_tqdm=False)) for t, p in zip(texts, params, strict=False)]
    options = SIZES | {"logprobs_mode": PROCESSED_LOGPROBS, "decode_steps": 1}
    drafts = {"speculative_config": DRAFTS | {"acceptance": acceptance}}
    with (
        with_few_shapes(verifications=1),
        LLM.from_params(tiny.config, tiny.params, **options, **drafts) as llm,
    ):
        together = llm.generate(texts[: len(params)], params, use_tqdm=False)
        assert any(step.startswith("verify") for step in llm.report()["steps"])
    if acceptance == "coupled":
        assert exact(together) == [one for found in alone for one in found]
    for entry in together[0].outputs[0].logprobs or []:  # by rejection the tokens are others
        assert sum(math.exp(x.logprob) for x in entry.values()) == pytest.approx(1, abs=1e-5)
        assert [math.isfinite(x.logprob) for x in entry.values()] == [True, True, False]


def test_an_audit_log_is_proved_in_its_own_mode(tiny, raw, processed, audit_log):
    processed.generate(PROMPTS[:2], [NARROW, WARM], use_tqdm=False)
    claims = Claims.from_log(audit_log)
    assert claims.last_start is not None
    assert claims.last_start.options["logprobs_mode"] == PROCESSED_LOGPROBS
    assert LogVerifier(processed).verify_claims(claims).exit_code == 0
    proof = LogVerifier(raw).verify_claims(claims)
    assert not proof.proved_verdicts and "logprobs_mode" in str(proof.unproved_verdicts[0])
    assert replay_options(EngineOptions())["logprobs_mode"] == "raw_logprobs"


def test_each_mode_has_programs_of_its_own(tiny):
    config, phases, keys = PairConfig(tiny.config), TargetOnly(tiny.config), set()
    for mode in LOGPROBS_MODES:
        sizes = choose_sizes(config, EngineOptions(**SIZES, logprobs_mode=mode), tiny.params, None)
        _, given = LocalLowering.from_params(phases, tiny.params, sizes).describe(Shape("decode", 8, 1))
        keys.add(executable_cache.executable_key(phases, "decode", given))
    assert len(keys - {None}) == 2


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits", "processed", ""])
def test_other_modes_are_refused_by_name(mode):
    allowed = f"logprobs_mode={mode!r} is not allowed: raw_logprobs, processed_logprobs"
    with pytest.raises(ValueError, match=allowed):
        options_from_keywords({"logprobs_mode": mode})
