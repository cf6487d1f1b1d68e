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

from ...kvcache.groups import group_size
from ...kvcache.pages import BLOCK, KVCache, row_bytes
from ...kvcache.quantised import kept_as
from ...model.config import GroupedQuery, LayerKind, ModelConfig
from ...model.pair import Pair, PairConfig, Params, target_of
from ...model.sharding import device_bytes
from ...model.transformer import Decoder, decoder_spec
from ...model.tree import abstract, nbytes, paths
from ..programs.shapes import Shape
from .hlo import Pool


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
    """One dispatch of a program whose every row has `context` tokens in the cache; a prefill's rows are parts
    of one prompt.

    `params`, arrays or shapes, say how many bytes the weights have; by default those of the dtype. Without
    `samples` it ends before the head, as the stages of a pipeline do but for the last. Of `shards` with so
    many rows each, over which experts are split, it is one's part.
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


def pools(shape: Shape, layers: Sequence[LayerKind], cache: KVCache, context: int) -> tuple[Pool, ...]:
    """What a step's attention reads of each of a cache's buffers, arrays or shapes, on one of their
    devices."""
    tokens = 1 if shape.phase == "decode" else shape.tokens
    start = starts(shape, context)

    def pool(kind: LayerKind, buffer: Any, arrays: int) -> Pool:
        _, pages, width, *_ = buffer.sharding.shard_shape(buffer.shape)
        own, window = device_bytes(buffer), kind.mixer.window
        sequences, rows = min(shape.sequences, shape.rows_of(tokens)), shape.rows_of(tokens)
        live = min((sequences * seen(kind, context) + rows * tokens) / (pages * width), 1)
        first = 0 if window is None else np.maximum(first_seen(kind, start), 0) // BLOCK
        blocks = np.sort(-(-(start + tokens) // BLOCK) - first)[::-1]
        return Pool(own, round(own * live), int(blocks[:: group_size(shape.rows, tokens)].sum()), arrays)

    kept = [jax.tree.leaves(own) for own in zip(cache.k, cache.v, strict=True)]
    return tuple(
        pool(kind, buffer, len(own)) for kind, own in zip(layers, kept, strict=True) for buffer in own
    )


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
    """One pass of [rows, tokens] that samples after `sampled` tokens of each row; attention is causal. Of
    `shards` with as many rows each it is one's."""
    size, queries = jnp.dtype(params.embed.dtype).itemsize, rows * tokens
    head = config.vocab_size * config.hidden_size
    flops = 2 * inner_numbers(config) * queries + 2 * head * rows * sampled
    flops += (
        sum(kind.mixer.pair_flops * seen(kind, context + (tokens + 1) / 2) for kind in config.layers)
        * queries
    )
    output = params.embed if params.head is None else params.head
    head_bytes = nbytes(output) if sampled else 0
    inner = inner_bytes(config, params, queries, shards)
    weights = inner + head_bytes + queries * (config.hidden_size + config.input_size) * size
    # read what is there, write and read what is new
    kept = kept_as(kv_cache_dtype, params.embed.dtype)
    cache = rows * sum((seen(kind, context) + 2 * tokens) * row_bytes(kind, kept) for kind in config.layers)
    return Demand(flops, weights + cache + activation_bytes(config, queries, rows * sampled, size))


def inner_numbers(config: ModelConfig) -> float:
    """Parameters that one token is multiplied with, but those of the head."""
    specs = paths(decoder_spec(config))
    return sum(math.prod(spec.shape) * share(config, path, 1) for path, spec in specs.items())


def inner_bytes(config: ModelConfig, params: Decoder, tokens: int, shards: int = 1) -> float:
    """Bytes of parameters that `tokens` tokens read: all but the embedding, the head, and the experts that
    none of them goes to. Of the experts each of `shards` has a part, for the tokens of all."""
    return sum(nbytes(leaf) * share(config, path, tokens, shards) for path, leaf in paths(params).items())


def share(config: ModelConfig, path: str, tokens: int, shards: int = 1) -> float:
    """The share of a parameter, or of a part of one, that `tokens` tokens of each shard read in one."""
    place, *rest = path.split(".")
    if place in ("embed", "head", "positions") or path == "inputs.embed":
        return 0.0
    if rest[1:3] != ["ffn", "experts"]:
        return 1.0
    return config.layers[int(rest[0])].ffn.met(shards * tokens) / shards


def seen(kind: LayerKind, keys: float) -> float:
    """How many of the keys before it a query sees, of those of a chunk on average."""
    window = kind.mixer.window
    if window is None or keys <= window:
        return keys
    return (window + 1) / 2 if in_chunks(kind) else window


def first_seen(kind: LayerKind, start: np.ndarray) -> np.ndarray:
    """The first key that queries at positions see, in a layer with a window."""
    window = kind.mixer.window
    assert window is not None
    return start // window * window if in_chunks(kind) else start - window + 1


def in_chunks(kind: LayerKind) -> bool:
    return isinstance(kind.mixer, GroupedQuery) and kind.mixer.chunked


def row_size(kind: LayerKind) -> int:
    """Numbers that a token leaves in the cache of a layer."""
    return sum(heads * size for heads, size in filter(None, kind.mixer.cached))


def activation_bytes(config: ModelConfig, queries: int, sampled: int, size: int) -> float:
    """Results of each product, written and read once, and the logits in 32 bits."""

    def layer(kind: LayerKind) -> int:
        heads = kind.mixer.num_heads * sum(kind.mixer.head_sizes) + 2 * row_size(kind)
        return 3 * config.hidden_size + 2 * kind.ffn.inner + heads

    told = 3 * config.input_size  # projected, added up, and a gate of each
    return 2 * queries * (sum(map(layer, config.layers)) + told) * size + 2 * 4 * sampled * config.vocab_size
