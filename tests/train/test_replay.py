"""Where kernels do not make all bits, a trainer replays the engine's steps, with a plain derivative."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from cases.models import RANDOM
from cases.trained import MODELS, Texts, draw_params, sample_texts
from suite.marks import full

from duetto import LLM, SamplingParams
from duetto.train import token_logprobs
from duetto.train.checks import cast_params
from duetto.train.engine_steps import EngineSteps
from duetto.train.scoring import score_by_xla

pytestmark = pytest.mark.as_served
SIZES = {"max_num_seqs": 8, "max_model_len": 160, "max_prefill_tokens": 64}
PROMPT_SIZES = (5, 9, 130, 64, 20, 7, 66, 3, 12)  # more texts than rows of a step
ONE_LAYER = replace(MODELS["dense"], layers=MODELS["dense"].layers[:1])
CASES = [("dense", ONE_LAYER, "bfloat16", False)]
MORE = [
    (name, config, dtype, has_kernels)
    for name, config, has_kernels in (
        ("layers", MODELS["dense"], False),
        ("experts", MODELS["experts"], False),
        ("windows", MODELS["windows"], False),
        *((name, RANDOM[name], x) for name in ("latent", "recurrent", "borrowed") for x in (False, True)),
    )
    for dtype in ("float32", "bfloat16")
]


@pytest.fixture(scope="module", params=[*CASES, *map(full, MORE)], ids=lambda x: f"{x[0]}-{x[2]}-{x[3]}")
def served(request) -> Iterator[tuple[LLM, Any, Texts]]:
    """An engine, its masters in float32, and texts that it sampled."""
    _, config, dtype, has_kernels = request.param
    masters = draw_params(config, 1)
    params = cast_params(config, masters, dtype)
    with LLM.from_params(config, params, cpu_kernels=has_kernels, **SIZES) as llm:
        yield llm, masters, sample_texts(llm, PROMPT_SIZES)


def loss_and_logprobs(compute: Any, params: Any) -> tuple[Any, Any]:
    logprobs = compute(params)
    return logprobs.mean(), logprobs


def test_reported_bits_with_the_derivative_of_a_plain_pass(served):
    llm, masters, texts = served
    inputs = {"tokens": texts.tokens, "lengths": texts.lengths}
    replay = partial(llm.logprobs_fn(), prompt_lengths=np.array(texts.starts), **inputs)
    plain = partial(token_logprobs, config=llm.config, exact=False, **inputs)
    differentiate = partial(jax.value_and_grad, has_aux=True)
    loss = jax.checkpoint(partial(loss_and_logprobs, replay))
    (_, logprobs), gradient = jax.jit(differentiate(loss))(masters)
    texts.assert_reported(logprobs)

    def cast_and_score(masters: Any) -> Any:
        return plain(cast_params(llm.config, masters, llm.served_dtype))

    _, expected = jax.jit(differentiate(partial(loss_and_logprobs, cast_and_score)))(masters)
    for mine, theirs in zip(jax.tree.leaves(gradient), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-7, rtol=1e-5)


@pytest.fixture(scope="module")
def small() -> Iterator[LLM]:
    """An engine without kernels."""
    config = ONE_LAYER
    with LLM.from_params(config, draw_params(config, 2), cpu_kernels=False, **SIZES) as llm:
        yield llm


@pytest.mark.parametrize(
    ("prompt_lengths", "message"),
    [
        (None, "exact log-probabilities are not possible: prompt_lengths are needed"),
        (np.array([4]), "prompt_lengths has 4: from 1 to 3 is allowed"),
        (np.array([0]), "prompt_lengths has 0"),
        (np.array([1.0]), r"prompt_lengths float64 \[1\] are not allowed: integers \[1\]"),
        (np.array([1, 1]), r"prompt_lengths int64 \[2\] are not allowed"),
    ],
)
def test_lengths_of_prompts_are_checked(small, prompt_lengths, message):
    with pytest.raises(ValueError, match=message):
        small.logprobs_fn()(small.params, np.array([[1, 2, 3]]), prompt_lengths=prompt_lengths)


def test_prompts_up_to_the_end_and_texts_of_one_token(small):
    """A text's last token is scored, never read: a prompt of whole chunks and one token reads the chunks."""
    tokens = np.random.default_rng(1).integers(0, 300, (3, 65))
    lengths, prompt_lengths = np.array([65, 30, 2]), np.array([65, 65, 1])
    compute, plain = jax.jit(small.logprobs_fn()), partial(token_logprobs, config=small.config, exact=False)
    mine = compute(small.params, tokens, lengths, prompt_lengths=prompt_lengths)
    np.testing.assert_allclose(mine, plain(small.params, tokens=tokens, lengths=lengths), atol=1e-5)
    each = [
        compute(small.params, tokens[i : i + 1], lengths[i : i + 1], prompt_lengths=prompt_lengths[i : i + 1])
        for i in range(3)
    ]
    np.testing.assert_array_equal(np.concatenate(each), mine)
    by_map = jax.vmap(lambda *text: compute(small.params, text[0][None], *(x[None] for x in text[1:])))
    np.testing.assert_array_equal(by_map(tokens, lengths, np.ones(3), prompt_lengths)[:, 0], mine)


def test_bounds_of_an_engine_bound_the_comparison_too():
    """Longrope's short factors hold up to a boundary within a chunk."""
    config = RANDOM["longrope"]
    assert config.longrope_boundary == 72
    options = SIZES | {"max_model_len": 72, "max_input_length": 68, "max_output_length": 4}
    options |= {"logprobs_mode": "processed_logprobs", "cpu_kernels": False}
    with LLM.from_params(config, draw_params(config, 2), **options) as llm:
        samplings = [SamplingParams(temperature=t, seed=3) for t in (0.5, 1.3)]
        texts = sample_texts(llm, (68, 5), samplings, count=4)
        temperatures, starts = np.array([0.5, 1.3], np.float32), np.array(texts.starts)
        compute = jax.jit(llm.logprobs_fn())
        texts.assert_reported(compute(llm.params, texts.tokens, texts.lengths, temperatures, starts))


def test_a_replay_with_other_bits_is_refused(small, monkeypatch):
    monkeypatch.setattr(EngineSteps, "score", lambda _, *arguments: score_by_xla(*arguments))
    with pytest.raises(ValueError, match="a replay of the engine's steps has other bits than its samples"):
        small.logprobs_fn()
