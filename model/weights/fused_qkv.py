"""Projections of one input to heads, side by side in one array, for one GPU.

XLA makes one product of several too, but of three arrays: for 64 rows of the 8B shape on an H200 it takes 2.4
times as long as that of one.
"""

from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ..attention import Attention, FusedQKV
from ..gpus import gpu_of
from ..tree import holds, unwrapped
from .compress import replaced

T = TypeVar("T")


def fuse_qkv(params: T, donate: bool = False) -> T:
    """A tree of parameters, or of ShapeDtypeStructs, that lies on one NVIDIA GPU, with the projections to
    queries, keys and values as `FusedQKV`; others are given back themselves.

    Left as they are: layers without keys or values of their own, and records. With `donate` the projections
    are deleted when their copy is ready.
    """

    def layer(w: Attention) -> Attention:
        parts = w.q, w.k, w.v
        if not all(isinstance(x, jax.Array | jax.ShapeDtypeStruct) for x in parts):
            return w
        if len({(x.shape[0], x.shape[2], x.dtype) for x in parts}) > 1:
            return w
        done = replaced(parts, fuse(parts), donate) if isinstance(w.q, jax.Array) else fuse(parts)
        return replace(w, q=done, k=None, v=None)

    return unwrapped(params, Attention, layer) if is_on_one_gpu(params) else params


def fuse(parts: Any) -> FusedQKV:
    sizes, first = tuple(x.shape[1] for x in parts), parts[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        shape = first.shape[0], sum(sizes), first.shape[2]
        return FusedQKV(jax.ShapeDtypeStruct(shape, first.dtype, sharding=first.sharding), sizes)
    return FusedQKV(jnp.concatenate(parts, axis=1), sizes)


def is_on_one_gpu(params: Any) -> bool:
    places = {x.sharding for x in jax.tree.leaves(params)}
    devices = set().union(*(where.device_set for where in places if where is not None))
    return len(devices) == 1 and all(gpu_of(device) is not None for device in devices)


def split_qkv(params: T) -> T:
    """The tree with projections in place of `FusedQKV`, which are copied; itself where it has none."""

    def layer(w: Attention) -> Attention:
        return replace(w, **dict(zip("qkv", split(w.q), strict=True))) if isinstance(w.q, FusedQKV) else w

    return unwrapped(params, Attention, layer) if has_fused_qkv(params) else params


def split(w: FusedQKV) -> list[Any]:
    if not isinstance(w.array, jax.ShapeDtypeStruct):
        return jnp.split(w.array, np.cumsum(w.heads[:-1]), axis=1)
    (D, _, H), place = w.array.shape, w.array.sharding
    return [jax.ShapeDtypeStruct((D, n, H), w.array.dtype, sharding=place) for n in w.heads]


def has_fused_qkv(params: Any) -> bool:
    return holds(params, FusedQKV)
