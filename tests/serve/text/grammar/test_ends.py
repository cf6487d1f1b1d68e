"""Answers of the model that ships behind the end that a grammar has come to."""

import pytest
from cases.requests import SIZES, SMALLEST
from suite.marks import full

from duetto import LLM, SamplingParams
from duetto.sampling.structured import StructuredOutputsParams

PROMPT, COUNT = "def f(x):", 24


@pytest.fixture(scope="module")
def llm():
    with LLM(SMALLEST, **SIZES, background_compilation=False) as own:
        yield own


def resumed(llm: LLM, params: SamplingParams, known: list[int]) -> list[int]:
    subscription = llm.input_processor.make_subscription(PROMPT, params, resumed_outputs=[known])
    llm.session.submit_and_run([subscription])
    return subscription.requests[0].output_tokens


@pytest.mark.parametrize("choice", [full(["yes please", "no thank you"]), ["yes", "no"]])
def test_an_answer_resumes_alike_from_any_token(llm, choice):
    """Also where several tokens are read at once, of which one is an end token."""
    params = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=COUNT,
        structured_outputs=StructuredOutputsParams(choice=choice),
    )
    (whole,) = llm.generate(PROMPT, params, use_tqdm=False)
    tokens = list(whole.outputs[0].token_ids)
    assert {*tokens[-8:]} <= {*llm.input_processor.eos_ids}
    assert [resumed(llm, params, tokens[:i]) for i in range(COUNT)] == [tokens] * COUNT


def test_behind_an_end_token_there_are_end_tokens_alone(llm):
    ends, asked = {*llm.input_processor.eos_ids}, StructuredOutputsParams(regex="[a-z ]*")
    params = [
        SamplingParams(
            temperature=1.5, seed=seed, ignore_eos=True, max_tokens=COUNT,
            logit_bias=dict.fromkeys(ends, 9.0), structured_outputs=asked,
        )
        for seed in range(40)
    ]  # fmt: skip
    ended = 0
    for output in llm.generate([PROMPT] * len(params), params, use_tqdm=False):
        tokens = list(output.outputs[0].token_ids)
        first = next((i for i, token in enumerate(tokens) if token in ends), COUNT)
        assert {*tokens[first:]} <= ends
        ended += first < COUNT - 1
    assert ended > 20
