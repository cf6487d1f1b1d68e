"""The floor of a step's time: what it must compute and move, counted from the model's sizes, over a device's
peaks.

The roofline model is Williams, Waterman and Patterson's (CACM 52/4, 2009). Everything here is analytic:
weights are read once a step, the keys in the cache once, and activations are written and read once; a program
that does more is slower than its floor. Padding counts as work, since the shapes do not know what is in them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....kvcache.groups import group_size
from ....kvcache.pages import KEYS_PER_BLOCK, KVCache, layer_token_bytes
from ....kvcache.quantised import CacheFormat, choose_cache_format, head_bytes
from ....kvcache.states import state_bytes
from ....model.config import GroupedQuery, LayerKind, Mixer, ModelConfig
from ....model.draft_pair import EngineParams, Pair, PairConfig, target_params
from ....model.latent import active_indexer
from ....model.recurrent.kinds import STATE_WINDOW
from ....model.sharding import device_bytes
from ....model.transformer import Decoder, decoder_spec
from ....model.tree import leaves_by_path, shapes_from_specs, tree_bytes
from ...runtime.compiled.shapes import Shape
from .hlo import PoolBuffer


@dataclass(frozen=True)
class Demand:
    """Work of a program.

    flops: operations; a multiply-add is two.
    bytes: from and to memory.
    """

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Return the operations for each byte."""
        return self.flops / self.bytes

    def floor_seconds(self, flops: float, bandwidth: float) -> float:
        """Return the least seconds on a device of `flops` FLOP/s and `bandwidth` bytes/s."""
        return max(self.flops / flops, self.bytes / bandwidth)

    def bottleneck(self, flops: float, bandwidth: float) -> str:
        """Return "compute" or "memory", whichever takes longer at these rates."""
        return "compute" if self.flops / flops > self.bytes / bandwidth else "memory"


def program_demand(
    shape: Shape,
    config: ModelConfig,
    dtype: Any,
    context: int,
    params: Decoder | None = None,
    kv_cache_dtype: str = "auto",
    samples: bool = True,
    shards: int = 1,
) -> Demand:
    """Count the work of one dispatch of a program. Every row has `context` tokens in the cache; a prefill's
    rows are parts of one prompt.

    params: arrays or shapes, whose bytes count; by default those of the dtype.
    samples: False for a stage of a pipeline that has no head.
    shards: number of shards that experts are split over, each with rows of its own; the work is one shard's.
    """
    B, T, last = shape.rows, shape.tokens, int(samples)
    params = shapes_from_specs(decoder_spec(config), jnp.dtype(dtype)) if params is None else params
    step = partial(step_demand, config, params, kv_cache_dtype, context=context, shards=shards)
    if shape.phase == "decode":
        token_demand = step(rows=B, tokens=1, sampled=last)
        return Demand(T * token_demand.flops, T * token_demand.bytes)
    if shape.phase == "prefill":
        return step(rows=1, tokens=B * T, sampled=last)
    return step(rows=shape.max_rows(T), tokens=T, sampled=last * T)


def draft_pair_demand(
    shape: Shape,
    config: PairConfig,
    dtype: Any,
    context: int,
    params: EngineParams,
    kv_cache_dtype: str = "auto",
    shards: int = 1,
) -> Demand:
    """Count the work of a model and of its draft model, like `program_demand`. The draft model guesses one
    token after the other in a verify; in other phases it only writes its keys.

    The draft head is not counted: it is one product or two.
    """
    target_demand = program_demand(
        shape, config.target, dtype, context, target_params(params), kv_cache_dtype, shards=shards
    )
    if config.draft is None:
        return target_demand
    assert isinstance(params, Pair)
    T = shape.tokens
    rows, tokens, times = (1, shape.area, 1) if shape.phase == "prefill" else (shape.max_rows(T), 1, T)
    sampled = int(shape.phase == "verify")
    step = partial(step_demand, config.draft, params.draft, kv_cache_dtype, context=context)
    draft_demand = step(rows=rows, tokens=tokens, sampled=sampled)
    return Demand(
        target_demand.flops + times * draft_demand.flops, target_demand.bytes + times * draft_demand.bytes
    )


