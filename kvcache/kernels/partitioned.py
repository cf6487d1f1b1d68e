"""Attention by kernels on meshes: each device reads the key heads whose pools it holds, for its own part of
their query heads where several devices hold them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from ...model.attention import AttentionParams
from ...model.sharding import automatic_axes, ways
from ..shards import head_axes
from .tiles import LayerPages

# of queries [B,T,K,G,H], pages, sinks [K,G] or None, what is static of a layer's parameters, and True to be
# interpreted: outputs [B,T,K,G,U]
LocalAttention = Callable[[Any, LayerPages, Any, AttentionParams, bool], Any]


def by_each_device(
    attend: LocalAttention,
    q: Float[Array, "B T N H"],
    pages: LayerPages,
    reading: AttentionParams,
    interpret: bool,
) -> Float[Array, "B T N U"]:
    """Attention of the rows' tokens over their pages by what a device, or a group of devices, does for the
    heads that it has."""
    (B, T, N, H), K = q.shape, pages.k.shape[0]
    sinks = None if reading.sinks is None else reading.sinks.astype(jnp.float32).reshape(K, N // K)
    plain = AttentionParams(
        reading.scale, reading.window, reading.softcap, rank=reading.rank, chunked=reading.chunked
    )
    if reading.turned is not None:
        pages = pages._replace(turned=reading.turned.reshape(B, T, K, N // K, -1))
    out = of_heads(q.reshape(B, T, K, N // K, H), pages, sinks, plain, attend, interpret)
    return out.reshape(B, T, N, -1)


@partial(jax.jit, static_argnums=(3, 4, 5))  # layers share one trace
def of_heads(
    q: Float[Array, "B T K G H"],
    pages: LayerPages,
    sinks: Float[Array, "K G"] | None,
    reading: AttentionParams,
    attend: LocalAttention,
    interpret: bool,
) -> Float[Array, "B T K G U"]:
    def local(q: Any, pages: LayerPages, sinks: Any) -> Any:
        return attend(q, pages, sinks, reading, interpret)

    mesh = jax.typeof(q).sharding.mesh
    names = automatic_axes(mesh)
    if ways(mesh, names) == 1:
        return local(q, pages, sinks)
    specs = specs_of(pages, sinks, *head_axes(mesh, pages.k.shape[0]))
    each = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=specs[0], axis_names=set(names), check_vma=False
    )
    return each(q, pages, sinks)


def specs_of(pages: LayerPages, sinks: Any, axis: tuple[str, ...], group: tuple[str, ...]) -> tuple[Any, ...]:
    """PartitionSpecs of queries, pages and sinks: key heads over the axes `axis` of a mesh, their query heads
    over `group`."""
    own, each = axis or None, group or None
    specs = (own,), (own, each), (None, None, own, each), (None, None, own), ()
    pool, scores, queries, heads, whole = (PartitionSpec(*spec) for spec in specs)
    keys, values = jax.tree.map(lambda _: pool, pages[:2])
    tree = None if pages.own is None else (heads, None if values is None else heads, whole)
    rest = None if pages.turned is None else queries
    return (
        queries,
        LayerPages(keys, values, whole, whole, whole, tree, rest),
        None if sinks is None else scores,
    )
