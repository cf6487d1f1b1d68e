"""The GPU's kernel for one token's step through a memory, interpreted: what the plain step computes."""

from functools import partial

import jax
import numpy as np
import pytest

from duetto.kvcache.kernels.recurrent_step import StatePages, step_pages
from duetto.model.recurrent.linear import Terms, step_recurrence

HEADS, PAGES, KEY, VALUE, ROWS = 3, 9, 16, 32, 4


@pytest.mark.parametrize("by_dimension", [False, True])
@pytest.mark.parametrize("rate", [False, True])
def test_the_kernel_takes_a_memory_on_in_its_page(by_dimension, rate):
    """One row begins, one has no page to write; no other page changes."""
    draw = np.random.default_rng(0)

    def numbers(*sizes: int) -> np.ndarray:
        return draw.standard_normal(sizes).astype(np.float32)

    q, k = (np.float32(0.3) * numbers(ROWS, HEADS, KEY) for _ in range(2))
    decay = np.exp(-np.abs(numbers(ROWS, HEADS, *([KEY] if by_dimension else []))))
    own_rate = 1 / (1 + np.exp(-numbers(ROWS, HEADS))) if rate else None
    terms = Terms(q, k, numbers(ROWS, HEADS, VALUE), decay, own_rate)
    pool, source = numbers(HEADS, PAGES, KEY, VALUE), np.array([2, -1, 5, 7], np.int32)
    target = np.array([2, 3, 6, PAGES + 1], np.int32)
    wanted, before = np.array(pool), np.array(pool)[:, np.maximum(source, 0)]
    before[:, source < 0] = 0
    after, answers = jax.jit(step_recurrence)(before, terms)
    wanted[:, target[:3]] = np.asarray(after)[:, :3]
    found, out = jax.jit(partial(step_pages, interpret=True))(pool, StatePages(source, target), terms)
    np.testing.assert_allclose(out, answers, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
