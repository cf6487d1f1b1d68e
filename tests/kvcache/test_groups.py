"""Rows read in groups of like length: every block once, and the bits of a row read beside any others."""

import math
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.programs import StoredJit
from suite.marks import full, full_if

from duetto.kvcache.groups import MAX_GROUPS, group_by_length
from duetto.kvcache.pages import KEYS_PER_BLOCK, Batch, attend_key_blocks, exp_by_vectors, read_kv_block
from duetto.kvcache.quantised import cast_bits, pool_dtype
from duetto.model.attention import MASK_VALUE, AttentionParams

pytestmark = pytest.mark.as_served

K, H, W, M = 2, 16, 64, 10


@partial(StoredJit, static_argnames=["tokens"])
def steps(lengths: jax.Array, tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where groups end, and the rows and the block of each step up to there; more steps follow."""
    groups = group_by_length(lengths, tokens)
    _, own, j = jax.vmap(groups.locate_step)(jnp.arange(10 * len(lengths)))
    return groups.end_steps, own, j


@full_if(lambda rows: rows in (2, 10, 13, 32))
@pytest.mark.parametrize("tokens", [1, 3, 32])
@pytest.mark.parametrize("rows", [1, 2, 6, 8, 10, 13, 16, 32, 40])
def test_groups_read_each_row_and_end_with_the_longest(rows: int, tokens: int):
    lengths = np.random.default_rng(rows).integers(0, 10, rows)
    until, own, j = map(np.asarray, steps(lengths.astype(np.int32), tokens))
    own, j = own[: until[-1]], j[: until[-1]]
    visits: dict[int, list[int]] = {row: [] for row in range(rows)}
    for members, block in zip(own, j, strict=True):
        for row in members:
            visits[int(row)].append(int(block))
    assert all(n == [*range(len(n))] and len(n) >= lengths[row] for row, n in visits.items())
    longest = sorted(lengths, reverse=True)[:: own.shape[1]]
    assert len(longest) <= MAX_GROUPS and len(own) == sum(longest)


@cache
def numbers(dtype: jnp.dtype, T: int, G: int) -> tuple[Any, Any, Any, np.ndarray, np.ndarray]:
    """Pools of keys and of values, sinks; each of 32 rows' query and pages."""
    draw = np.random.default_rng(0)
    pool = pool_dtype(dtype, jax.devices()[0])
    kept = jax.jit(cast_bits, static_argnums=1)
    k, v = (kept(draw.normal(size=(K, 32 * M, W, H)).astype(dtype), pool) for _ in range(2))
    q, sinks = (draw.normal(size=size).astype(dtype) for size in ((32, T, K * G, H), K * G))
    return k, v, sinks, q, draw.permutation(32 * M).reshape(32, M).astype(np.int32)


@partial(StoredJit, static_argnames=("window", "dtype"))
def attention(q, k, v, sinks, batch: Batch, window: int | None, dtype: jnp.dtype) -> jax.Array:
    reading = AttentionParams(H**-0.5, window, sinks=sinks)
    read = partial(read_kv_block, (k, v), batch.page_tables[0], reading, dtype)
    return attend_key_blocks(q, batch, read, reading)


def attend(rows: np.ndarray, starts: np.ndarray, window: int | None, *kind: Any) -> np.ndarray:
    """Attention of some of 32 rows, each with its own query, pages and length; `kind` as in `numbers`."""
    k, v, sinks, q, table = numbers(*kind)
    dtype, T, _ = kind
    count = (rows % (T + 1)).astype(np.int32)
    tokens = np.zeros((len(rows), T), np.int32)
    batch = Batch(tokens, starts[rows].astype(np.int32), count, (table[rows],), count)
    found = np.asarray(attention(q[rows], k, v, sinks, batch, window, dtype))
    return np.where((np.arange(T)[None] < count[:, None])[..., None, None], found, 0)


@full_if(lambda window, kind: (window is None) != (kind[1] == 1))
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    "kind",
    [(jnp.float32, 2, 3), (jnp.float32, 1, 7), full((jnp.bfloat16, 2, 3))],
    ids=["float32", "float32, decode", "bfloat16"],
)
def test_a_row_has_the_same_bits_beside_any_others(window, kind):
    """In groups of 4, 6 and 8 rows; in decode, of 8 rows, alone and among others."""
    starts = np.random.default_rng(1).integers(0, M * W - 2, 32)
    starts[:3] = 0, KEYS_PER_BLOCK - 1, KEYS_PER_BLOCK
    together = attend(np.arange(32), starts, window, *kind)
    for rows in (np.arange(8), np.arange(31, 7, -1), np.array([5, 30, 2, 9, 11, 17, 3, 8])):
        np.testing.assert_array_equal(attend(rows, starts, window, *kind), together[rows])


@cache
def powers() -> tuple[Any, np.ndarray, np.ndarray]:
    """A program of powers in a loop of their own, numbers, and their powers in one row."""
    program = jax.jit(lambda x: exp_by_vectors(x - 0.1))
    numbers = -np.linspace(1e-4, 8, 1 << 15, dtype=np.float32)
    return program, numbers, np.asarray(program(numbers))


@pytest.mark.parametrize("shape", [(2, 4, 6), (2, 6, 6), (2, 8, 3), (3, 8, 3), (3, 5, 3), (1, 4), (7,)])
def test_powers_have_the_same_bits_in_any_shape(shape):
    """As a group's running softmax takes them. With `jnp.exp` it fails on jax 0.12."""

    def parts(x: np.ndarray) -> np.ndarray:
        size = math.prod(shape)
        return x[: len(x) // size * size].reshape(-1, *shape)[::40]

    program, numbers, expected = powers()
    np.testing.assert_array_equal([program(part) for part in parts(numbers)], parts(expected))


def test_powers_of_nothing_and_of_keys_that_are_not_seen():
    assert exp_by_vectors(jnp.array([0.0, MASK_VALUE, -jnp.inf])).tolist() == [1, 0, 0]
