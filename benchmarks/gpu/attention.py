"""One layer's attention: ways to read pages beside each other."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.run import PAGE, Row, Run, guarded
from duetto.kvcache.kernels.attention import LayerPages, attend_gpu
from duetto.kvcache.kernels.hopper_attention import HOPPER_PREFILL
from duetto.kvcache.pages import Batch, attend_key_blocks, read_kv_block
from duetto.model.attention import AttentionParams
from duetto.model.gpus import disable_kernels
from duetto.serve.cli.bench import median_seconds

READING = AttentionParams(0.125)
Attention = Callable[[jax.Array, LayerPages], jax.Array]


def by_kernels(q: jax.Array, pages: LayerPages) -> jax.Array:
    return attend_gpu(q, pages, READING, interpret=jax.default_backend() == "cpu")


def by_triton(q: jax.Array, pages: LayerPages) -> jax.Array:
    """Without the kernel that a Hopper has for several queries."""
    with disable_kernels([HOPPER_PREFILL.name]):
        return by_kernels(q, pages)


def by_blocks(q: jax.Array, pages: LayerPages) -> jax.Array:
    """The reference, which gathers a block's pages."""
    B, T = q.shape[:2]
    batch = Batch(jnp.zeros((B, T), jnp.int32), pages.start, pages.count, (pages.table,), pages.start)
    read = partial(read_kv_block, pages[:2], pages.table, READING, q.dtype)
    return attend_key_blocks(q, batch, read, READING).astype(q.dtype)


def by_gather(q: jax.Array, pages: LayerPages) -> jax.Array:
    """All pages side by side, then XLA's own attention: for whole tables only."""
    k, v = (pool[:, pages.table].transpose(1, 2, 3, 0, 4) for pool in pages[:2])  # [B,M,W,K,H]
    k, v = (x.reshape(x.shape[0], -1, *x.shape[3:]) for x in (k, v))
    return jax.nn.dot_product_attention(
        q, k, v, scale=READING.scale, key_value_seq_lengths=pages.start + 1, implementation="xla"
    )


def by_cudnn(q: jax.Array, pages: LayerPages) -> jax.Array:
    """cuDNN's paged attention, which jax has in private only; its pages are [P,K,W,H], so it is given other
    pools."""
    cudnn: Any = import_module("jax._src.cudnn.fused_attention_stablehlo")
    k, v = (pool.swapaxes(0, 1) for pool in pages[:2])
    table, length = pages.table[:, None, :, None], pages.start + pages.count
    ones = jnp.full(q.shape[0], q.shape[1], jnp.int32)
    out = cudnn.paged_attention(
        q.swapaxes(1, 2), k, v, ones, length, table, table,
        scale=READING.scale, mask_type=cudnn.MaskType.PADDING, qkv_layout="BNTH",
    )  # fmt: skip
    return (out[0] if isinstance(out, (tuple, list)) else out).swapaxes(1, 2)


def by_cudnn_chunk(q: jax.Array, pages: LayerPages) -> jax.Array:
    """cuDNN's attention over a prompt's own keys, gathered once."""
    k, v = (pool[:, pages.table[0]].reshape(pool.shape[0], -1, pool.shape[3]) for pool in pages[:2])
    k, v = (x.swapaxes(0, 1)[None, : q.shape[1]] for x in (k, v))
    return jax.nn.dot_product_attention(q, k, v, scale=READING.scale, is_causal=True, implementation="cudnn")


def attention_inputs(run: Run, B: int, T: int, context: int) -> tuple[jax.Array, LayerPages]:
    """Rows whose last tokens are the T queries, over random pages in a random order."""
    K, N, H, M = (2, 4, 64, -(-context // PAGE)) if run.dry else (8, 32, 128, -(-context // PAGE))
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (B, T, N, H), run.dtype)
    k, v = (jax.random.normal(key, (K, B * M, PAGE, H), run.dtype) for key in keys[1:])
    table = np.random.default_rng(0).permutation(B * M).reshape(B, M)
    start, count = jnp.full(B, context - T, jnp.int32), jnp.full(B, T, jnp.int32)
    return q, LayerPages(k, v, jnp.asarray(table, jnp.int32), start, count)


def seconds_of(attend: Attention, q: jax.Array, pages: LayerPages, times: int) -> float:
    """Seconds of a call among so many in one program, each with the last one's output for queries."""

    @jax.jit
    def repeated(q: jax.Array, pages: LayerPages) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, q: attend(q, pages).astype(q.dtype), q)

    return median_seconds(partial(repeated, q, pages), 1) / times


def bench_attention(run: Run) -> Iterator[Row]:
    """Ways to read pages beside each other: of single tokens the share of the memory's rate, of a prompt of
    the product's."""
    times = 1 if run.dry else 20
    decode = {
        "kernels": by_kernels,
        "reference": by_blocks,
        "gather, XLA": by_gather,
        "cuDNN paged": by_cudnn,
    }
    for B, context in (*((width, run.context) for width in run.widths), (8, run.long)):
        q, pages = attention_inputs(run, B, 1, context)
        least = 2 * pages.k.nbytes / run.peaks.bandwidth
        for name, attend in decode.items():
            what = f"{name}, {B} rows, context {context}"
            timed = partial(seconds_of, attend, q, pages, times)
            yield from guarded("attention", what, timed, "us", least)
    prefill = {"kernels": by_kernels, "Triton's kernel": by_triton, "reference": by_blocks}
    for T, context in ((run.prompt, run.prompt), (run.prompt // 8, run.long)):
        q, pages = attention_inputs(run, 1, T, context)
        least = 4 * (context - T / 2) * q.size / run.peaks.flops16
        gathered = {"gather, cuDNN": by_cudnn_chunk} if context == T else {}
        for name, attend in (prefill | gathered).items():
            what = f"{name}, prompt of {T}" + f" behind {context - T}" * (context > T)
            timed = partial(seconds_of, attend, q, pages, times)
            yield from guarded("attention", what, timed, "us", least)
