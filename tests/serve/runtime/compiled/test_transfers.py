"""Copies of pages out of pools and back into them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.targets import found_target, job_for
from suite.marks import full

from duetto.kvcache.pages import KVCache
from duetto.model.draft_pair import PairConfig
from duetto.model.tree import tree_bytes
from duetto.serve.planner.engine_plan import abstract_arguments
from duetto.serve.planner.roofline.targets import target_lowering
from duetto.serve.runtime.compiled.lowering import make_abstract_arguments
from duetto.serve.runtime.compiled.shapes import Sizes
from duetto.serve.runtime.compiled.transfers import (
    COPY_SIZES,
    Transfers,
    fill_leaves,
    padded_count,
    page_contents,
    window_pools,
)

W = 16


def arranged(model) -> tuple[Transfers, KVCache]:
    """Transfers for a model, and a cache of random numbers."""
    config = PairConfig(model.config)
    sizes = Sizes(64, 2, tuple(20 + 3 * g for g in range(len(config.windows))), W)
    like = make_abstract_arguments(config, model.params, sizes)
    draw = np.random.default_rng(0)
    cache = jax.tree.map(lambda x: jnp.asarray(draw.integers(0, 99, x.shape), x.dtype), like.cache)
    return Transfers(config, like), cache


@pytest.mark.parametrize(
    "model",
    ["tiny", full("windows"), "latent", full("recurrent"), full("bfloat16")],
    indirect=True,
    scope="session",
)
def test_pages_go_out_and_come_back_elsewhere(model):
    """Of each window, in each number of pages, through bytes; no other page changes."""
    transfers, cache = arranged(model)
    before = jax.tree.map(np.array, cache)
    for window in transfers.windows:
        pools = len(jax.tree.leaves(window_pools(transfers.config, cache, window)))
        for count in (1, 3, COPY_SIZES[-1]):
            out, back = list(range(count)), [None, *range(count + 1, 2 * count)][:count]
            back = [p if p is None or p < 20 else None for p in back]
            leaves = transfers.gather(cache, window, out)
            assert len(leaves) == pools and {leaf.shape[1] for leaf in leaves} == {padded_count(count)}
            found = page_contents(leaves, count)
            assert {len(content) for content in found} == {transfers.page_bytes[window]}
            put = transfers.copy_to_device(
                window, fill_leaves(transfers.abstract_leaves(window, padded_count(count)), found)
            )
            cache = transfers.scatter(cache, window, put, back)
            for numbers in jax.tree.leaves(window_pools(transfers.config, before, window)):
                was = numbers.copy()
                for source, place in zip(out, back, strict=True):
                    if place is not None:
                        numbers[:, place] = was[:, source]
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.array, cache), before)
    assert sum(transfers.page_bytes) == sum(x.nbytes // x.shape[1] for x in jax.tree.leaves(before))


def test_a_scatter_takes_the_cache_and_the_hosts_leaves(tiny):
    transfers, cache = arranged(tiny)
    page = page_contents(transfers.gather(cache, 0, [4]), 1)
    leaves = fill_leaves(transfers.abstract_leaves(0, 1), page)
    assert all(isinstance(leaf, np.ndarray) for leaf in leaves)
    after = transfers.scatter(cache, 0, leaves, [7])
    assert all(x.is_deleted() for x in jax.tree.leaves(cache))
    assert page_contents(transfers.gather(after, 0, [7]), 1) == page


def test_a_gathered_page_outlives_what_is_written_over_it(tiny):
    transfers, cache = arranged(tiny)
    want = page_contents(transfers.gather(cache, 0, [4]), 1)
    leaves = transfers.gather(cache, 0, [4])
    other = transfers.gather(cache, 0, [5])
    transfers.scatter(cache, 0, other, [4])
    assert page_contents(leaves, 1) == want != page_contents(other, 1)


def test_content_of_another_size_is_refused(tiny):
    transfers, _ = arranged(tiny)
    with pytest.raises(ValueError, match="buffer"):
        fill_leaves(transfers.abstract_leaves(0, 1), [b"\0" * (transfers.page_bytes[0] - 1)])


@pytest.mark.extras
@pytest.mark.parametrize("name", ["h200", "v6e:1x1"])
def test_accelerators_copy_no_pool(name):
    """A gather has the pages alone for its output, a scatter writes into the pools that it is given."""
    target = found_target(name)
    job = job_for(target)
    like = abstract_arguments(job).cache
    with target_lowering(target):
        transfers = Transfers(PairConfig(job.config), abstract_arguments(job))
    for (window, n), (gather, scatter) in transfers._compiled.items():
        out, back = gather.memory_analysis(), scatter.memory_analysis()
        leaves = sum(leaf.size * leaf.dtype.itemsize for leaf in transfers.abstract_leaves(window, n))
        assert leaves <= out.output_size_in_bytes < leaves + 4096 and out.temp_size_in_bytes < 4096
        assert back.alias_size_in_bytes == tree_bytes(like) and back.temp_size_in_bytes < 4096
