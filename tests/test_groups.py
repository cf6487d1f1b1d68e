"""Rows read in groups of like length: every block once, and the bits of a row read beside any others."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from duetto.kvcache.groups import MOST, by_length
from duetto.kvcache.pages import BLOCK, Batch, as_dtype, pool_dtype, read_keys, running_softmax
from duetto.model.attention import Reading

pytestmark = pytest.mark.as_served

K, G, H, W, M, T = 2, 3, 16, 64, 10, 2


@pytest.mark.parametrize("tokens", [1, 3, 32])
@pytest.mark.parametrize("rows", [1, 2, 6, 8, 10, 13, 16, 32, 40])
def test_each_row_is_read_to_its_end_and_no_group_beyond_its_longest(rows: int, tokens: int):
    lengths = np.random.default_rng(rows).integers(0, 10, rows)
    groups = by_length(jnp.asarray(lengths, jnp.int32), tokens)
    visits: dict[int, list[int]] = {row: [] for row in range(rows)}
    _, own, j = map(np.asarray, jax.vmap(groups.step)(jnp.arange(groups.until[-1])))
    for members, block in zip(own, j, strict=True):
        for row in members:
            visits[int(row)].append(int(block))
    assert all(n == [*range(len(n))] and len(n) >= lengths[row] for row, n in visits.items())
    longest = sorted(lengths, reverse=True)[:: groups.size]
    assert len(longest) <= MOST and len(own) == sum(longest)


def attend(rows: np.ndarray, starts: np.ndarray, window: int | None, dtype: jnp.dtype) -> np.ndarray:
    """Attention of some of 32 rows, each with its own query, pages and length."""
    draw = np.random.default_rng(0)
    numbers = partial(draw.normal, size=(K, 32 * M, W, H))
    k, v = (as_dtype(jnp.asarray(numbers(), dtype), pool_dtype(dtype, jax.devices()[0])) for _ in range(2))
    q = jnp.asarray(draw.normal(size=(32, T, K * G, H)), dtype)
    sinks = jnp.asarray(draw.normal(size=K * G), dtype)
    table = jnp.asarray(draw.permutation(32 * M).reshape(32, M)[rows], jnp.int32)
    count, reading = jnp.asarray(rows % (T + 1), jnp.int32), Reading(H**-0.5, window, sinks=sinks)
    batch = Batch(
        jnp.zeros((len(rows), T), jnp.int32), jnp.asarray(starts[rows], jnp.int32), count, (table,), count
    )
    read = partial(read_keys, (k, v), table, reading, dtype)
    found = np.asarray(jax.jit(lambda q: running_softmax(q, batch, read, reading))(q[rows]))
    return np.where((np.arange(T)[None] < np.asarray(count)[:, None])[..., None, None], found, 0)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_has_the_same_bits_beside_any_others(window, dtype):
    starts = np.random.default_rng(1).integers(0, M * W - T, 32)
    starts[:3] = 0, BLOCK - 1, BLOCK
    together = attend(np.arange(32), starts, window, dtype)
    for rows in (np.arange(8), np.arange(31, 7, -1), np.array([5, 30, 2, 9, 11, 17, 3, 8])):
        np.testing.assert_array_equal(attend(rows, starts, window, dtype), together[rows])
