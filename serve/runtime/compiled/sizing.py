"""Sizes of an engine from the model, the options and the memory, before anything is allocated."""

import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ....kvcache.pages import BLOCK, NO_LANES, page_bytes
from ....kvcache.placement import parts
from ....kvcache.quantised import Kept, kept_as
from ....kvcache.stages import attending, devices, is_apart, params_of, stages
from ....kvcache.tables import state_pages, state_stride, window_pages
from ....model.config import Experts, LayerKind, windows_of
from ....model.latent import chooser_of
from ....model.pair import PairConfig, Params, target_of
from ....model.recurrent.kinds import BLOCK as STATE_BLOCK
from ....model.recurrent.kinds import STATE
from ....model.sharding import device_bytes
from ....model.tree import nbytes
from ....model.weights.prepared import Lanes, lanes_of
from ....model.weights.quant import Quantised
from ...options.checks import GIB, round_up
from ...options.engine import EngineOptions
from ..steps.step import FEWEST_LOGITS, empty_slots
from .shapes import Sizes, shared_row
from .transfers import OFFERED, STAGED

HOST_SHARE = 4  # the cache takes at most this fraction of a CPU's physical memory, and
HOST_MOST = 4 << 30  # at most this number of bytes


def scratch_bytes(config: PairConfig, options: EngineOptions, dtype: Any) -> int:
    """Return an upper bound of a step's temporaries: a chunk's activations, and a few copies of the logits in
    float32."""
    size = jnp.dtype(dtype).itemsize
    rows = options.prefill_tokens
    D = config.target.hidden_size
    activations = max(rows * (4 * D + widths(kind) + gathered(kind, D, options)) for kind in config.layers)
    mixers = [mixer for kind in config.layers for mixer in kind.mixers]
    heads = max(mixer.num_heads * sum(mixer.head_sizes) for mixer in mixers)
    attention = 8 * rows * (heads + BLOCK * max(mixer.num_heads for mixer in mixers))
    attention += max(chosen_bytes(kind, config, options) for kind in config.layers)
    shared = shared_row(options, config.target.layers, options.kv_cache_dtype, dtype)
    sampled = max(options.shard_seats, FEWEST_LOGITS, rows // shared)
    V = config.target.vocab_size
    reported = options.alternatives(V) * max(rows, sampled * options.most_steps)
    activations += 3 * rows * config.target.input_size  # looked up, projected, and added up
    return activations * size + attention + 16 * (sampled * V + reported)


def chosen_bytes(kind: LayerKind, config: PairConfig, options: EngineOptions) -> int:
    """Return the temporaries of sparse attention: the scores of all keys, and those of a block in each
    head."""
    chooser, longest = chooser_of(kind), options.max_model_len or config.target.max_position
    if chooser is None or (chooser.keys or 0) >= longest:
        return 0
    queries = max(options.prefill_tokens, options.shard_seats)
    return 4 * queries * (longest + 2 * BLOCK * chooser.num_heads)


def widened_bytes(params: Params, dtype: Any) -> int:
    """Return an upper bound of the temporaries of a product with a quantised weight: the largest one widened,
    twice."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Quantised))
    sizes = [math.prod(x.shape) for x in leaves if isinstance(x, Quantised)]
    return 2 * max(sizes, default=0) * jnp.dtype(dtype).itemsize


def widths(kind: LayerKind) -> int:
    """Return the numbers of a token's projections at once: attention's and the feed-forward layer's."""
    heads = sum((m.num_heads + 2 * m.key_heads) * max(m.head_sizes) for m in kind.mixers)
    return 2 * heads + 2 * kind.inner


def gathered(kind: LayerKind, D: int, options: EngineOptions) -> int:
    """Return the numbers of each of a shard's tokens if experts are split over shards: the tokens of all
    shards, and the inputs and outputs of their experts."""
    if not isinstance(kind.ffn, Experts) or not options.enable_expert_parallel:
        return 0
    shards = options.data_parallel_size
    return shards * (2 + 3 * kind.ffn.active) * D if shards > 1 else 0


class StageBudget(NamedTuple):
    """Memory of a stage's devices for the keys of its layers: bytes of each, which holds one of `ways` parts
    of a page, whose rows fill whole `lanes`."""

    span: slice
    budget: int
    ways: int
    lanes: Lanes = NO_LANES

    def page_bytes(self, layers: Sequence[LayerKind], W: int, kept: Kept) -> dict[int | None, int]:
        """Bytes of a page of each window that its own of all layers have, whole."""
        own = layers[self.span]
        return dict(zip(windows_of(own), page_bytes(own, W, kept, self.lanes), strict=True))

    def bytes_of(self, pages: Mapping[int | None, int], sizes: Mapping[int | None, int]) -> int:
        """Return the bytes of `pages[w]` pages of each window w, of `sizes[w]` bytes each."""
        return sum(pages[window] * size for window, size in sizes.items()) // self.ways


def rooms(
    config: PairConfig, options: EngineOptions, params: Params, memory: int | None
) -> list[StageBudget]:
    """Return the budget of each stage, in bytes of memory of each accelerator."""
    found, target = stages(params), target_of(params)
    if len(found) == 1:
        params = attending(target) if is_apart(params) else params
        budget = cache_budget(config, options, params, target.embed.dtype, memory)
        lanes = lanes_of(devices(params), options.data_parallel_size)
        return [StageBudget(slice(None), budget, parts(config.layers, params), lanes)]
    each = [(slice(span.start, span.stop), params_of(target, span)) for span in found]
    return [
        StageBudget(
            span,
            cache_budget(config, options, own, target.embed.dtype, memory) // (1 if memory else len(found)),
            parts(config.layers[span], own),
            lanes_of(devices(own)),
        )
        for span, own in each
    ]


def cache_budget(
    config: PairConfig, options: EngineOptions, params: Params, dtype: Any, memory: int | None
) -> int:
    """Bytes that the KV cache may take of each accelerator's memory: what is left beside weights, slots and
    temporaries.

    Without an accelerator (None) it is a share of the host's, which the parameters' devices share.
    """
    if memory is None:
        return min(HOST_MOST, host_memory() // HOST_SHARE) // len(devices(params))
    slots = 2 * slot_bytes(config, options)  # a warm-up has its own
    scratch = scratch_bytes(config, options, dtype) + widened_bytes(params, dtype)
    lanes = lanes_of(devices(params), options.data_parallel_size)
    if moved := moved_bytes(config, options, dtype, lanes):  # never of a stage
        scratch += moved // parts(config.layers, params)
    return int(memory * options.gpu_memory_utilization) - device_bytes(params) - slots - scratch


def moved_bytes(config: PairConfig, options: EngineOptions, dtype: Any, lanes: Lanes) -> int:
    """Return the bytes of pages on their way to tiers and back, whose rows fill whole `lanes`."""
    kept = kept_as(options.kv_cache_dtype, dtype)
    pages = OFFERED + STAGED if options.has_tiers else 0
    return pages * sum(page_bytes(config.layers, options.page_size, kept, lanes))


def slot_bytes(config: PairConfig, options: EngineOptions) -> int:
    V, positions = config.target.vocab_size, options.guesses + 1
    S = (options.max_model_len or config.target.max_position) if options.logits_processors else 0
    return nbytes(jax.eval_shape(lambda: empty_slots(options.shard_seats, V, positions=positions, S=S)))


def check_slots(config: PairConfig, options: EngineOptions, memory: int | None) -> None:
    """Raises ValueError where the sampling state of all slots alone would take more than the cache may of a
    host."""
    most = host_memory() // HOST_SHARE if memory is None else memory
    slots = slot_bytes(config, options)
    if slots > most:
        raise ValueError(
            f"max_num_seqs {options.seats} needs {slots / 2**30:.1f} GiB "
            f"for its requests' sampling state, at most {most / 2**30:.1f} GiB are free: lower it"
        )


def check_tiers(options: EngineOptions, page: int) -> None:
    """Raises ValueError for room beyond the pools that is less than a page's bytes."""
    for name in ("swap_space", "kv_disk_space") if options.has_tiers else ():
        space = getattr(options, name)
        if 0 < space * GIB < page:
            raise ValueError(
                f"{name} {space:g} GiB holds no page: {options.page_size} tokens take {page / GIB:.2g} GiB; "
                "give it more, or 0 for none"
            )


def host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def choose_sizes(config: PairConfig, options: EngineOptions, params: Params, memory: int | None) -> Sizes:
    """Choose the sizes of an engine. `memory` is the bytes of each accelerator, or None on a CPU; parameters
    may be shapes.

    Raises ValueError, with the option to change, if the model does not fit.
    """
    check_slots(config, options, memory)
    dtype = target_of(params).embed.dtype
    return sizes_in(config, options, rooms(config, options, params, memory), dtype)


def sizes_in(config: PairConfig, options: EngineOptions, places: Sequence[StageBudget], dtype: Any) -> Sizes:
    """Choose sizes within the budget of each stage, for a model that computes in `dtype`."""
    W, kept = options.page_size, kept_as(options.kv_cache_dtype, dtype)
    most = config.target.max_position
    longest = options.max_model_len or most
    if longest > most:
        raise ValueError(f"max_model_len {longest} is beyond the model's {most} positions")
    if longest < 2:
        raise ValueError(f"max_model_len {longest} is not allowed: 2 or more, for a prompt and an answer")
    layers = config.within(longest).layers
    sizes = dict(zip(windows_of(layers), page_bytes(layers, W, kept, places[0].lanes), strict=True))
    check_tiers(options, sum(sizes.values()))
    if (left := min(room.budget for room in places)) < 0:
        raise ValueError(
            f"the weights do not fit: they, slots and temporaries need {-left / 2**30:.1f} GiB more than "
            f"gpu_memory_utilization {options.gpu_memory_utilization:g} of a device's memory: quantize them, "
            "or split them over more devices"
        )
    stride = state_stride(sizes.get(STATE, 0), sizes.get(None, 0), W)
    shards = options.data_parallel_size
    wanted = (options.max_batched_token_mem or options.seats * longest) // shards
    pages = -(-wanted // W)

    each = [room.page_bytes(layers, W, kept) for room in places]

    def costs(pages: int) -> list[int]:
        counts = group_pages(layers, options, longest, pages, stride)
        named = dict(zip(windows_of(layers), counts, strict=True))
        return [room.bytes_of(named, own) for room, own in zip(places, each, strict=True)]

    def lacking(pages: int) -> int:
        return max(cost - room.budget for room, cost in zip(places, costs(pages), strict=True))

    if options.max_batched_token_mem is None:
        pages = bisect_right(range(1, pages + 1), 0, key=lacking)
        if options.max_model_len is None and pages * W < longest:
            return sizes_in(config, replace(options, max_model_len=max(pages * W, 2)), places, dtype)
    elif lacking(pages) > 0:
        cost, room = max(zip(costs(pages), places, strict=True), key=lambda own: own[0] - own[1].budget)
        raise ValueError(
            f"max_batched_token_mem {wanted * shards} needs {cost / 2**30:.1f} GiB of cache, "
            f"{room.budget / 2**30:.1f} GiB are free: lower it, or raise gpu_memory_utilization"
        )
    if pages < -(-longest // W):
        raise ValueError(
            f"a request of max_model_len {longest} does not fit a cache of {max(pages, 0) * W} tokens"
            f"{f' (a shard of {shards})' if shards > 1 else ''}: "
            "lower max_model_len, or raise max_batched_token_mem or gpu_memory_utilization"
        )
    n_top = options.alternatives(config.target.vocab_size)
    counts = group_pages(layers, options, longest, pages, stride)
    return Sizes(
        longest, options.shard_seats, counts, W, n_top=n_top, kv_cache_dtype=options.kv_cache_dtype,
        shards=shards, stride=stride, positions=options.guesses + 1,
    )  # fmt: skip


def group_pages(
    layers: Sequence[LayerKind], options: EngineOptions, longest: int, pages: int, stride: int
) -> tuple[int, ...]:
    """Pages for each window of layers, of which those without one have `pages`: all that its requests can
    own, at most `pages`. Of states there are all that requests can own, and one for each `stride` pages.

    One request of `longest` tokens always fits.
    """

    def count(window: int | None) -> int:
        W, whole = options.page_size, -(-longest // options.page_size)
        if window is None:
            return pages
        if window == STATE:
            work = round_up(options.most_tokens, STATE_BLOCK)
            one = min(state_pages(work, max(options.most_steps, options.guesses + 1), W, stride), whole)
            return one * options.shard_seats + pages // stride
        one = min(window_pages(window, options.most_tokens, W), whole)
        return max(one, min(pages, one * options.shard_seats))

    return tuple(map(count, windows_of(layers)))
