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
from ....kvcache.pages import BLOCK, KVCache, row_bytes
from ....kvcache.quantised import Kept, head_bytes, kept_as
from ....kvcache.states import state_bytes
from ....model.config import GroupedQuery, LayerKind, Mixer, ModelConfig
from ....model.latent import chooser_of
from ....model.pair import Pair, PairConfig, Params, target_of
from ....model.recurrent.kinds import STATE
from ....model.sharding import device_bytes
from ....model.transformer import Decoder, decoder_spec
from ....model.tree import abstract, nbytes, paths
from ...runtime.compiled.shapes import Shape
from .hlo import PoolBuffer


@dataclass(frozen=True)
class Demand:
    """Operations (a multiply-add is two) and bytes from and to memory."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.bytes

    def floor(self, flops: float, bandwidth: float) -> float:
        """Least seconds on a device of `flops` FLOP/s and `bandwidth` bytes/s."""
        return max(self.flops / flops, self.bytes / bandwidth)

    def bound(self, flops: float, bandwidth: float) -> str:
        """Which of the two is the bound."""
        return "compute" if self.flops / flops > self.bytes / bandwidth else "memory"


def demand(
    shape: Shape,
    config: ModelConfig,
    dtype: Any,
    context: int,
    params: Decoder | None = None,
    kv_cache_dtype: str = "auto",
    samples: bool = True,
    shards: int = 1,
) -> Demand:
    """Work of one dispatch of a program whose every row has `context` tokens in the cache; a prefill's rows
    are parts of one prompt.

    params: arrays or shapes, whose bytes count; by default those of the dtype.
    samples: False for a stage of a pipeline that has no head.
    shards: over which experts are split, each with rows of its own; the work is that of one shard.
    """
    B, T, last = shape.rows, shape.tokens, int(samples)
    params = abstract(decoder_spec(config), jnp.dtype(dtype)) if params is None else params
    step = partial(step_demand, config, params, kv_cache_dtype, context=context, shards=shards)
    if shape.phase == "decode":
        one = step(rows=B, tokens=1, sampled=last)
        return Demand(T * one.flops, T * one.bytes)
    if shape.phase == "prefill":
        return step(rows=1, tokens=B * T, sampled=last)
    return step(rows=shape.rows_of(T), tokens=T, sampled=last * T)


def pair_demand(
    shape: Shape,
    config: PairConfig,
    dtype: Any,
    context: int,
    params: Params,
    kv_cache_dtype: str = "auto",
    shards: int = 1,
) -> Demand:
    """`demand` of a model and of the draft model beside it, which guesses one token after the other, and else
    only writes its keys.

    What a head computes is left out: it is one product or two.
    """
    own = demand(shape, config.target, dtype, context, target_of(params), kv_cache_dtype, shards=shards)
    if config.draft is None:
        return own
    assert isinstance(params, Pair)
    T = shape.tokens
    rows, tokens, times = (1, shape.area, 1) if shape.phase == "prefill" else (shape.rows_of(T), 1, T)
    sampled = int(shape.phase == "verify")
    step = partial(step_demand, config.draft, params.draft, kv_cache_dtype, context=context)
    one = step(rows=rows, tokens=tokens, sampled=sampled)
    return Demand(own.flops + times * one.flops, own.bytes + times * one.bytes)


def starts(shape: Shape, context: int) -> np.ndarray:
    """Where the rows [B] of a step begin if `context` tokens are in the cache before it: those of a prefill
    follow one another."""
    apart = shape.tokens if shape.phase == "prefill" else 0
    return context + apart * np.arange(shape.rows)


def pools(shape: Shape, layers: Sequence[LayerKind], cache: KVCache, context: int) -> tuple[PoolBuffer, ...]:
    """Return what a step's attention reads of each of a cache's buffers, on one of their devices."""
    tokens = 1 if shape.phase == "decode" else shape.tokens
    start = starts(shape, context)

    def pool(mixer: Mixer, buffer: Any, arrays: int) -> PoolBuffer:
        _, pages, width, *_ = buffer.sharding.shard_shape(buffer.shape)
        own = device_bytes(buffer)
        if mixer.window == STATE:
            return PoolBuffer(own, own * min(shape.sequences, pages) // pages, 0, arrays)
        sequences, rows = min(shape.sequences, shape.rows_of(tokens)), shape.rows_of(tokens)
        live = min((sequences * seen(mixer, context) + rows * tokens) / (pages * width), 1)
        first = 0 if mixer.window is None else np.maximum(first_seen(mixer, start), 0) // BLOCK
        blocks = np.sort(-(-(start + tokens) // BLOCK) - first)[::-1]
        return PoolBuffer(
            own, round(own * live), int(blocks[:: group_size(shape.rows, tokens)].sum()), arrays
        )

    found = []
    for kind, keys, values, states in zip(layers, cache.k, cache.v, cache.states, strict=True):
        for mixer in kind.mixers:
            own = jax.tree.leaves(states if mixer.state else (keys, values))
            found += [pool(mixer, buffer, len(own)) for buffer in own]
    return tuple(found)


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
    """Work of one pass of [rows, tokens] with causal attention, which samples after `sampled` tokens of each
    row; of `shards` with as many rows each, the work of one."""
    size, queries = jnp.dtype(params.embed.dtype).itemsize, rows * tokens
    head = config.vocab_size * config.hidden_size
    flops = 2 * inner_numbers(config) * queries + 2 * head * rows * sampled
    flops += queries * sum(mixing_flops(kind, context + (tokens + 1) / 2) for kind in config.layers)
    output = params.embed if params.head is None else params.head
    head_bytes = weight_bytes(output) if sampled else 0
    inner = inner_bytes(config, params, queries, shards)
    weights = inner + head_bytes + queries * (config.hidden_size + config.input_size) * size
    # read what is there, write and read what is new
    kept = kept_as(kv_cache_dtype, params.embed.dtype)
    cache = rows * sum(kept_bytes(kind, context, tokens, kept) for kind in config.layers)
    return Demand(flops, weights + cache + activation_bytes(config, queries, rows * sampled, size))


def inner_numbers(config: ModelConfig) -> float:
    """Parameters that one token is multiplied with, but those of the head."""
    specs = paths(decoder_spec(config))
    return sum(math.prod(spec.shape) * share(config, path, 1) for path, spec in specs.items())


def inner_bytes(config: ModelConfig, params: Decoder, tokens: int, shards: int = 1) -> float:
    """Bytes of parameters that `tokens` tokens read: all but the embedding, the head, and the experts that
    none of them goes to. Of the experts each of `shards` has a part, for the tokens of all."""
    return sum(weight_bytes(x) * share(config, path, tokens, shards) for path, x in paths(params).items())


def weight_bytes(weight: Any) -> float:
    """Bytes that a product reads of a weight: three quarters of an array for 12 bits (`bf12`)."""
    return sum(nbytes(x) * (0.75 if x.dtype == jnp.uint16 else 1) for x in jax.tree.leaves(weight))


def share(config: ModelConfig, path: str, tokens: int, shards: int = 1) -> float:
    """The share of a parameter, or of a part of one, that `tokens` tokens of each shard read in one."""
    place, *rest = path.split(".")
    if place in ("embed", "head", "positions") or path == "inputs.embed":
        return 0.0
    if rest[1:3] == ["attention", "indexer"] and chooser_of(config.layers[int(rest[0])]) is None:
        return 0.0
    if rest[1:3] != ["ffn", "experts"]:
        return 1.0
    ffn = config.layers[int(rest[0])].ffn
    assert ffn is not None
    return ffn.met(shards * tokens) / shards


def kept_bytes(kind: LayerKind, context: int, tokens: int, kept: Kept) -> float:
    """Bytes of a layer's cache that a row of `tokens` new tokens reads and writes: the keys that are there,
    and twice the new ones; and its state, twice."""
    states = 2 * state_bytes(kind.state) if kind.state else 0
    if kind.keys is None:
        return states
    return read_bytes(kind, context, tokens, kept) + 2 * tokens * row_bytes(kind, kept) + states


def mixing_flops(kind: LayerKind, keys: float) -> float:
    """Operations of a layer's mixers for a query with `keys` keys before it, including the scores by which
    keys are chosen."""
    chooser = chooser_of(kind)
    if chooser is None:
        return sum(mixer.pair_flops * seen(mixer, keys) for mixer in kind.mixers)
    scoring = 2 * chooser.num_heads * (chooser.head_size + 1)
    return kind.mixer.pair_flops * min(keys, chooser.keys or 0) + scoring * keys


def read_bytes(kind: LayerKind, context: float, tokens: int, kept: Kept) -> float:
    """Bytes of a row's keys and values that its queries read in a layer, at the least: where they are chosen
    each query reads others, but all read what keys are chosen by."""
    chooser = chooser_of(kind)
    if chooser is None:
        return seen(kind.mixer, context) * row_bytes(kind, kept)
    index = head_bytes(chooser.head_size, kept)
    own = min(context, tokens * (chooser.keys or 0)) * (row_bytes(kind, kept) - index)
    return own + context * index


def seen(mixer: Mixer, keys: float) -> float:
    """Return how many of `keys` keys before it a query sees: on average over its chunk, if attention is in
    chunks; 1 for a layer with a state."""
    if mixer.window == STATE:
        return 1
    if mixer.window is None or keys <= mixer.window:
        return keys
    return (mixer.window + 1) / 2 if in_chunks(mixer) else mixer.window


def first_seen(mixer: Mixer, start: np.ndarray) -> np.ndarray:
    """The first key that queries at positions see, in a layer with a window."""
    window = mixer.window
    assert window is not None
    return start // window * window if in_chunks(mixer) else start - window + 1


def in_chunks(mixer: Mixer) -> bool:
    return isinstance(mixer, GroupedQuery) and mixer.chunked


def row_size(kind: LayerKind) -> int:
    """Numbers that a token leaves in the cache of a layer."""
    return sum(heads * size for heads, size in filter(None, kind.keys.cached if kind.keys else ()))


def activation_bytes(config: ModelConfig, queries: int, sampled: int, size: int) -> float:
    """Results of each product, written and read once, and the logits in 32 bits."""

    def layer(kind: LayerKind) -> int:
        heads = sum(m.num_heads * sum(m.head_sizes) for m in kind.mixers) + 2 * row_size(kind)
        return 3 * config.hidden_size + 2 * kind.inner + heads

    told = 3 * config.input_size  # projected, added up, and a gate of each
    return 2 * queries * (sum(map(layer, config.layers)) + told) * size + 2 * 4 * sampled * config.vocab_size
