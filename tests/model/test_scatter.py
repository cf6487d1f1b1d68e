"""Indices of scatters: what writes keeps its place, the rest lies past the end, and no two are alike."""

import jax
import numpy as np

from duetto.kvcache.pages import Batch, new_tokens
from duetto.model.layers import apart, first_of_each


def test_indices_are_unique_and_those_that_write_keep_theirs():
    index, write = np.array([[3, 3, 1], [3, 0, 0]], np.int32), np.array([[1, 0, 1], [0, 1, 0]], bool)
    found = np.asarray(jax.jit(apart, static_argnums=2)(index, write, 5))
    assert (found[write] == index[write]).all() and (found[~write] >= 5).all()
    assert len(np.unique(found)) == found.size


def test_an_id_that_comes_again_is_not_the_first():
    assert jax.jit(first_of_each)(np.array([[4, 4, 2, 4], [1, 2, 3, 4]], np.int32)).tolist() == [
        [True, False, True, False],
        [True, True, True, True],
    ]


def test_a_token_that_two_rows_of_a_scored_prompt_share_is_written_once():
    """Rows of 4 tokens that begin with the last of the row before, then another request's."""
    ints = lambda *x: np.array(x, np.int32)
    batch = Batch(np.zeros((4, 4), np.int32), ints(0, 3, 6, 2), ints(4, 4, 2, 3), (), ints(7, 7, 7, 1))
    assert jax.jit(new_tokens)(batch).tolist() == [
        [True, True, True, True],
        [False, True, True, True],
        [False, True, False, False],
        [True, True, True, False],
    ]
