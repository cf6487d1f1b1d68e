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
from ....model.draft_pair import PairConfig
from ....model.recurrent.kinds import STATE_WINDOW
from ...host.devices import num_cores
from .lowering import StepArguments
from .program_table import WARMUP_THREAD_PREFIX

COPY_SIZES = (1, 4, 16)  # numbers of pages that programs copy; a copy is padded to the next number
MAX_COPY_PAGES = COPY_SIZES[-1]  # pages of a copy, at most
MAX_OFFERED_PAGES = 8 * MAX_COPY_PAGES  # pages of each window that are on their way out of a device, at most
MAX_STAGED_PAGES = 4 * MAX_COPY_PAGES  # pages that are on their way into a device, at most

# n pages of a window's pools, [K,n,W,H] each: keys of its layers, values, states
PageLeaves = tuple[Any, ...]


def window_pools(config: PairConfig, cache: KVCache, window: int) -> KVCache:
    """Return the cache with the pools of a window's layers only, None in place of the others. `window` is an
    index into `config.windows`."""
    chosen_window = config.windows[window]

    def select_pools(pools: tuple[Any, ...], has: Callable[[LayerKind], Any]) -> tuple[Any, ...]:
        layer_pools = zip(config.layers, pools, strict=True)
        return tuple(pool if has(layer) else None for layer, pool in layer_pools)

    def has_window_keys(layer: LayerKind) -> bool:
        return layer.attention is not None and layer.attention.window == chosen_window

    states = select_pools(cache.states, lambda layer: chosen_window == STATE_WINDOW)
    return KVCache(
        select_pools(cache.k, has_window_keys), select_pools(cache.v, has_window_keys), states, cache.isa
    )


def gather_pages(config: PairConfig, window: int, cache: KVCache, pages: Int[Any, " n"]) -> PageLeaves:
    """Copy pages of a window out of its pools."""

    def take_pages(pool: Shaped[Any, "K P ..."]) -> Shaped[Any, "K n ..."]:
        return pool.at[head_indices(pool), pages[None]].get(mode="clip")

    return tuple(map(take_pages, jax.tree.leaves(window_pools(config, cache, window))))


def scatter_pages(
    config: PairConfig, window: int, cache: KVCache, leaves: PageLeaves, pages: Int[Any, " n"]
) -> KVCache:
    """Copy leaves into pages of a window; returns the cache. A page number past the pool is dropped."""
    pools, structure = jax.tree.flatten(window_pools(config, cache, window))
    updated = [
        pool.at[head_indices(pool), pages[None]].set(leaf, mode="drop", unique_indices=True)
        for pool, leaf in zip(pools, leaves, strict=True)
    ]
    changed = jax.tree.unflatten(structure, updated)
    return jax.tree.map(
        lambda new, old: old if new is None else new, changed, cache, is_leaf=lambda x: x is None
    )


def head_indices(pool: Shaped[Any, "K P ..."]) -> Int[Any, "K 1"]:
    """Return the numbers of a pool's heads, as indices. With a slice instead, XLA would transpose the whole
    pool (layout)."""
    return jnp.arange(pool.shape[0], dtype=jnp.int32)[:, None]


