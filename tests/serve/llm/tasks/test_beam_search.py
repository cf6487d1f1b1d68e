"""Beam search against the plainest one: the whole text through the forward pass for every beam and round."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.requests import SIZES
from suite.marks import full_if

from duetto import LLM, SamplingParams
from duetto.lora.request import LoRARequest
from duetto.model.attention import causal
from duetto.model.transformer import compute_logits, forward
from duetto.sampling.params import BeamSearchParams

EOS = tuple(range(0, 300, 5))  # so many that beams end early
LENGTH = SIZES["max_model_len"]
PROMPTS = [[5, 17, 200, 31, 8], list(range(20, 58)), [7]]
LONG = [20 + i % 250 for i in range(LENGTH - 26)]

Logprobs = Callable[[list[int]], np.ndarray]


@pytest.fixture(scope="module")
def llm(tiny) -> Iterator[LLM]:
    with LLM.from_params(tiny.config, tiny.params, eos_token_ids=EOS, **SIZES) as llm:
        yield llm


@pytest.fixture(scope="module")
def logprobs(tiny) -> Logprobs:
    """Log-probabilities [V] of the token that follows a text."""

    @jax.jit
    def run(tokens, length):
        places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        hidden, _ = forward(tiny.params, tiny.config, tokens, places, causal, None, length)
        return jax.nn.log_softmax(compute_logits(tiny.params, tiny.config, hidden[0, length - 1])[0])

    def after(text: list[int]) -> np.ndarray:
        padded = np.zeros((1, 64 if len(text) <= 64 else LENGTH), np.int32)
        padded[0, : len(text)] = text
        return np.asarray(run(padded, np.array([len(text)], np.int32)))

    return after


@dataclass
class Beam:
    tokens: list[int]
    total: float = 0.0


def plainly(logprobs: Logprobs, prompt: list[int], p: BeamSearchParams, rounds: int) -> list[Beam]:
    """The search as vLLM has it: 2 * beam_width continuations of each beam, of which the best go on."""

    def score(beam: Beam) -> float:
        length = len(beam.tokens) - (beam.tokens[-1] in EOS)
        return beam.total / max(length, 1) ** p.length_penalty

    beams, ended = [Beam(prompt)], []
    for _ in range(rounds):
        grown = []
        for beam in beams:
            found = logprobs(beam.tokens)
            for token in np.argsort(-found, kind="stable")[: 2 * p.beam_width]:
                new = Beam([*beam.tokens, int(token)], beam.total + float(found[token]))
                (ended if token in EOS and not p.ignore_eos else grown).append(new)
        beams = sorted(grown, key=score, reverse=True)[: p.beam_width]
    return sorted(ended + beams, key=score, reverse=True)[: p.beam_width]


CASES = {
    "four beams": BeamSearchParams(beam_width=4, max_tokens=6),
    "one beam": BeamSearchParams(beam_width=1, max_tokens=5),
    "long preferred": BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=3.0),
    "short preferred": BeamSearchParams(beam_width=3, max_tokens=6, length_penalty=-1.0),
    "past the end": BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True),
    "temperature": BeamSearchParams(beam_width=2, max_tokens=3, temperature=1.5),
    "up to the model's length": BeamSearchParams(beam_width=2, max_tokens=40),
}


@full_if(lambda params: params is CASES["four beams"])
@pytest.mark.parametrize("params", CASES.values(), ids=CASES)
def test_beams_are_those_of_a_plain_search(llm, logprobs, params):
    prompts = [LONG] if params.max_tokens == 40 else PROMPTS
    for prompt, found in zip(prompts, llm.beam_search(prompts, params), strict=True):
        rounds = min(params.max_tokens, LENGTH - len(prompt))
        wanted = plainly(logprobs, prompt, params, rounds)
        assert [s.tokens for s in found.sequences] == [beam.tokens for beam in wanted]
        totals = [beam.total for beam in wanted]
        np.testing.assert_allclose([s.cum_logprob for s in found.sequences], totals, atol=1e-3 * rounds)


def test_ends_are_met_in_these_cases(llm):
    """Else the cases above would say nothing of them."""
    found = llm.beam_search(PROMPTS, replace(CASES["four beams"], beam_width=8))
    reasons = {s.finish_reason for output in found for s in output.sequences}
    assert reasons == {"stop", "length"}


def test_what_a_sequence_holds(llm):
    (found,) = llm.beam_search([{"prompt_token_ids": PROMPTS[0]}], CASES["four beams"])
    for sequence in found.sequences:
        own = sequence.tokens[len(PROMPTS[0]) :]
        chosen = [at[token].logprob for token, at in zip(own, sequence.logprobs, strict=True)]
        assert sequence.cum_logprob == pytest.approx(sum(chosen)) and len(sequence.logprobs[0]) == 8
        assert sequence.text is None  # there is no tokenizer


def test_later_rounds_find_the_pages_of_earlier_ones(llm):
    llm.reset_prefix_cache()
    before = llm.report()
    llm.beam_search(PROMPTS[1], BeamSearchParams(beam_width=2, max_tokens=4))
    after = llm.report()
    assert (
        after["cached_tokens"] - before["cached_tokens"] >= 32 * 6
    )  # two pages, of the two beams in three rounds


def test_prompts_in_groups_give_the_same(llm):
    params = CASES["four beams"]
    together, apart = (llm.beam_search(PROMPTS, params, concurrency_limit=n) for n in (None, 2))
    assert [[s.tokens for s in o.sequences] for o in together] == [
        [s.tokens for s in o.sequences] for o in apart
    ]


def test_output_is_not_counted_as_input(tiny):
    short = {**SIZES, "max_input_length": 5, "max_output_length": 3}
    with LLM.from_params(tiny.config, tiny.params, **short) as llm:
        (found,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2, max_tokens=6))
        assert {len(s.tokens) for s in found.sequences} == {8}
        with pytest.raises(ValueError, match="38 tokens, at most 5"):
            llm.beam_search([PROMPTS[1]], BeamSearchParams(beam_width=2, max_tokens=6))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"prompts": [[]]}, "the prompt is empty"),
        ({"params": BeamSearchParams(beam_width=400, max_tokens=2)}, "beam_width=400 needs 300 log-prob"),
        ({"lora_request": LoRARequest("a", 1, "/a")}, "lora_request is not allowed: set enable_lora"),
        ({"concurrency_limit": 0}, "concurrency_limit=0 is not allowed"),
    ],
    ids=["empty prompt", "wide", "adapter", "limit"],
)
def test_what_is_refused(llm, arguments: dict[str, Any], error: str):
    with pytest.raises(ValueError, match=error):
        llm.beam_search(**{"prompts": PROMPTS, "params": CASES["one beam"], **arguments})
    greedy = SamplingParams(temperature=0.0, max_tokens=3)
    assert llm.generate(PROMPTS[0], greedy, use_tqdm=False)[0].finished


def test_a_search_that_is_aborted_says_so(llm, monkeypatch):
    plain = llm.engine.step

    def aborting():
        for id in list(llm.session.subscriptions):
            llm.abort(id)
        return plain()

    monkeypatch.setattr(llm.engine, "step", aborting)
    with pytest.raises(RuntimeError, match="beam_search: request .* was aborted"):
        llm.beam_search([[5, 6, 7]], BeamSearchParams(beam_width=2, max_tokens=4))
    with pytest.raises(RuntimeError, match="log_likelihood: request .* was aborted"):
        llm.log_likelihood([[5] * 60])
    assert not llm.session.subscriptions
