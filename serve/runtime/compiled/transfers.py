"""Programs that copy pages out of the pools, and back into them."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, Shaped

from ....kvcache.pages import KVCache
from ....model.config import LayerKind
from ....model.pair import PairConfig
from ....model.recurrent.kinds import STATE
from .compile import THREADS, StepArguments
from .executable_cache import cores

COUNTS = (1, 4, 16)  # pages of a copy; others are padded to the next of them
MOST = COUNTS[-1]
OFFERED = 8 * MOST  # pages of each window that are on their way out of a device at most
STAGED = 4 * MOST  # and on their way in

Leaves = tuple[Any, ...]  # of a window's pools, keys and values layer by layer: [K,n,W,H] each


def pools_of(config: PairConfig, cache: KVCache, window: int) -> KVCache:
    """The cache with the pools of a window's layers only."""
    chosen = config.windows[window]

    def own(pools: tuple[Any, ...], has: Callable[[LayerKind], Any]) -> tuple[Any, ...]:
        kept = zip(config.layers, pools, strict=True)
        return tuple(pool if has(layer) else None for layer, pool in kept)

    def keys(layer: LayerKind) -> bool:
        return layer.keys is not None and layer.keys.window == chosen

    states = own(cache.states, lambda layer: chosen == STATE)
    return KVCache(own(cache.k, keys), own(cache.v, keys), states, cache.isa)


def gather(config: PairConfig, window: int, cache: KVCache, pages: Int[Any, " n"]) -> Leaves:
    """Copies of a window's pages."""

    def taken(pool: Shaped[Any, "K P ..."]) -> Shaped[Any, "K n ..."]:
        return pool.at[heads(pool), pages[None]].get(mode="clip")

    return tuple(map(taken, jax.tree.leaves(pools_of(config, cache, window))))


def scatter(
    config: PairConfig, window: int, cache: KVCache, leaves: Leaves, pages: Int[Any, " n"]
) -> KVCache:
    """The cache with leaves in a window's pages; those with a number past the pool are dropped."""
    pools, structure = jax.tree.flatten(pools_of(config, cache, window))
    put = [
        pool.at[heads(pool), pages[None]].set(leaf, mode="drop", unique_indices=True)
        for pool, leaf in zip(pools, leaves, strict=True)
    ]
    changed = jax.tree.unflatten(structure, put)
    return jax.tree.map(
        lambda new, old: old if new is None else new, changed, cache, is_leaf=lambda x: x is None
    )


def heads(pool: Shaped[Any, "K P ..."]) -> Int[Any, "K 1"]:
    """Numbers of a pool's heads: with a slice in their place the whole pool would be transposed."""
    return jnp.arange(pool.shape[0], dtype=jnp.int32)[:, None]


class Transfers:
    """Compiled copies of each of COUNTS pages of each window. A scatter consumes the cache, and gives it
    back."""

    def __init__(self, config: PairConfig, like: StepArguments):
        self.config, self.like, self.windows = config, like, range(len(config.windows))
        lowered = {(g, n): (self._gather(g, n), self._scatter(g, n)) for g in self.windows for n in COUNTS}
        with ThreadPoolExecutor(max(2, cores() or 0), THREADS) as pool:
            jobs = {key: [pool.submit(x.compile) for x in pair] for key, pair in lowered.items()}
            self._compiled = {key: [job.result() for job in pair] for key, pair in jobs.items()}

    @cached_property
    def page_bytes(self) -> list[int]:
        """Bytes of one page of each window."""
        return [sum(leaf.size * leaf.dtype.itemsize for leaf in self.leaves(g, 1)) for g in self.windows]

    def leaves(self, window: int, n: int) -> Leaves:
        """Leaves of n pages of a window as shapes."""
        pools = jax.tree.leaves(pools_of(self.config, self.like.cache, window))
        return tuple(
            jax.ShapeDtypeStruct((x.shape[0], n, *x.shape[2:]), x.dtype, sharding=x.sharding) for x in pools
        )

    def gather(self, cache: KVCache, window: int, pages: Sequence[int]) -> Leaves:
        """Leaves whose first pages are copies of these, at most MOST, on their way to the host."""
        gather, _ = self._compiled[window, count_for(len(pages))]
        leaves = gather(cache, self._numbers(window, pages))
        for leaf in leaves:
            leaf.copy_to_host_async()
        return leaves

    def put(self, window: int, leaves: Leaves) -> Leaves:
        """The host's leaves on the device."""
        like = self.leaves(window, leaves[0].shape[1])
        return jax.block_until_ready(jax.device_put(leaves, tuple(leaf.sharding for leaf in like)))

    def scatter(self, cache: KVCache, window: int, leaves: Leaves, pages: Sequence[int | None]) -> KVCache:
        """Put the first pages of leaves, which may be the host's, into these; where None is, nowhere."""
        _, scatter = self._compiled[window, leaves[0].shape[1]]
        return scatter(cache, leaves, self._numbers(window, pages))

    def _numbers(self, window: int, pages: Sequence[int | None]) -> Int[np.ndarray, " n"]:
        """Page numbers; in place of None, and behind them, each another past the pool."""
        pool, *_ = jax.tree.leaves(pools_of(self.config, self.like.cache, window))
        numbers = np.arange(count_for(len(pages)), dtype=np.int32) + pool.shape[1]
        for i, page in enumerate(pages):
            numbers[i] = numbers[i] if page is None else page
        return numbers

    def _gather(self, window: int, n: int) -> jax.stages.Lowered:
        where = tuple(leaf.sharding for leaf in self.leaves(window, n))
        jitted = jax.jit(partial(gather, self.config, window), out_shardings=where)
        return jitted.lower(self.like.cache, self._numbers_like(n))

    def _scatter(self, window: int, n: int) -> jax.stages.Lowered:
        where = jax.tree.map(lambda pool: pool.sharding, self.like.cache)
        jitted = jax.jit(partial(scatter, self.config, window), donate_argnums=0, out_shardings=where)
        return jitted.lower(self.like.cache, self.leaves(window, n), self._numbers_like(n))

    def _numbers_like(self, n: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((n,), jnp.int32, sharding=self.like.everywhere)


def count_for(pages: int) -> int:
    """Return the smallest of COUNTS that holds `pages` pages."""
    return next(n for n in COUNTS if n >= pages)


def contents(leaves: Leaves, pages: int) -> list[bytes]:
    """The first pages of leaves, each with all of its numbers in a row; waits for leaves on their way."""
    arrays = [np.asarray(leaf) for leaf in leaves]
    return [b"".join(x[:, i].tobytes() for x in arrays) for i in range(pages)]


def filled(like: Leaves, pages: Sequence[bytes]) -> Leaves:
    """The host's leaves of shapes [K,n,...], of which the first pages have these contents."""
    leaves = tuple(np.zeros(leaf.shape, leaf.dtype) for leaf in like)
    for i, content in enumerate(pages):
        at = 0
        for leaf in leaves:
            own = leaf[:, i]
            own[...] = np.frombuffer(content, leaf.dtype, own.size, at).reshape(own.shape)
            at += own.nbytes
    return leaves
