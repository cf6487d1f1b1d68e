"""Log-probabilities that a trainer differentiates have the bits that the engine reported."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from cases.trained import MODELS, Texts, draw_params, sample_texts
from suite.marks import full

from duetto import LLM
from duetto.cpu_kernels.library import load_library
from duetto.serve.runtime.compiled.shapes import MIN_DECODE_ROWS
from duetto.serve.runtime.steps.step import MIN_LOGIT_ROWS
from duetto.train import token_logprobs
from duetto.train.checks import cast_params
from duetto.train.tiles import ROW_TILE

pytestmark = [
    pytest.mark.as_served,
    pytest.mark.skipif(not load_library().isas, reason=load_library().refusal or "there are kernels"),
]
PROMPT_SIZES = (5, 9, 140, 20, 12, 7, 11, 64, 63, 3, 8, 14, 17, 6, 10, 270)
CASES = [("dense", "bfloat16")]
MORE = [(name, dtype) for name in MODELS for dtype in ("float32", "bfloat16") if (name, dtype) not in CASES]


@pytest.fixture(scope="module", params=[*CASES, *map(full, MORE)], ids="-".join)
def served(request) -> Iterator[tuple[LLM, Any, Texts]]:
    """An engine, its masters in float32, and texts that it sampled."""
    name, dtype = request.param
    masters = draw_params(MODELS[name], 1)
    params = cast_params(MODELS[name], masters, dtype)
    with LLM.from_params(
        MODELS[name], params, cpu_kernels=True, max_num_seqs=16, max_model_len=320, max_prefill_tokens=64
    ) as llm:
        yield llm, masters, sample_texts(llm, PROMPT_SIZES)


def loss_and_logprobs(compute: Any, params: Any, texts: Texts) -> tuple[Any, Any]:
    logprobs = compute(params, tokens=texts.tokens, lengths=texts.lengths)
    return logprobs.mean(), logprobs


def flat(tree: Any) -> Any:
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


def distance(gradient: Any, expected: Any) -> float:
    """Relative error of a whole gradient."""
    return float(np.linalg.norm(flat(gradient) - flat(expected)) / np.linalg.norm(flat(expected)))


@pytest.mark.parametrize("count", [full(1), 3, full(16)])
@pytest.mark.parametrize("wrap", [lambda f: f, full(jax.checkpoint)])
def test_reported_bits_inside_a_gradient(served, count, wrap):
    llm, masters, texts = served
    texts = texts.take(count)
    loss = wrap(partial(loss_and_logprobs, llm.logprobs_fn(), texts=texts))
    (_, logprobs), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(masters)
    texts.assert_reported(logprobs)
    plain = partial(loss_and_logprobs, partial(token_logprobs, config=llm.config, exact=False), texts=texts)
    plain_gradient = jax.jit(jax.grad(plain, has_aux=True))
    expected, _ = plain_gradient(masters)
    rounded = cast_params(llm.config, masters, llm.served_dtype)
    limit = 1e-5 if llm.served_dtype == np.float32 else 1.5 * distance(plain_gradient(rounded)[0], expected)
    assert distance(gradient, expected) < limit


def test_tiles_have_the_rows_of_the_canonical_decode():
    assert ROW_TILE == MIN_DECODE_ROWS == MIN_LOGIT_ROWS
