"""Pooled hidden states have the same bits in whatever chunks a prompt is read."""

from itertools import pairwise

import jax
import numpy as np
import pytest

from duetto.model.pooling import Pooler, PoolingParams, pool_hidden_states

T, D = 100, 24
pool_jit = jax.jit(pool_hidden_states)


@pytest.fixture(scope="module")
def hidden() -> np.ndarray:
    rng = np.random.default_rng(0)
    return (rng.standard_normal((T, D)) * 10.0 ** rng.integers(-3, 3, D)).astype(np.float32)


def pooled(hidden: np.ndarray, edges: list[int], params: PoolingParams, width: int = T) -> np.ndarray:
    found = Pooler(params, T)
    for start, end in pairwise(edges):
        rows = np.full((2, width, D), 7.0, np.float32)  # beside another row, and with others behind it
        rows[1, : end - start] = hidden[start:end]
        found.add_chunk(pool_jit(rows, np.array([3, end - start], np.int32)), 1, start, end)
    assert found.embedding is not None
    return found.embedding


@pytest.mark.parametrize("edges", [[0, T], [0, 1, T], [0, 64, 65, T], [0, 33, 66, 99, T]])
def test_chunks_do_not_matter(hidden, edges):
    last, mean = (PoolingParams(pooling=kind, normalize=False) for kind in ("last", "mean"))
    assert pooled(hidden, edges, last).tolist() == hidden[-1].tolist()
    assert pooled(hidden, edges, mean).tobytes() == pooled(hidden, [0, T], mean, width=128).tobytes()
    assert np.allclose(pooled(hidden, edges, mean), hidden.astype(np.float64).mean(axis=0), atol=1e-5)


def test_a_prompt_that_is_read_again_begins_again(hidden):
    mean = PoolingParams(pooling="mean")
    twice = Pooler(mean, T)
    for start, end in [(0, 64), (0, 50), (50, T)]:
        row = np.resize(hidden[start:end], (1, T, D))
        twice.add_chunk(pool_jit(row, np.array([end - start], np.int32)), 0, start, end)
    assert twice.embedding is not None
    assert twice.embedding.tolist() == pooled(hidden, [0, T], mean).tolist()


def test_embeddings_are_cut_before_they_are_normalised(hidden):
    found = pooled(hidden, [0, T], PoolingParams(dimensions=5, pooling="last"))
    own = hidden[-1, :5].astype(np.float64)
    assert found.tolist() == (own / np.linalg.norm(own)).astype(np.float32).tolist()


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("fields", [{"dimensions": 0}, {"normalize": 3}, {"pooling": "cls"}])
def test_wrong_parameters_are_named(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        PoolingParams(**fields)
