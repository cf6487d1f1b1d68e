"""Rows of the invariance suite for logits processors of users: a request gets the tokens of its own, whatever
the rows beside it ask for, and one that asks for none has the bits of an engine without."""

import itertools

import pytest
from cases.invariance import LENGTHS, bits, prompts
from cases.oracle import continue_plainly
from cases.processors import ASKED, EXTRA, PROCESSORS
from suite.fixtures import with_few_shapes
from suite.marks import full

from duetto import LLM, SamplingParams
from duetto.serve.llm.audit.facts import engine_facts

TIGHT = {  # so few pages that requests are preempted
    "max_batched_token_mem": 320, "page_size": 16, "max_prefill_tokens": 32, "decode_steps": 1,
}  # fmt: skip
GUESSES = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}}
pytestmark = [pytest.mark.parametrize("model", ["tiny", full("recurrent")], indirect=True, scope="session")]


@pytest.fixture(scope="module")
def llm(serve):
    with with_few_shapes():
        llm = serve(logits_processors=PROCESSORS)
    with llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm, model):
    """Each request served alone by an engine without pages."""
    found = []
    for prompt, params in zip(prompts(model.config.vocab_size), ASKED, strict=True):
        llm.engine.tables.reset_prefix_cache()
        found += [bits(o) for o in llm.generate(prompt, params, use_tqdm=False)]
    return found


def test_alone_equals_the_oracle_and_the_engine_without_processors(model, alone, expected):
    texts, found = prompts(model.config.vocab_size), [[token for token, *_ in own] for own in alone]
    for prompt, params, tokens in zip(texts, ASKED, found, strict=True):
        assert tokens == continue_plainly(model, prompt, params, PROCESSORS, tokens)
    others = {i for i in range(len(texts)) if alone[i] != expected[i]}
    assert {0, 3} <= others <= {i for i, extra in enumerate(EXTRA) if extra}
    assert 12 in found[0][:3] and 11 in found[3][:6], "the reasoning was closed"
    assert len({*texts[2], *found[2]}) == len({*texts[2]}) + 24, "no token came twice"
    assert not {*found[6][:12]} & {*range(2, 14)}, "no banned token came"


def test_batched_and_prefix_hits_equal_alone(model, llm, alone):
    texts, compiled = prompts(model.config.vocab_size), llm.report()["compilations"]
    llm.engine.tables.reset_prefix_cache()
    for found in [[0] * 7, [(n - 1) // 64 * 64 for n in LENGTHS]]:
        outputs = llm.generate(texts, ASKED, use_tqdm=False)
        assert [bits(o) for o in outputs] == alone
        assert [o.num_cached_tokens for o in outputs] == found
    assert llm.report()["compilations"] == compiled


@pytest.mark.parametrize("more", [full({}), GUESSES], ids=["chunks", "guesses"])
def test_preemption_chunks_and_draft_tokens_change_no_bit(model, serve, alone, more):
    texts = prompts(model.config.vocab_size)
    with with_few_shapes(verifications=1):
        llm = serve(**TIGHT, **more, logits_processors=PROCESSORS)
    with llm:
        for _ in range(2):
            assert [bits(o) for o in llm.generate(texts, ASKED, use_tqdm=False)] == alone
        report = llm.report()
    assert report["preemptions"] > 0 or model.name == "recurrent"
    assert not more or report["speculation"]["drafted"] > 0


@pytest.mark.full
def test_a_default_of_the_engine_is_every_requests(model, serve, alone):
    """An operator's processor: the requests state nothing."""
    own = {"override_generation_config": {"extra_args": EXTRA[0], "temperature": 0.0, "max_tokens": 24}}
    with serve(logits_processors=PROCESSORS, **own) as llm:
        (output,) = llm.generate(prompts(model.config.vocab_size)[0], use_tqdm=False)
        facts = engine_facts(llm.engine, llm.options)
    assert output.outputs[0].token_ids == [token for token, *_ in alone[0]]
    assert "thinking_budget" in facts["logits_processors"]


def test_unknown_numbers_are_refused_before_any_step(llm):
    steps = llm.report()["steps"]
    with pytest.raises(ValueError, match="unknown name 'ngram_sise', did you mean 'ngram_size'"):
        llm.generate([1, 2], [SamplingParams(extra_args={"ngram_sise": 2})], use_tqdm=False)
    assert llm.report()["steps"] == steps


def test_an_impure_processor_does_not_start(model):
    counter = itertools.count()
    with pytest.raises(ValueError, match="is not pure"):
        LLM.from_params(
            model.config, model.params, max_model_len=64, logits_processors=[lambda x, *_: x + next(counter)]
        )
