"""The keys that queries choose: the best by their scores, of equal ones the first, beside any others."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.models import RANDOM
from cases.programs import StoredJit

from duetto.kvcache.kernels.attention import fits_triton_kernel
from duetto.kvcache.pages import KEYS_PER_BLOCK
from duetto.kvcache.sparse_attention import select_top_keys
from duetto.model.attention import AttentionParams, Selection
from duetto.model.config import Latent
from duetto.model.latent import active_indexer
from duetto.serve.host.devices import processor_flags

pytestmark = pytest.mark.as_served

N, SIZE, KEYS, BLOCKS = 5, 24, 70, 3


@partial(StoredJit, static_argnames=("keys", "blocks"))
def chosen(q, weights, index, start, count, keys: int, blocks: int):
    """Which keys [B,T,blocks*BLOCK] the queries of rows choose, whose index keys are [B,places,SIZE]."""
    rows = jnp.arange(len(q), dtype=jnp.int32)
    pos = start[:, None] + jnp.arange(q.shape[1], dtype=jnp.int32)[None]
    end = jnp.where(count > 0, start + count, 0)

    def block(rows, j):
        at = j[:, None] * KEYS_PER_BLOCK + jnp.arange(KEYS_PER_BLOCK, dtype=jnp.int32)[None]
        return jnp.take_along_axis(index[rows], at[..., None], axis=1, mode="clip")[None]

    found = select_top_keys(Selection(q, weights, keys), pos, end, blocks * KEYS_PER_BLOCK, block)
    parts = [found.sees(rows, jnp.int32(j), KEYS_PER_BLOCK) for j in range(blocks)]
    at = jnp.arange(blocks * KEYS_PER_BLOCK, dtype=jnp.int32)[None, None]
    return jnp.concatenate(parts, axis=2) & (at <= pos[..., None])


def drawn(B: int, T: int, whole: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, weights and index keys; small whole numbers have many equal scores."""
    random = np.random.default_rng(B * T)
    shapes = (B, T, N, SIZE), (B, T, N), (B, BLOCKS * KEYS_PER_BLOCK, SIZE)
    found = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    q, weights, index = map(np.round, found) if whole else found
    return q, weights, index


def expected(q: np.ndarray, weights: np.ndarray, index: np.ndarray, pos: int) -> np.ndarray:
    """Of one query, by sorting."""
    scores = (np.maximum(index[: pos + 1] @ q.T, 0) * weights).sum(-1)
    return np.sort(np.argsort(-scores, kind="stable")[:KEYS])


@pytest.mark.parametrize("whole", [False, True], ids=["scores", "equal scores"])
@pytest.mark.parametrize(("start", "T"), [((300, 5, 69, 130), 1), ((0,), 320)])
def test_the_best_are_chosen_and_of_equal_ones_the_first(whole, start, T):
    q, weights, index = drawn(len(start), T, whole)
    count = np.full(len(start), T, np.int32)
    found = np.asarray(chosen(q, weights, index, np.array(start, np.int32), count, KEYS, BLOCKS))
    for row, first in enumerate(start):
        for t in range(T):
            wanted = expected(q[row, t], weights[row, t], index[row], first + t)
            np.testing.assert_array_equal(np.flatnonzero(found[row, t]), wanted)


def test_neighbours_and_the_tables_width_change_no_choice():
    (q, weights, index), start = drawn(8, 1), np.array([300, 5, 69, 130, 255, 256, 0, 71], np.int32)
    count = np.ones(8, np.int32)
    together = np.asarray(chosen(q, weights, index, start, count, KEYS, 40))[..., : BLOCKS * KEYS_PER_BLOCK]
    for row in range(8):
        one = slice(row, row + 1)
        alone = chosen(q[one], weights[one], index[one], start[one], count[one], KEYS, BLOCKS)
        np.testing.assert_array_equal(np.asarray(alone)[0], together[row])


# where XLA multiplies by AMX, bits depend on a shape: the start of an engine compares its steps
has_amx = pytest.mark.skipif("amx_bf16" in processor_flags(), reason="XLA multiplies by AMX")


@pytest.mark.parametrize(
    "dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=has_amx)], ids=["float32", "bfloat16"]
)
def test_a_score_has_the_same_bits_in_every_shape(dtype):
    q, weights, index = drawn(1, 256)
    q, k = q.astype(dtype), index[:, :KEYS_PER_BLOCK].astype(dtype)

    @jax.jit
    def order(q, weights, k):
        return Selection(q, weights, KEYS).sortable_scores(k)

    whole = np.asarray(order(q, weights, k))[0]
    for B, T in ((1, 64), (2, 32), (8, 1), (16, 1), (64, 1)):
        some = q[0, : B * T].reshape(B, T, N, SIZE)
        found = order(some, weights[0, : B * T].reshape(B, T, N), np.broadcast_to(k, (B, *k.shape[1:])))
        np.testing.assert_array_equal(np.asarray(found).reshape(B * T, KEYS_PER_BLOCK), whole[: B * T])


def test_an_indexer_that_may_choose_all_is_left_out():
    """Its keys are not kept, and what is seen is all."""
    config = RANDOM["latent"]
    first, rest = (config.drop_unreached_limits(length).layers[0] for length in (21, 20))
    assert (
        first == config.layers[0]
        and first.attention
        and first.attention.cache_shapes[1] == (1, 12)
        and active_indexer(first)
    )
    assert isinstance(rest.mixer, Latent) and rest.mixer.indexer is not None
    assert rest.mixer.cache_shapes[1] is None and active_indexer(rest) is None


def test_kernels_do_not_choose():
    q, pool = jnp.zeros((1, 1, 4, 64), jnp.bfloat16), jnp.zeros((1, 9, 16, 64), jnp.bfloat16)
    selection = Selection(jnp.zeros((1, 1, 2, 32)), jnp.zeros((1, 1, 2)), 8)
    assert fits_triton_kernel(q, pool, None, AttentionParams(1.0, rank=48))
    assert not fits_triton_kernel(q, pool, pool, AttentionParams(1.0, rank=48, selection=selection))