class Transfers:
    """Compiled copies between pools and leaves, for each number of pages in `COPY_SIZES` and each window.

    windows: indices of the windows.
    abstract_arguments: a step's arguments as shapes.
    """

    def __init__(self, config: PairConfig, abstract_arguments: StepArguments):
        self.config = config
        self.abstract_arguments = abstract_arguments
        self.windows = range(len(config.windows))
        lowered = {
            (g, n): (self._lower_gather(g, n), self._lower_scatter(g, n))
            for g in self.windows
            for n in COPY_SIZES
        }
        with ThreadPoolExecutor(max(2, num_cores() or 0), WARMUP_THREAD_PREFIX) as pool:
            jobs = {key: [pool.submit(x.compile) for x in pair] for key, pair in lowered.items()}
            self._compiled = {key: [job.result() for job in pair] for key, pair in jobs.items()}

    @cached_property
    def page_bytes(self) -> list[int]:
        """Bytes of a page of each window."""
        return [
            sum(leaf.size * leaf.dtype.itemsize for leaf in self.abstract_leaves(g, 1)) for g in self.windows
        ]

    def abstract_leaves(self, window: int, n: int) -> PageLeaves:
        """Return the leaves of n pages of a window, as shapes."""
        pools = jax.tree.leaves(window_pools(self.config, self.abstract_arguments.cache, window))
        return tuple(
            jax.ShapeDtypeStruct((x.shape[0], n, *x.shape[2:]), x.dtype, sharding=x.sharding) for x in pools
        )

    def gather(self, cache: KVCache, window: int, pages: Sequence[int]) -> PageLeaves:
        """Copy at most `MAX_COPY_PAGES` pages of a window into leaves, padded, and start to copy these to the
        host."""
        gather, _ = self._compiled[window, padded_count(len(pages))]
        leaves = gather(cache, self._page_numbers(window, pages))
        for leaf in leaves:
            leaf.copy_to_host_async()
        return leaves

    @partial(jax.profiler.annotate_function, name="duetto.copy_pages")
    def copy_to_device(self, window: int, leaves: PageLeaves) -> PageLeaves:
        """Copy leaves from the host to the device, and wait for it."""
        abstract = self.abstract_leaves(window, leaves[0].shape[1])
        return jax.block_until_ready(jax.device_put(leaves, tuple(leaf.sharding for leaf in abstract)))

    def scatter(
        self, cache: KVCache, window: int, leaves: PageLeaves, pages: Sequence[int | None]
    ) -> KVCache:
        """Copy the first pages of leaves, on host or device, into these pages; a page that is None is
        skipped. Returns the cache; the given one is donated."""
        _, scatter = self._compiled[window, leaves[0].shape[1]]
        return scatter(cache, leaves, self._page_numbers(window, pages))

    def _page_numbers(self, window: int, pages: Sequence[int | None]) -> Int[np.ndarray, " n"]:
        """Return the page numbers of a copy, padded. In place of None and as padding there are distinct
        numbers past the pool, which mode="drop" skips (unique indices)."""
        pool, *_ = jax.tree.leaves(window_pools(self.config, self.abstract_arguments.cache, window))
        numbers = np.arange(padded_count(len(pages)), dtype=np.int32) + pool.shape[1]
        for i, page in enumerate(pages):
            numbers[i] = numbers[i] if page is None else page
        return numbers

    def _lower_gather(self, window: int, n: int) -> jax.stages.Lowered:
        shardings = tuple(leaf.sharding for leaf in self.abstract_leaves(window, n))
        jitted = jax.jit(partial(gather_pages, self.config, window), out_shardings=shardings)
        return jitted.lower(self.abstract_arguments.cache, self._abstract_page_numbers(n))

    def _lower_scatter(self, window: int, n: int) -> jax.stages.Lowered:
        shardings = jax.tree.map(lambda pool: pool.sharding, self.abstract_arguments.cache)
        jitted = jax.jit(
            partial(scatter_pages, self.config, window), donate_argnums=0, out_shardings=shardings
        )
        return jitted.lower(
            self.abstract_arguments.cache, self.abstract_leaves(window, n), self._abstract_page_numbers(n)
        )

    def _abstract_page_numbers(self, n: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((n,), jnp.int32, sharding=self.abstract_arguments.replicated_sharding)


def padded_count(pages: int) -> int:
    """Return the smallest of `COPY_SIZES` that holds `pages` pages."""
    return next(n for n in COPY_SIZES if n >= pages)


def page_contents(leaves: PageLeaves, pages: int) -> list[bytes]:
    """Return the bytes of each of the first pages of leaves, all layers concatenated. Waits for the
    leaves."""
    arrays = [np.asarray(leaf) for leaf in leaves]
    return [b"".join(x[:, i].tobytes() for x in arrays) for i in range(pages)]


def fill_leaves(abstract_leaves: PageLeaves, pages: Sequence[bytes]) -> PageLeaves:
    """Return leaves on the host whose first pages have these contents; `abstract_leaves` has
    their shapes [K,n,...]."""
    leaves = tuple(np.zeros(leaf.shape, leaf.dtype) for leaf in abstract_leaves)
    for i, content in enumerate(pages):
        offset = 0
        for leaf in leaves:
            page = leaf[:, i]
            page[...] = np.frombuffer(content, leaf.dtype, page.size, offset).reshape(page.shape)
            offset += page.nbytes
    return leaves
