"""Sizes of an engine: they follow from the model, the options and the memory, before anything is
allocated."""

import math
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ....kvcache.pages import KEYS_PER_BLOCK, NO_LANES, page_bytes
from ....kvcache.quantised import CacheFormat, choose_cache_format
from ....kvcache.shardings import min_pool_parts
from ....kvcache.stages import (
    has_separate_ffn,
    params_without_ffn,
    pipeline_stages,
    stage_params,
    tree_devices,
)
from ....kvcache.tables import max_state_pages, max_window_pages, state_stride
from ....model.config import Experts, LayerKind, distinct_windows
from ....model.draft_pair import EngineParams, PairConfig, target_params
from ....model.latent import active_indexer
from ....model.recurrent.kinds import STATE_BLOCK_TOKENS as STATE_BLOCK
from ....model.recurrent.kinds import STATE_WINDOW
from ....model.sharding import device_bytes
from ....model.tree import tree_bytes
from ....model.weights.device_forms import Lanes, device_lanes
from ....model.weights.quant import Quantised
from ...options.checks import GIB, round_up
from ...options.engine import EngineOptions
from ..steps.step import MIN_LOGIT_ROWS, empty_slots
from .shapes import Sizes, shared_prefill_row_tokens
from .transfers import MAX_OFFERED_PAGES, MAX_STAGED_PAGES

HOST_MEMORY_DIVISOR = 4  # on a CPU the cache takes at most the physical memory divided by this
HOST_MAX_BYTES = 4 << 30  # and at most these bytes


