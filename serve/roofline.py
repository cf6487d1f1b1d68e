"""The floor of a step's time: what it must compute and move, counted from the model's sizes, over a device's peaks.

The roofline model is Williams, Waterman and Patterson's (CACM 52/4, 2009). Everything here is analytic: weights are read once
a step, the keys in the cache once, and activations are written and read once; a program that does more is slower than its
floor. Padding counts as work, since the shapes do not know what is in them.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from ..model.config import ModelConfig
from ..model.transformer import decoder_spec
from ..model.tree import is_spec, paths
from .programs import Shape


@dataclass(frozen=True)
class Work:
    """Operations (a multiply-add is two) and bytes from and to memory."""

    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """Operations for each byte."""
        return self.flops / self.bytes

    def floor(self, flops: float, bandwidth: float) -> float:
        """Seconds that a device of so many FLOP/s and bytes/s needs at least."""
        return max(self.flops / flops, self.bytes / bandwidth)

    def bound(self, flops: float, bandwidth: float) -> str:
        """Which of the two decides."""
        return "compute" if self.flops / flops > self.bytes / bandwidth else "memory"


def work(shape: Shape, config: ModelConfig, dtype: Any, context: int) -> Work:
    """One dispatch of a program: every row of a decode or verify has `context` tokens in the cache, a prefill has none."""
    B, T = shape.rows, shape.tokens
    if shape.phase == "decode":
        one = step_work(config, dtype, rows=B, tokens=1, context=context, sampled=1)
        return Work(T * one.flops, T * one.bytes)
    past, sampled = (0, 1) if shape.phase == "prefill" else (context, T)
    return step_work(config, dtype, rows=B, tokens=T, context=past, sampled=sampled)


def step_work(config: ModelConfig, dtype: Any, *, rows: int, tokens: int, context: int, sampled: int) -> Work:
    """One pass of [rows, tokens] that samples after `sampled` tokens of each row; attention is causal."""
    size, queries = jnp.dtype(dtype).itemsize, rows * tokens
    head = config.vocab_size * config.hidden_size
    inner = inner_parameters(config)
    keys = context + (tokens + 1) / 2
    flops = 2 * inner * queries + 2 * head * rows * sampled + attention_flops(config, queries, keys)
    weights = (inner + head + queries * config.hidden_size) * size
    cache = (
        rows * (context + 2 * tokens) * key_bytes(config, size)
    )  # read what is there, write and read what is new
    return Work(flops, weights + cache + activation_bytes(config, queries, rows * sampled, size))


def inner_parameters(config: ModelConfig) -> int:
    """Parameters that every token meets: all but the embedding and the head."""
    specs = paths(decoder_spec(config))
    return sum(
        math.prod(spec.shape)
        for path, spec in specs.items()
        if path not in ("embed", "head") and is_spec(spec)
    )


def attention_flops(config: ModelConfig, queries: float, keys: float) -> float:
    """Scores and weighted values of `queries` tokens over `keys` positions each, in all layers."""
    return 4 * config.num_layers * config.num_heads * config.head_size * queries * keys


def key_bytes(config: ModelConfig, size: int) -> int:
    """Bytes of one token's keys and values in all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_size * size


def activation_bytes(config: ModelConfig, queries: int, sampled: int, size: int) -> float:
    """Results of each product, written and read once, and the logits in 32 bits."""
    c = config
    layer = 3 * c.hidden_size + 2 * c.ffn_size + 2 * (c.num_heads + c.num_kv_heads) * c.head_size
    return 2 * queries * c.num_layers * layer * size + 2 * 4 * sampled * c.vocab_size
