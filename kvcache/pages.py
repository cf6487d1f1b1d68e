"""The paged cache: pools of pages on the device, the batch that a step is told, and attention that reads pages where they lie.

Paging is PagedAttention's (Kwon et al., arXiv 2309.06180). Keys are read in blocks of a fixed number of positions, in order, with
a running softmax (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, Dao et al., arXiv 2205.14135). A block without visible
keys changes no bit of the result, so a row's output depends neither on its neighbours' lengths nor on the page size.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from ..model.attention import MASKED, Attend, grouped
from ..model.config import ModelConfig
from ..model.layers import einsum
from ..model.tree import pytree

BLOCK = 128  # key positions read at once; page sizes divide it or are multiples of it


@pytree
class KVCache:
    """A pool of pages per layer, head-major; position p of a row is slot p % W of its page p // W."""

    k: tuple[jax.Array, ...]  # L of [K,P,W,H]
    v: tuple[jax.Array, ...]  # L of [K,P,W,H]

    @property
    def pages(self) -> int:
        return self.k[0].shape[1]

    @property
    def page_size(self) -> int:
        return self.k[0].shape[2]


@pytree
class Batch:
    """All that a step is told of its rows. Positions, write slots, masks and lengths follow from it.

    A token below zero stands for the last token sampled in the row's slot, which the host need not know yet.
    """

    tokens: Any  # int32 [B,T], padded on the right
    start: Any  # int32 [B], tokens already in the cache
    count: Any  # int32 [B], real tokens among the T; 0 is an empty row
    page_table: Any  # int32 [B,M], the row's pages in order
    slot: Any  # int32 [B], which slot of the sampling state the row owns


def positions(batch: Batch) -> Int[Array, "B T"]:
    return batch.start[:, None] + jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]


def page_bytes(config: ModelConfig, page_size: int, dtype: Any) -> int:
    """Bytes of one page in all layers, keys and values."""
    row = config.num_kv_heads * config.head_size * jnp.dtype(dtype).itemsize
    return 2 * config.num_layers * page_size * row


def empty_cache(config: ModelConfig, pages: int, page_size: int, dtype: Any) -> KVCache:
    """A cache of zeros. Raises ValueError for a page size that does not fit the blocks that attention reads."""
    if page_size < 1 or (BLOCK % page_size and page_size % BLOCK):
        raise ValueError(f"page_size {page_size} must divide {BLOCK} or be a multiple of it")
    shape = config.num_kv_heads, pages, page_size, config.head_size
    layers = range(config.num_layers)
    return KVCache(*(tuple(jnp.zeros(shape, dtype) for _ in layers) for _ in "kv"))


def write(pool: Array, page: Array, offset: Array, new: Array) -> Array:
    """Put new [B,T,K,H] into a pool; a page number past the pool drops its token."""
    head = jnp.arange(pool.shape[0], dtype=jnp.int32)[
        :, None, None
    ]  # a slice here costs a TPU a copy of the pool
    new = new.transpose(2, 0, 1, 3).astype(pool.dtype)
    return pool.at[head, page[None], offset[None]].set(new, mode="drop")


def read_block(pool: Array, page_table: Array, j: Array) -> Array:
    """Positions [j*BLOCK, (j+1)*BLOCK) of every row, [K,B,BLOCK,H]."""
    K, _, W, H = pool.shape
    B = page_table.shape[0]
    if W <= BLOCK:
        pages = jax.lax.dynamic_slice_in_dim(page_table, j * (BLOCK // W), BLOCK // W, axis=1)
        return pool[:, pages].reshape(K, B, BLOCK, H)
    blocks = pool.reshape(K, -1, BLOCK, H)  # a page of several blocks, seen as so many small pages
    per_page = W // BLOCK
    page = jax.lax.dynamic_slice_in_dim(page_table, j // per_page, 1, axis=1)[:, 0]
    return blocks[:, page * per_page + j % per_page]


def running_softmax(q: Array, batch: Batch, pools: tuple[Array, Array], pos: Array) -> Array:
    """Attention of q [B,T,K,G,H] over the rows' pages -> [B,T,K,G,H]."""
    B, T, K, G, H = q.shape
    end = batch.start + batch.count
    q = q.transpose(2, 0, 1, 3, 4).reshape(K, B, T * G, H)
    pos = jnp.repeat(pos, G, axis=1)  # [B,T*G]

    def block(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = carry
        at = j * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
        k, v = (read_block(pool, batch.page_table, j) for pool in pools)
        # a page's unwritten tail may hold anything
        v = jnp.where((at[None] < end[:, None])[None, ..., None], v, 0)
        scores = einsum("kbqh,kbsh->kbqs", q, k, jnp.float32) * H**-0.5
        scores = jnp.where((at[None, None] <= pos[..., None])[None], scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        fade, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[..., None])
        add = einsum("kbqs,kbsh->kbqh", weights.astype(v.dtype), v, jnp.float32)
        return new_top, total * fade + weights.sum(-1), out * fade[..., None] + add

    blocks = jnp.max(jnp.where(batch.count > 0, (end + BLOCK - 1) // BLOCK, 0))
    first = jnp.full((K, B, T * G), MASKED), jnp.zeros((K, B, T * G)), jnp.zeros((K, B, T * G, H))
    _, total, out = jax.lax.fori_loop(0, blocks, block, first)
    out = out / jnp.maximum(total, 1e-30)[..., None]
    return out.reshape(K, B, T, G, H).transpose(1, 2, 0, 3, 4)


def paged(batch: Batch) -> Attend:
    """`attend` over a KVCache: writes the rows' new keys and values into their pages, then reads the pages."""

    def attend(cache: KVCache, layer: int, q: Array, k: Array, v: Array) -> tuple[KVCache, Array]:
        W, pos = cache.page_size, positions(batch)
        entry = jnp.minimum(pos // W, batch.page_table.shape[1] - 1)
        real = jnp.arange(pos.shape[1], dtype=jnp.int32)[None] < batch.count[:, None]
        page = jnp.where(real, jnp.take_along_axis(batch.page_table, entry, 1), cache.pages)
        pools = tuple(write(p[layer], page, pos % W, new) for p, new in ((cache.k, k), (cache.v, v)))
        out = running_softmax(grouped(q, k.shape[2]), batch, pools, pos).astype(q.dtype).reshape(q.shape)
        return KVCache(replace(cache.k, layer, pools[0]), replace(cache.v, layer, pools[1])), out

    return attend


def replace(pools: tuple[Array, ...], layer: int, pool: Array) -> tuple[Array, ...]:
    return pools[:layer] + (pool,) + pools[layer + 1 :]