def row_starts(shape: Shape, context: int) -> np.ndarray:
    """Return the first position [B] of each row if `context` tokens are in the cache. The rows of a prefill
    follow one another."""
    stride = shape.tokens if shape.phase == "prefill" else 0
    return context + stride * np.arange(shape.rows)


def describe_pool_buffers(
    shape: Shape, layers: Sequence[LayerKind], cache: KVCache, context: int
) -> tuple[PoolBuffer, ...]:
    """Return the reads of a step's attention from each buffer of the cache, on one device."""
    tokens = 1 if shape.phase == "decode" else shape.tokens
    start = row_starts(shape, context)

    def describe_buffer(mixer: Mixer, buffer: Any, arrays: int) -> PoolBuffer:
        _, pages, width, *_ = buffer.sharding.shard_shape(buffer.shape)
        total_bytes = device_bytes(buffer)
        if mixer.window == STATE_WINDOW:
            return PoolBuffer(total_bytes, total_bytes * min(shape.num_sequences, pages) // pages, 0, arrays)
        sequences, rows = min(shape.num_sequences, shape.max_rows(tokens)), shape.max_rows(tokens)
        live = min((sequences * attended_keys(mixer, context) + rows * tokens) / (pages * width), 1)
        first = (
            0 if mixer.window is None else np.maximum(first_attended_key(mixer, start), 0) // KEYS_PER_BLOCK
        )
        blocks = np.sort(-(-(start + tokens) // KEYS_PER_BLOCK) - first)[::-1]
        return PoolBuffer(
            total_bytes,
            round(total_bytes * live),
            int(blocks[:: group_size(shape.rows, tokens)].sum()),
            arrays,
        )

    pool_buffers = []
    for kind, keys, values, states in zip(layers, cache.k, cache.v, cache.states, strict=True):
        for mixer in kind.mixers:
            leaves = jax.tree.leaves(states if mixer.state_shapes else (keys, values))
            pool_buffers += [describe_buffer(mixer, buffer, len(leaves)) for buffer in leaves]
    return tuple(pool_buffers)


def step_demand(
    config: ModelConfig,
    params: Decoder,
    kv_cache_dtype: str,
    *,
    rows: int,
    tokens: int,
    context: int,
    sampled: int,
    shards: int = 1,
) -> Demand:
    """Count the work of one pass of [rows, tokens] with causal attention. It samples after `sampled` tokens
    of each row. With `shards` shards of as many rows each, the work is one shard's."""
    size, queries = jnp.dtype(params.embed.dtype).itemsize, rows * tokens
    head = config.vocab_size * config.hidden_size
    flops = 2 * active_param_count(config) * queries + 2 * head * rows * sampled
    flops += queries * sum(mixer_flops(kind, context + (tokens + 1) / 2) for kind in config.layers)
    output = params.embed if params.head is None else params.head
    head_bytes = weight_read_bytes(output) if sampled else 0
    inner = layer_param_read_bytes(config, params, queries, shards)
    weights = inner + head_bytes + queries * (config.hidden_size + config.layer_input_size) * size
    # cached keys are read, new keys are written and read
    cache_format = choose_cache_format(kv_cache_dtype, params.embed.dtype)
    cache = rows * sum(cache_traffic_bytes(kind, context, tokens, cache_format) for kind in config.layers)
    return Demand(flops, weights + cache + activation_bytes(config, queries, rows * sampled, size))


def active_param_count(config: ModelConfig) -> float:
    """Return the number of parameters that one token is multiplied with, without the head."""
    specs = leaves_by_path(decoder_spec(config))
    return sum(math.prod(spec.shape) * param_read_share(config, path, 1) for path, spec in specs.items())


def layer_param_read_bytes(config: ModelConfig, params: Decoder, tokens: int, shards: int = 1) -> float:
    """Return the bytes of parameters that `tokens` tokens read, without the embedding and the head. Experts
    that no token is routed to are not read. Each of `shards` has a part of the experts, for the tokens of
    all."""
    return sum(
        weight_read_bytes(x) * param_read_share(config, path, tokens, shards)
        for path, x in leaves_by_path(params).items()
    )


def weight_read_bytes(weight: Any) -> float:
    """Return the bytes that a product reads of a weight; 12-bit weights (`bf12`) are three quarters of their
    16-bit array."""
    return sum(tree_bytes(x) * (0.75 if x.dtype == jnp.uint16 else 1) for x in jax.tree.leaves(weight))


def param_read_share(config: ModelConfig, path: str, tokens: int, shards: int = 1) -> float:
    """Return the share of a parameter that `tokens` tokens of each shard read, on one shard."""
    module, *rest = path.split(".")
    if module in ("embed", "head", "positions") or path == "inputs.embed":
        return 0.0
    if rest[1:3] == ["attention", "indexer"] and active_indexer(config.layers[int(rest[0])]) is None:
        return 0.0
    if rest[1:3] != ["ffn", "experts"]:
        return 1.0
    ffn = config.layers[int(rest[0])].ffn
    assert ffn is not None
    return ffn.active_share(shards * tokens) / shards


def cache_traffic_bytes(kind: LayerKind, context: int, tokens: int, cache_format: CacheFormat) -> float:
    """Return the bytes of a layer's cache that a row of `tokens` new tokens reads and writes. Cached keys
    count once, new keys and the state twice."""
    states = 2 * state_bytes(kind.state_shapes) if kind.state_shapes else 0
    if kind.attention is None:
        return states
    return (
        key_read_bytes(kind, context, tokens, cache_format)
        + 2 * tokens * layer_token_bytes(kind, cache_format)
        + states
    )


def mixer_flops(kind: LayerKind, keys: float) -> float:
    """Return the operations of a layer's mixers for a query with `keys` keys before it. Scores of a
    sparse-attention indexer are included."""
    chooser = active_indexer(kind)
    if chooser is None:
        return sum(mixer.pair_flops * attended_keys(mixer, keys) for mixer in kind.mixers)
    scoring = 2 * chooser.num_heads * (chooser.head_size + 1)
    return kind.mixer.pair_flops * min(keys, chooser.top_k or 0) + scoring * keys


def key_read_bytes(kind: LayerKind, context: float, tokens: int, cache_format: CacheFormat) -> float:
    """Return the least bytes of a row's keys and values that its queries read in a layer. With sparse
    attention each query reads other keys, and all read the index."""
    chooser = active_indexer(kind)
    if chooser is None:
        return attended_keys(kind.mixer, context) * layer_token_bytes(kind, cache_format)
    index = head_bytes(chooser.head_size, cache_format)
    selected_bytes = min(context, tokens * (chooser.top_k or 0)) * (
        layer_token_bytes(kind, cache_format) - index
    )
    return selected_bytes + context * index


def attended_keys(mixer: Mixer, keys: float) -> float:
    """Return the number of keys that a query attends to, of `keys` before it. For attention in chunks it is
    the mean over a chunk; for a layer with a state, 1."""
    if mixer.window == STATE_WINDOW:
        return 1
    if mixer.window is None or keys <= mixer.window:
        return keys
    return (mixer.window + 1) / 2 if is_chunked(mixer) else mixer.window


def first_attended_key(mixer: Mixer, start: np.ndarray) -> np.ndarray:
    """Return the first key that the query at each position attends to, in a layer with a window."""
    window = mixer.window
    assert window is not None
    return start // window * window if is_chunked(mixer) else start - window + 1


def is_chunked(mixer: Mixer) -> bool:
    """Tell if attention is in chunks, rather than in a sliding window."""
    return isinstance(mixer, GroupedQuery) and mixer.chunked


def cached_elements_per_token(kind: LayerKind) -> int:
    """Return how many numbers a token has in the cache of a layer."""
    return sum(
        heads * size for heads, size in filter(None, kind.attention.cache_shapes if kind.attention else ())
    )


def activation_bytes(config: ModelConfig, queries: int, sampled: int, size: int) -> float:
    """Return the bytes of all activations, written and read once, and of the logits in 32 bits."""

    def layer_elements(kind: LayerKind) -> int:
        heads = sum(m.num_heads * sum(m.head_sizes) for m in kind.mixers) + 2 * cached_elements_per_token(
            kind
        )
        return 3 * config.hidden_size + 2 * kind.inner_size + heads

    input_elements = 3 * config.layer_input_size  # per-layer inputs: projection, sum, and a gate of each
    return (
        2 * queries * (sum(map(layer_elements, config.layers)) + input_elements) * size
        + 2 * 4 * sampled * config.vocab_size
    )
