"""Indices of scatters: what writes keeps its place, the rest lies past the end, and no two are alike."""

import jax
import numpy as np

from duetto.kvcache.pages import Batch, is_new_token
from duetto.model.layers import index_or_drop, mark_first_occurrences


def test_indices_are_unique_and_those_that_write_keep_theirs():
    index, write = np.array([[3, 3, 1], [3, 0, 0]], np.int32), np.array([[1, 0, 1], [0, 1, 0]], bool)
    found = np.asarray(jax.jit(index_or_drop, static_argnums=2)(index, write, 5))
    assert (found[write] == index[write]).all() and (found[~write] >= 5).all()
    assert len(np.unique(found)) == found.size


def test_an_id_that_comes_again_is_not_the_first():
    assert jax.jit(mark_first_occurrences)(np.array([[4, 4, 2, 4], [1, 2, 3, 4]], np.int32)).tolist() == [
        [True, False, True, False],
        [True, True, True, True],
    ]


def test_tokens_shared_by_two_rows_are_written_once():
    """Rows of 4 tokens that begin with the last of the row before, then another request's."""
    ints = lambda *x: np.array(x, np.int32)
    batch = Batch(np.zeros((4, 4), np.int32), ints(0, 3, 6, 2), ints(4, 4, 2, 3), (), ints(7, 7, 7, 1))
    assert jax.jit(is_new_token)(batch).tolist() == [
        [True, True, True, True],
        [False, True, True, True],
        [False, True, False, False],
        [True, True, True, False],
    ]
