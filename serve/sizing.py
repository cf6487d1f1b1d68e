"""How much fits: an engine's sizes from the model, the options and the memory, before anything is allocated."""

import os
from typing import Any

import jax
import jax.numpy as jnp

from ..kvcache.pages import BLOCK, page_bytes
from ..model.config import ModelConfig
from ..model.transformer import decoder_spec
from ..model.tree import abstract, nbytes
from .options import EngineOptions
from .programs import Sizes
from .step import empty_slots

HOST_SHARE = 4  # of a CPU's physical memory, the cache takes at most one part in so many, and
HOST_MOST = 4 << 30  # at most so many bytes


def scratch_bytes(config: ModelConfig, options: EngineOptions, dtype: Any) -> int:
    """Temporaries of the largest step, generously: a chunk's activations, and a few copies of the logits in float32."""
    c, size = config, jnp.dtype(dtype).itemsize
    heads = (c.num_heads + 2 * c.num_kv_heads) * c.head_size
    activations = options.max_prefill_tokens * (4 * c.hidden_size + 2 * c.ffn_size + 2 * heads) * size
    attention = 8 * options.max_prefill_tokens * c.num_heads * (c.head_size + BLOCK)
    return activations + attention + 16 * options.max_num_seqs * c.vocab_size


def cache_budget(config: ModelConfig, options: EngineOptions, dtype: Any, memory: int | None) -> int:
    """Bytes that the KV cache may take of an accelerator's memory: what is left beside weights, slots and temporaries.

    Without an accelerator (None) it is a share of the host's.
    """
    if memory is None:
        return min(HOST_MOST, host_memory() // HOST_SHARE)
    weights = nbytes(abstract(decoder_spec(config), jnp.dtype(dtype)))
    slots = nbytes(jax.eval_shape(lambda: empty_slots(options.max_num_seqs, config.vocab_size)))
    scratch = scratch_bytes(config, options, dtype)
    return int(memory * options.gpu_memory_utilization) - weights - slots - scratch


def check_slots(config: ModelConfig, options: EngineOptions, memory: int | None) -> None:
    """Raises ValueError where the sampling state of all slots alone would take more than the cache may of a host."""
    most = host_memory() // HOST_SHARE if memory is None else memory
    slots = nbytes(jax.eval_shape(lambda: empty_slots(options.max_num_seqs, config.vocab_size)))
    if slots > most:
        raise ValueError(
            f"max_num_seqs {options.max_num_seqs} needs {slots / 2**30:.1f} GiB for its requests' sampling state, "
            f"at most {most / 2**30:.1f} GiB are free: lower it"
        )


def host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def choose_sizes(config: ModelConfig, options: EngineOptions, dtype: Any, memory: int | None) -> Sizes:
    """Fixed shapes for a model in an accelerator's bytes of memory, or in a host's (None).

    Raises ValueError, saying which knob to turn, where they do not fit.
    """
    check_slots(config, options, memory)
    W, budget = options.page_size, cache_budget(config, options, dtype, memory)
    longest = options.max_model_len or config.max_position
    if longest > config.max_position:
        raise ValueError(f"max_model_len {longest} is beyond the model's {config.max_position} positions")
    if longest < 2:
        raise ValueError(f"max_model_len {longest} is not allowed: 2 or more, for a prompt and an answer")
    one_page = page_bytes(config, W, dtype)
    wanted = options.max_batched_token_mem or options.max_num_seqs * longest
    pages = -(-wanted // W)
    if options.max_batched_token_mem is None:
        pages = min(pages, budget // one_page)
        if options.max_model_len is None:
            longest = min(longest, pages * W)
    elif pages * one_page > budget:
        raise ValueError(
            f"max_batched_token_mem {wanted} needs {pages * one_page / 2**30:.1f} GiB of cache, {budget / 2**30:.1f} GiB are "
            "free: lower it, or raise gpu_memory_utilization"
        )
    if pages < -(-longest // W):
        raise ValueError(
            f"a request of max_model_len {longest} does not fit a cache of {max(pages, 0) * W} tokens: lower max_model_len, "
            "or raise max_batched_token_mem or gpu_memory_utilization"
        )
    return Sizes(longest, options.max_num_seqs, pages, W)