def max_scratch_bytes(config: PairConfig, options: EngineOptions, dtype: Any) -> int:
    """Return an upper bound of the bytes of a step's temporaries: activations of a chunk, and a few copies of
    the logits in float32."""
    size = jnp.dtype(dtype).itemsize
    rows = options.prefill_tokens
    D = config.target.hidden_size
    activations = max(
        rows * (4 * D + projection_width(kind) + expert_exchange_width(kind, D, options))
        for kind in config.layers
    )
    mixers = [mixer for kind in config.layers for mixer in kind.mixers]
    heads = max(mixer.num_heads * sum(mixer.head_sizes) for mixer in mixers)
    attention = 8 * rows * (heads + KEYS_PER_BLOCK * max(mixer.num_heads for mixer in mixers))
    attention += max(sparse_attention_bytes(kind, config, options) for kind in config.layers)
    row_tokens = shared_prefill_row_tokens(options, config.target.layers, options.kv_cache_dtype, dtype)
    max_sampled_rows = max(options.shard_slots, MIN_LOGIT_ROWS, rows // row_tokens)
    V = config.target.vocab_size
    alternatives = options.num_logprobs(V) * max(rows, max_sampled_rows * options.max_decode_steps)
    # embeddings of layers: looked up, projected, added up
    activations += 3 * rows * config.target.layer_input_size
    return activations * size + attention + 16 * (max_sampled_rows * V + alternatives)


def sparse_attention_bytes(kind: LayerKind, config: PairConfig, options: EngineOptions) -> int:
    """Return the bytes of the temporaries of sparse attention: a score for each query and key, and scores of
    two blocks of keys in each head. 0 if all keys are attended."""
    chooser, max_model_len = active_indexer(kind), options.max_model_len or config.target.max_position
    if chooser is None or (chooser.top_k or 0) >= max_model_len:
        return 0
    queries = max(options.prefill_tokens, options.shard_slots)
    return 4 * queries * (max_model_len + 2 * KEYS_PER_BLOCK * chooser.num_heads)


def dequantised_bytes(params: EngineParams, dtype: Any) -> int:
    """Return an upper bound of the bytes of temporaries of a product with a quantised weight: two copies of
    the largest weight in `dtype`."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Quantised))
    sizes = [math.prod(x.shape) for x in leaves if isinstance(x, Quantised)]
    return 2 * max(sizes, default=0) * jnp.dtype(dtype).itemsize


def projection_width(kind: LayerKind) -> int:
    """Return how many numbers of a token's projections exist at once, of attention and feed-forward layer."""
    heads = sum((m.num_heads + 2 * m.key_heads) * max(m.head_sizes) for m in kind.mixers)
    return 2 * heads + 2 * kind.inner_size


def expert_exchange_width(kind: LayerKind, D: int, options: EngineOptions) -> int:
    """Return how many numbers a shard holds for each of its tokens if experts are split over shards; 0 if
    not.

    These are the hidden states of all shards' tokens, and the inputs and outputs of their experts.
    """
    if not isinstance(kind.ffn, Experts) or not options.enable_expert_parallel:
        return 0
    shards = options.data_parallel_size
    return shards * (2 + 3 * kind.ffn.active) * D if shards > 1 else 0


class StageBudget(NamedTuple):
    """Memory of a pipeline stage's devices for the keys of its layers.

    span: the stage's layers.
    budget: bytes of each device.
    num_parts: number of devices that a page is split over.
    lanes: padding of a page's rows.
    """

    span: slice
    budget: int
    num_parts: int
    lanes: Lanes = NO_LANES

    def page_bytes(
        self, layers: Sequence[LayerKind], W: int, cache_format: CacheFormat
    ) -> dict[int | None, int]:
        """Return the bytes of a whole page, by window, for the stage's part of the model's `layers`.

        W: tokens of a page.
        """
        stage_layers = layers[self.span]
        return dict(
            zip(
                distinct_windows(stage_layers),
                page_bytes(stage_layers, W, cache_format, self.lanes),
                strict=True,
            )
        )

    def cache_bytes(self, pages: Mapping[int | None, int], sizes: Mapping[int | None, int]) -> int:
        """Return the bytes of a device for `pages[w]` pages of each window w, of `sizes[w]` bytes each."""
        return sum(pages[window] * size for window, size in sizes.items()) // self.num_parts


def stage_budgets(
    config: PairConfig, options: EngineOptions, params: EngineParams, memory: int | None
) -> list[StageBudget]:
    """Return the memory budget of each pipeline stage. `memory`: bytes of each accelerator, None on a CPU."""
    spans, target = pipeline_stages(params), target_params(params)
    if len(spans) == 1:
        params = params_without_ffn(target) if has_separate_ffn(params) else params
        budget = cache_budget(config, options, params, target.embed.dtype, memory)
        lanes = device_lanes(tree_devices(params), options.data_parallel_size)
        return [StageBudget(slice(None), budget, min_pool_parts(config.layers, params), lanes)]
    span_params = [(slice(span.start, span.stop), stage_params(target, span)) for span in spans]
    return [
        StageBudget(
            span,
            cache_budget(config, options, layer_params, target.embed.dtype, memory)
            // (1 if memory else len(spans)),
            min_pool_parts(config.layers[span], layer_params),
            device_lanes(tree_devices(layer_params)),
        )
        for span, layer_params in span_params
    ]


def cache_budget(
    config: PairConfig, options: EngineOptions, params: EngineParams, dtype: Any, memory: int | None
) -> int:
    """Return the bytes that the KV cache may take on each device: the memory minus weights, slots and
    temporaries.

    On a CPU (`memory` is None) it is a fraction of the host's memory, divided among the parameters' devices.
    """
    if memory is None:
        return min(HOST_MAX_BYTES, host_memory_bytes() // HOST_MEMORY_DIVISOR) // len(tree_devices(params))
    slots = 2 * slots_bytes(config, options)  # a warm-up has slots too
    scratch = max_scratch_bytes(config, options, dtype) + dequantised_bytes(params, dtype)
    scratch += num_embedding_rows(config, options) * config.target.hidden_size * jnp.dtype(dtype).itemsize
    lanes = device_lanes(tree_devices(params), options.data_parallel_size)
    if transferred := transfer_bytes(config, options, dtype, lanes):  # 0 under a pipeline, which has no tiers
        scratch += transferred // min_pool_parts(config.layers, params)
    return int(memory * options.gpu_memory_utilization) - device_bytes(params) - slots - scratch


def num_embedding_rows(config: PairConfig, options: EngineOptions) -> int:
    """Return the number of rows of the pool of embeddings; 0 without an encoder.

    They are as many as a prefill has tokens, and hold all inputs that the smallest chunk may touch: one, or
    a block of recurrent states with the largest input at both ends.
    """
    encoder, alignment = config.target.encoder, config.prefill_alignment
    if encoder is None:
        return 0
    largest = max(map(encoder.num_rows, encoder.buckets))
    return max(options.prefill_tokens, largest if alignment == 1 else 2 * largest + alignment)


def transfer_bytes(config: PairConfig, options: EngineOptions, dtype: Any, lanes: Lanes) -> int:
    """Return the bytes of pages on their way to tiers and back; `lanes` is the padding of their rows."""
    cache_format = choose_cache_format(options.kv_cache_dtype, dtype)
    pages = MAX_OFFERED_PAGES + MAX_STAGED_PAGES if options.has_tiers else 0
    return pages * sum(page_bytes(config.layers, options.page_size, cache_format, lanes))


def slots_bytes(config: PairConfig, options: EngineOptions) -> int:
    """Return the bytes of a shard's slots."""
    V, positions = config.target.vocab_size, options.max_draft_tokens + 1
    S = (options.max_model_len or config.target.max_position) if options.logits_processors else 0
    return tree_bytes(jax.eval_shape(lambda: empty_slots(options.shard_slots, V, positions=positions, S=S)))


def check_slot_memory(config: PairConfig, options: EngineOptions, memory: int | None) -> None:
    """Raise ValueError if the slots need more memory than an accelerator has, or more than the cache may take
    of the host's."""
    free_bytes = host_memory_bytes() // HOST_MEMORY_DIVISOR if memory is None else memory
    slots = slots_bytes(config, options)
    if slots > free_bytes:
        raise ValueError(
            f"max_num_seqs {options.num_slots} needs {slots / 2**30:.1f} GiB "
            f"for its requests' sampling state, at most {free_bytes / 2**30:.1f} GiB are free: lower it"
        )


def check_tier_sizes(options: EngineOptions, page_bytes: int) -> None:
    """Raise ValueError for a tier that is smaller than a page of `page_bytes` bytes."""
    for name in ("swap_space", "kv_disk_space") if options.has_tiers else ():
        space = getattr(options, name)
        if 0 < space * GIB < page_bytes:
            raise ValueError(
                f"{name} {space:g} GiB holds no page: {options.page_size} tokens take {page_bytes / GIB:.2g} "
                "GiB; give it more, or 0 for none"
            )


def host_memory_bytes() -> int:
    """Return the bytes of the host's physical memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def choose_sizes(
    config: PairConfig, options: EngineOptions, params: EngineParams, memory: int | None
) -> Sizes:
    """Choose the sizes of an engine.

    Raises ValueError, with the option to change, if the model does not fit.

    params: arrays or shapes.
    memory: bytes of each accelerator; None on a CPU.
    """
    check_slot_memory(config, options, memory)
    dtype = target_params(params).embed.dtype
    return fit_sizes(config, options, stage_budgets(config, options, params, memory), dtype)


def choose_max_model_len(config: PairConfig, options: EngineOptions) -> int:
    """Return the largest number of tokens of a request. Raises ValueError for an option that is not
    allowed."""
    max_positions = config.target.max_position
    max_model_len = options.max_model_len or max_positions
    if max_model_len > max_positions:
        raise ValueError(f"max_model_len {max_model_len} is beyond the model's {max_positions} positions")
    if max_model_len < 2:
        raise ValueError(
            f"max_model_len {max_model_len} is not allowed: 2 or more, for a prompt and an answer"
        )
    return max_model_len


def fit_sizes(
    config: PairConfig, options: EngineOptions, budgets: Sequence[StageBudget], dtype: Any
) -> Sizes:
    """Choose sizes within the budgets of all stages, for a model that computes in `dtype`. Raises ValueError,
    with the option to change, if they do not suffice."""
    W, cache_format = options.page_size, choose_cache_format(options.kv_cache_dtype, dtype)
    max_model_len = choose_max_model_len(config, options)
    layers = config.drop_unreached_limits(max_model_len).layers
    sizes = dict(
        zip(distinct_windows(layers), page_bytes(layers, W, cache_format, budgets[0].lanes), strict=True)
    )
    check_tier_sizes(options, sum(sizes.values()))
    if (spare_bytes := min(stage.budget for stage in budgets)) < 0:
        raise ValueError(
            f"the weights do not fit: they, slots and temporaries need {-spare_bytes / 2**30:.1f} GiB more "
            f"than gpu_memory_utilization {options.gpu_memory_utilization:g} of a device's memory: quantize "
            "them, or split them over more devices"
        )
    stride = state_stride(sizes.get(STATE_WINDOW, 0), sizes.get(None, 0), W)
    shards = options.data_parallel_size
    wanted_tokens = (options.max_batched_token_mem or options.num_slots * max_model_len) // shards
    pages = -(-wanted_tokens // W)
    stage_page_bytes = [stage.page_bytes(layers, W, cache_format) for stage in budgets]

    def stage_costs(pages: int) -> list[int]:
        counts = pages_by_window(layers, options, max_model_len, pages, stride)
        window_counts = dict(zip(distinct_windows(layers), counts, strict=True))
        return [
            stage.cache_bytes(window_counts, page_sizes)
            for stage, page_sizes in zip(budgets, stage_page_bytes, strict=True)
        ]

    def missing_bytes(pages: int) -> int:
        return max(cost - stage.budget for stage, cost in zip(budgets, stage_costs(pages), strict=True))

    if options.max_batched_token_mem is None:
        pages = bisect_right(range(1, pages + 1), 0, key=missing_bytes)
        if options.max_model_len is None and pages * W < max_model_len:
            return fit_sizes(config, replace(options, max_model_len=max(pages * W, 2)), budgets, dtype)
    elif missing_bytes(pages) > 0:
        cost, stage = max(
            zip(stage_costs(pages), budgets, strict=True), key=lambda pair: pair[0] - pair[1].budget
        )
        raise ValueError(
            f"max_batched_token_mem {wanted_tokens * shards} needs {cost / 2**30:.1f} GiB of cache, "
            f"{stage.budget / 2**30:.1f} GiB are free: lower it, or raise gpu_memory_utilization"
        )
    if pages < -(-max_model_len // W):
        raise ValueError(
            f"a request of max_model_len {max_model_len} does not fit a cache of {max(pages, 0) * W} tokens"
            f"{f' (a shard of {shards})' if shards > 1 else ''}: "
            "lower max_model_len, or raise max_batched_token_mem or gpu_memory_utilization"
        )
    counts = pages_by_window(layers, options, max_model_len, pages, stride)
    return Sizes(
        max_model_len, options.shard_slots, counts, W, n_top=options.num_logprobs(config.target.vocab_size),
        kv_cache_dtype=options.kv_cache_dtype, shards=shards, state_stride=stride,
        positions=options.max_draft_tokens + 1, embedding_rows=num_embedding_rows(config, options),
        logprobs_mode=options.logprobs_mode,
    )  # fmt: skip


def pages_by_window(
    layers: Sequence[LayerKind], options: EngineOptions, max_model_len: int, pages: int, stride: int
) -> tuple[int, ...]:
    """Return the number of pages of each window of the layers.

    Layers without a window have `pages` pages. A window has as many as all requests can own, at most `pages`.
    Recurrent states have as many as all requests can own, and one for each `stride` pages. One request of
    `max_model_len` tokens always fits.
    """

    def pool_pages(window: int | None) -> int:
        W, request_pages = options.page_size, -(-max_model_len // options.page_size)
        if window is None:
            return pages
        if window == STATE_WINDOW:
            work = round_up(options.max_step_tokens, STATE_BLOCK)
            max_pages = min(
                max_state_pages(work, max(options.max_decode_steps, options.max_draft_tokens + 1), W, stride),
                request_pages,
            )
            return max_pages * options.shard_slots + pages // stride
        max_pages = min(max_window_pages(window, options.max_step_tokens, W), request_pages)
        return max(max_pages, min(pages, max_pages * options.shard_slots))

    return tuple(map(pool_pages, distinct_windows(layers)))
