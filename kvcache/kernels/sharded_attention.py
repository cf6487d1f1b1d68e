"""Attention kernels on meshes. Each device reads the key heads whose pools it holds. If several devices hold
them, each takes a part of their query heads."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from ...model.attention import AttentionParams
from ...model.sharding import automatic_axes, num_splits
from ..shards import mesh_head_axes
from .tiles import LayerPages

# Arguments: queries [B,T,K,G,H], pages, sinks [K,G] or None, static parameters of the layer, and True to
# interpret the kernel. Result: outputs [B,T,K,G,U].
LocalAttention = Callable[[Any, LayerPages, Any, AttentionParams, bool], Any]


def attend_on_devices(
    attend: LocalAttention,
    q: Float[Array, "B T N H"],
    pages: LayerPages,
    attention: AttentionParams,
    interpret: bool,
) -> Float[Array, "B T N U"]:
    """Attend to the pages of each row with `attend`, on each device for the heads it has."""
    (B, T, N, H), K = q.shape, pages.k.shape[0]
    sinks = None if attention.sinks is None else attention.sinks.astype(jnp.float32).reshape(K, N // K)
    static_params = AttentionParams(
        attention.scale, attention.window, attention.softcap, rank=attention.rank, chunked=attention.chunked
    )
    if attention.rope_queries is not None:
        pages = pages._replace(rope_queries=attention.rope_queries.reshape(B, T, K, N // K, -1))
    out = attend_heads(q.reshape(B, T, K, N // K, H), pages, sinks, static_params, attend, interpret)
    return out.reshape(B, T, N, -1)


@partial(jax.jit, static_argnums=(3, 4, 5))  # layers share one trace
def attend_heads(
    q: Float[Array, "B T K G H"],
    pages: LayerPages,
    sinks: Float[Array, "K G"] | None,
    attention: AttentionParams,
    attend: LocalAttention,
    interpret: bool,
) -> Float[Array, "B T K G U"]:
    """Attend with query heads grouped by key head, under `shard_map` where a mesh splits heads."""

    def attend_local(q: Any, pages: LayerPages, sinks: Any) -> Any:
        """Attend with the heads of one device."""
        return attend(q, pages, sinks, attention, interpret)

    mesh = jax.typeof(q).sharding.mesh
    names = automatic_axes(mesh)
    if num_splits(mesh, names) == 1:
        return attend_local(q, pages, sinks)
    specs = attention_specs(pages, sinks, *mesh_head_axes(mesh, pages.k.shape[0]))
    mapped = jax.shard_map(
        attend_local, mesh=mesh, in_specs=specs, out_specs=specs[0], axis_names=set(names), check_vma=False
    )
    return mapped(q, pages, sinks)


def attention_specs(
    pages: LayerPages, sinks: Any, key_axes: tuple[str, ...], query_axes: tuple[str, ...]
) -> tuple[Any, ...]:
    """Return the PartitionSpecs of queries, pages and sinks. Mesh axes `key_axes` split key heads, axes
    `query_axes` the query heads of each."""
    key_part, query_part = key_axes or None, query_axes or None
    specs = (
        (key_part,),
        (key_part, query_part),
        (None, None, key_part, query_part),
        (None, None, key_part),
        (),
    )
    pool, scores, queries, heads, replicated = (PartitionSpec(*spec) for spec in specs)
    keys, values = jax.tree.map(lambda _: pool, pages[:2])
    tail_specs = None if pages.tail is None else (heads, None if values is None else heads, replicated)
    rope_spec = None if pages.rope_queries is None else queries
    return (
        queries,
        LayerPages(keys, values, replicated, replicated, replicated, tail_specs, rope_spec),
        None if sinks is None else scores,
    )
