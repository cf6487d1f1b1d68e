"""New heads by duetto's own CPU kernels: turned in 32 bits and rounded once, and written in place."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.paged_attention import random

from duetto.cpu_kernels.library import load_library
from duetto.kvcache.kernels.cpu_rope import cpu_rope_and_write, has_cpu_rope
from duetto.kvcache.paged_attention import PagedAttend
from duetto.kvcache.pages import Batch, KVCache
from duetto.kvcache.quantised import choose_cache_format, empty_pool
from duetto.kvcache.tree_attention import initial_branches, make_branch_attend
from duetto.model.attention import AttentionParams, NewHeads
from duetto.model.config import NormKind
from duetto.model.rope import Rope, RotaryFactors, rotary_factors

pytestmark = pytest.mark.skipif(not load_library().isas, reason=load_library().refusal)
parametrized = pytest.mark.parametrize("isa", load_library().isas)
N, K, P, W = 6, 2, 5, 16
SIZES = (64, 64), (16, 16), (80, 32), (48, 24), (256, 256)  # of a head, and of what is turned of it


def bits(x: Any) -> np.ndarray:
    """Numbers as a CPU's pools keep them."""
    x = np.asarray(x)
    return x.view(np.uint16) if x.dtype == jnp.bfloat16 else x


def given(rows: int, T: int, H: int, turned: int, dtype: Any) -> tuple[NewHeads, tuple[Any, Any], Any]:
    """Rows of T tokens at places of their own; every third token is not written."""
    q, k, v = (random(seed, (rows, T, n, H), dtype) for seed, n in enumerate((N, K, K)))
    at = np.arange(rows * T, dtype=np.int32).reshape(rows, T)
    cos, sin = jax.jit(lambda at: rotary_factors(at, Rope(), turned)[:2])(37 * at)
    pools = tuple(bits(random(seed, (K, P, W, H), dtype)) for seed in (3, 4))
    page = np.where(at % 3 == 2, P + at, at % P).astype(np.int32)
    return NewHeads(q, k, v, RotaryFactors(cos, sin)), (pools[0], pools[1]), (page, at // P)


def expected(x: np.ndarray, rotary: RotaryFactors) -> np.ndarray:
    """Heads that are turned by NumPy, which rounds each sum and each product."""
    cos, sin = (np.asarray(part) for part in rotary[:2])
    pairs = cos.shape[-1]
    left, right = (x[..., i * pairs : (i + 1) * pairs].astype(np.float32) for i in range(2))
    parts = left * cos - right * sin, right * cos + left * sin
    return np.concatenate([*(part.astype(x.dtype) for part in parts), x[..., 2 * pairs :]], axis=-1)


def made(new: NewHeads, pools: Any, place: Any, isa: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, (keys, values) = jax.jit(partial(cpu_rope_and_write, isa=isa))(new, pools, place)
    return np.asarray(q), np.asarray(keys), np.asarray(values)


@parametrized
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("H, turned", SIZES)
def test_rotary_embedding_is_applied_and_heads_are_written(H: int, turned: int, dtype: Any, isa: str):
    new, pools, place = given(3, 4, H, turned, dtype)
    q, keys, values = made(new, pools, place, isa)
    np.testing.assert_array_equal(q, expected(np.asarray(new.q), new.rotary))
    wanted = tuple(pool.copy() for pool in pools)
    for pool, heads in zip(wanted, (expected(np.asarray(new.k), new.rotary), new.v), strict=True):
        for row, token in np.argwhere(place[0] < P):
            pool[:, place[0][row, token], place[1][row, token]] = bits(heads)[row, token]
    np.testing.assert_array_equal(keys, wanted[0])
    np.testing.assert_array_equal(values, wanted[1])
    assert (keys != pools[0]).any(axis=(0, 3)).sum() == (place[0] < P).sum() == 8


@parametrized
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_has_the_same_bits_beside_any_others(dtype: Any, isa: str):
    """32 rows are the work of several threads, fewer that of one."""
    new, pools, (page, offset) = given(32, 1, 256, 96, dtype)
    q, *kept = made(new, pools, (page, offset), isa)
    for rows in (1, 2, 8):
        for at in (0, 32 - rows):
            of = slice(at, at + rows)
            own = jax.tree.map(lambda x, of=of: x[of], new)
            found, *parts = made(own, pools, (page[of], offset[of]), isa)
            np.testing.assert_array_equal(found, q[of])
            where = page[of][page[of] < P], offset[of][page[of] < P]
            for part, whole in zip(parts, kept, strict=True):
                np.testing.assert_array_equal(part[:, *where], whole[:, *where])


@parametrized
@pytest.mark.parametrize("norm", [None, NormKind()], ids=["plain", "normed"])
def test_a_step_with_donated_pools_writes_them_in_place(norm: NormKind | None, isa: str):
    """`PagedAttend` has the bits of the reference's writes, but for how the turn is rounded."""
    new, pools, _ = given(3, 1, 64, 64, jnp.float32)
    gains = tuple(random(seed, (64,), np.float32) for seed in (7, 8)) if norm else (None, None)
    new = NewHeads(new.q, new.k, new.v, new.rotary, gains, norm)
    rows = (0, 17, 40), (1, 1, 0), ([0, 1, 2], [3, 4, 0], [1, 2, 0]), range(3)
    start, count, table, slot = (jnp.array(x, jnp.int32) for x in rows)
    batch = Batch(jnp.zeros((3, 1), jnp.int32), start, count, (table,), slot)
    reading = AttentionParams(0.125)

    def cache(isa: str | None) -> KVCache:
        return KVCache(*((jnp.array(pool),) for pool in pools), isa=isa)

    def step(cache: KVCache, new: NewHeads) -> Any:
        attend = PagedAttend(batch, (None,))
        assert attend.can_fuse_rope(cache, 0, new.q, norm) == (cache.isa is not None)
        return attend.attend_with_rope(cache, 0, new, reading)

    program = jax.jit(step, donate_argnums=0).lower(cache(isa), new).compile()
    memory = program.memory_analysis()
    assert f"duetto_turn_{isa}" in str(program.as_text()) and memory is not None
    assert memory.alias_size_in_bytes == sum(pool.nbytes for pool in pools)
    assert memory.temp_size_in_bytes < pools[0].nbytes  # no copy of a pool
    (changed, found), (plain, wanted) = program(cache(isa), new), jax.jit(step)(cache(None), new)
    real = (changed.k[0], changed.v[0], found[:2]), (plain.k[0], plain.v[0], wanted[:2])
    for own, other in zip(*real, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(changed.v[0], plain.v[0])


@parametrized
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_nodes_of_a_tree_have_the_bits_of_decode(dtype: Any, isa: str):
    """Nodes in a chain, whose keys are not written, beside steps of one token each."""
    n, start, (new, pools, _) = 3, 14, given(3, 1, 64, 64, dtype)
    at = jnp.arange(start, start + n, dtype=jnp.int32)
    turn = RotaryFactors(*jax.jit(lambda at: rotary_factors(at, Rope(), 64)[:2])(at[:, None]))
    new, table, one = replace(new, rotary=turn), jnp.array([[3, 1]], jnp.int32), jnp.ones(1, jnp.int32)
    reading = AttentionParams(0.125)

    def batch(start: Any, rows: int) -> Batch:
        ints = jnp.zeros((rows, 1), jnp.int32), start, jnp.repeat(one, rows), jnp.repeat(table, rows, 0)
        return Batch(*ints[:3], (ints[3],), jnp.zeros(rows, jnp.int32))

    def decoded(cache: KVCache, new: NewHeads) -> list[Any]:
        found = []
        for i in range(n):
            own = jax.tree.map(lambda x, i=i: x[i : i + 1], new)
            cache, out = PagedAttend(batch(at[i : i + 1], 1), (None,)).attend_with_rope(
                cache, 0, own, reading
            )
            found.append(out)
        return found

    def verified(cache: KVCache, new: NewHeads) -> Any:
        path = np.minimum(np.arange(n)[None], np.arange(n)[:, None]).astype(np.int32)
        attend: Any = make_branch_attend(batch(at, n), (None,), path, np.arange(n, dtype=np.int32))
        assert attend.can_fuse_rope(initial_branches(cache), 0, new.q, None)
        return attend.attend_with_rope(initial_branches(cache), 0, new, reading)[1]

    cache = KVCache(*((jnp.array(pool),) for pool in pools), isa=isa)
    wanted = jnp.concatenate(jax.jit(decoded)(cache, new))
    assert np.isfinite(np.float32(wanted)).all()
    np.testing.assert_array_equal(jax.jit(verified)(cache, new), wanted)


def test_what_the_kernel_does_not_take():
    q, pool = np.zeros((1, 1, 4, 64), np.float32), np.zeros((2, P, W, 64), np.float32)
    assert has_cpu_rope(q, (pool, pool))
    codes = empty_pool(pool.shape, choose_cache_format("int8", jnp.float32))
    assert not has_cpu_rope(q, (codes, codes))
    assert not has_cpu_rope(q.astype(np.float16), (pool, pool))
    assert not has_cpu_rope(q[..., :40], (pool[..., :40], pool[..., :40]))
