"""Log-probabilities of given tokens with the bits that were reported when such tokens were sampled."""

from dataclasses import replace

import jax
import pytest
from cases.requests import IDS, PROMPTS, SEEDED, SIZES

from duetto import LLM, RequestOutput
from duetto.cpu_kernels.library import load_library

TEXTS = [IDS, PROMPTS[1], [7]]
PARAMS = [
    replace(SEEDED, logprobs=0, max_tokens=70, ignore_eos=True, seed=1),
    replace(SEEDED, logprobs=0, max_tokens=40, ignore_eos=True, top_p=0.8, temperature=0.5),
    replace(SEEDED, logprobs=0, max_tokens=90, ignore_eos=True, repetition_penalty=1.3),
]
needs_kernels = pytest.mark.skipif(not load_library().isas, reason="needs the CPU kernels: make kernels")


def reported(outputs: list[RequestOutput]) -> list[list[float]]:
    """What was reported of each sampled token."""
    completions = [output.outputs[0] for output in outputs]
    return [[at[t].logprob for t, at in zip(c.token_ids, c.logprobs, strict=True)] for c in completions]


def engine_of(model, dtype: str = "float32", **options) -> LLM:
    params = jax.tree.map(lambda x: x.astype(dtype), model.params)
    sizes = SIZES | {"background_compilation": False}  # the phases are compared before it serves
    return LLM.from_params(model.config, params, **(sizes | options))


def capped(model):
    """A model whose logits XLA bends after their product."""
    return replace(model, config=replace(model.config, logit_softcap=30.0))


@pytest.mark.parametrize(
    "change, dtype, kernels, expected",
    [
        (None, "float32", False, "decode"),
        (None, "bfloat16", False, "decode"),
        pytest.param(None, "bfloat16", True, "prefill", marks=needs_kernels),
        pytest.param(capped, "bfloat16", True, "decode", marks=needs_kernels),
    ],
)
def test_exact_scores_have_the_bits_of_sampling(tiny, change, dtype, kernels, expected):
    with engine_of(change(tiny) if change else tiny, dtype, cpu_kernels=kernels) as llm:
        sampled = llm.generate(TEXTS, PARAMS, use_tqdm=False)
        answers = [output.outputs[0].token_ids for output in sampled]
        found = llm.log_likelihood(TEXTS, answers, by="exact")
        assert {x.by for x in found} == {expected}
        assert [x.token_ids for x in found] == answers and [x.logprobs for x in found] == reported(sampled)
        whole = llm.log_likelihood([[7, *answers[2]], [7]], by="exact")  # without continuations
        assert whole[0].logprobs == found[2].logprobs and whole[0].token_ids == answers[2]
        assert not whole[1].logprobs and {x.by for x in whole} == {expected}
        by_each = [llm.log_likelihood([[7, *answers[2]]], by=by)[0] for by in ("prefill", "decode")]
        assert [x.by for x in by_each] == ["prefill", "decode"]
        assert by_each[1].logprobs == found[2].logprobs == pytest.approx(by_each[0].logprobs, abs=0.1)


@needs_kernels
def test_exact_scores_are_decoded_until_prefill_is_compared(tiny, monkeypatch):
    with engine_of(tiny, "bfloat16", cpu_kernels=True) as llm:
        prefilled = llm.log_likelihood([IDS], by="exact")[0]
        assert prefilled.by == "prefill"
        monkeypatch.setattr(llm.engine, "classes", replace(llm.engine.classes, same_bits=False))
        decoded = llm.log_likelihood([IDS], by="exact")[0]
        assert decoded == replace(prefilled, by="decode")


def test_exact_scores_need_the_contract(one_layer, few_shapes):
    with engine_of(one_layer, reproducible=False) as llm:
        with pytest.raises(ValueError, match="by='exact' is not allowed with reproducible=False"):
            llm.log_likelihood([IDS], by="exact")
        with pytest.raises(ValueError, match="by='near' is not allowed: 'prefill', 'decode' or 'exact'"):
            llm.log_likelihood([IDS], by="near")
        with pytest.raises(ValueError, match="a prompt is empty"):
            llm.log_likelihood([[]], by="decode")
