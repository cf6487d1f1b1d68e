"""The GPU's kernel for new heads, interpreted: the bits of norms, turn and writes one by one."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.paged_attention import random
from suite.marks import full_if

from duetto.kvcache.kernels.gpu_rope import fits_gpu_rope, gpu_rope_and_write
from duetto.kvcache.pages import write_kv_to_slots
from duetto.kvcache.quantised import choose_cache_format, empty_pool
from duetto.model.attention import NewHeads
from duetto.model.config import GroupedQuery, NormKind
from duetto.model.kinds import has_fusible_rope
from duetto.model.rope import Rope, rotary_factors

PLAIN, OFFSET = NormKind("rms", 1e-6), NormKind("rms", 1e-5, offset=1.0)
CASES = {
    "heads of 64": (GroupedQuery(6, 2, 64), jnp.float32),
    "a query head for each key head": (GroupedQuery(3, 3, 32), jnp.bfloat16),
    "normed": (GroupedQuery(8, 1, 64, qk_norm=PLAIN), jnp.bfloat16),
    "normed around one": (GroupedQuery(4, 2, 16, qk_norm=OFFSET), jnp.float32),
    "a part of the head": (GroupedQuery(4, 2, 80, rotary_size=32), jnp.bfloat16),
    "a part of the head, normed": (GroupedQuery(4, 2, 128, rotary_size=64, qk_norm=PLAIN), jnp.float32),
}
P, W = 5, 16


def given(c: GroupedQuery, dtype: Any) -> tuple[NewHeads, tuple[Any, Any], tuple[Any, Any]]:
    """Two rows of three tokens, of which one is not written."""
    heads = (0, c.num_heads), (5, c.num_kv_heads), (6, c.num_kv_heads)
    q, k, v = (random(seed, (2, 3, n, c.head_size), dtype) for seed, n in heads)
    at = np.array([[0, 1, 2], [700, 701, 702]], np.int32)
    gains: Any = tuple(random(seed, (c.head_size,), dtype) for seed in (1, 2)) if c.qk_norm else (None, None)
    assert c.rope is not None
    turn = jax.jit(lambda at: rotary_factors(at, c.rope, c.rotary_dims))(at)
    new = NewHeads(q, k, v, turn, gains, c.qk_norm)
    pools: Any = tuple(random(seed, (c.num_kv_heads, P, W, c.head_size), dtype) for seed in (3, 4))
    page, offset = np.array([[2, 2, 2], [4, 0, P + 3]], np.int32), (at % W).astype(np.int32)
    return new, pools, (page, offset)


@full_if(lambda c: c.num_heads in (3, 8) or c.head_size == 80)
@pytest.mark.parametrize("c, dtype", CASES.values(), ids=list(CASES))
def test_the_kernel_has_the_bits_of_each_by_itself(c: GroupedQuery, dtype: Any):
    new, pools, place = given(c, dtype)
    assert has_fusible_rope(c) and fits_gpu_rope(new.q, pools, c.qk_norm)

    def apart(new: NewHeads, pools: Any, place: Any) -> Any:
        q, k = new.rotated_qk
        return q, write_kv_to_slots(pools, place, k, new.v)

    found = jax.jit(partial(gpu_rope_and_write, interpret=True))(new, pools, place)
    wanted = jax.jit(apart)(new, pools, place)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert (np.asarray(found[1][0]) != pools[0]).any(axis=(0, 3)).sum() == 5  # tokens that are written


def test_what_the_kernel_does_not_take():
    q, pool = np.zeros((1, 1, 4, 64), np.float32), np.zeros((2, P, W, 64), np.float32)
    assert fits_gpu_rope(q, (pool, pool), None)
    codes = empty_pool(pool.shape, choose_cache_format("int8", jnp.float32))
    assert not fits_gpu_rope(q, (codes, codes), None)
    assert not fits_gpu_rope(q.astype(np.float16), (pool, pool), None)
    assert not fits_gpu_rope(q, (pool, pool), NormKind("layer", 1e-5))
    assert not fits_gpu_rope(q[..., :48], (pool[..., :48], pool[..., :48]), PLAIN)
    for changed in (
        {"rope": None},
        {"rope": Rope(interleaved=True)},
        {"norm_after_rope": True},
        {"kv_layers_back": 1},
    ):
        assert not has_fusible_rope(GroupedQuery(4, 2, 64, **changed))
