"""Shardings of an engine's arrays, derived from the shardings of the parameters. One device and a mesh are
treated alike.

Pools are split as the heads of their layer's keys are, so that every device keeps the keys that it computes.
XLA's partitioner (GSPMD, Xu et al., arXiv 2105.04663) derives the rest from the parameters. Rows that all
heads share are replicated on every device. Each data-parallel shard has its own pages.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ..model.config import AttentionMixer, LayerKind, Mixer
from ..model.draft_pair import EngineParams, all_layers, target_params
from ..model.sharding import DATA_AXIS
from ..model.weights.cpu.packed import kernel_isa
from .pages import KVCache


def sampling_sharding(params: EngineParams) -> Sharding:
    """Return the replicated sharding over the devices that sample tokens. These have the last layer's mixers:
    all devices, or a pipeline's last stage."""
    return replicated_sharding(last_sharding(params))


def last_sharding(params: EngineParams) -> Sharding:
    """Return the sharding of an array of the last layer's mixers."""
    decoder = target_params(params)
    # parameters that are refused may have no layers
    return (decoder.layers[-1].any_mixer_leaf if decoder.layers else decoder.embed).sharding


def slot_sharding(params: EngineParams, shards: int) -> Sharding:
    """Return the sharding of arrays whose first axis is the slots: replicated, or split over the
    data-parallel shards."""
    sharding = last_sharding(params)
    return (
        auto_sharding(sharding, PartitionSpec(DATA_AXIS))
        if isinstance(sharding, NamedSharding) and shards > 1
        else replicated_sharding(sharding)
    )


def replicated_sharding(sharding: Sharding) -> Sharding:
    """Return the replicated sharding over all devices of a sharding."""
    return auto_sharding(sharding, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def with_auto_axes(sharding: Sharding) -> Sharding:
    """Return a sharding of the same placement whose mesh axes are all automatic. XLA's partitioner then
    splits programs, whatever axis types the user's mesh has."""
    return auto_sharding(sharding, sharding.spec) if isinstance(sharding, NamedSharding) else sharding


def auto_sharding(sharding: NamedSharding, spec: PartitionSpec) -> NamedSharding:
    """Return a NamedSharding by `spec` over the devices of a sharding, with automatic mesh axes."""
    mesh: Any = sharding.mesh
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), spec)


def cache_shardings(layers: Sequence[LayerKind], params: EngineParams, shards: int = 1) -> KVCache:
    """Return the sharding of each array of a cache for all layers: pools [K,P,W,H], scales [K,P,W], and
    states. P counts the pages of all shards."""

    def pool_sharding(mixer: Mixer, layer: Any) -> Any:
        """Return the sharding of a mixer's pool: heads as in the weight that makes them, pages by shard."""
        sharding, weight = layer.any_mixer_leaf.sharding, mixer.cache_sharding_weight
        axes = weight_head_axes(getattr(layer.mixer_params(mixer), weight)) if weight else None
        if shards > 1 and isinstance(sharding, NamedSharding):
            return auto_sharding(sharding, PartitionSpec(axes, DATA_AXIS))
        return auto_sharding(sharding, PartitionSpec(axes)) if axes else replicated_sharding(sharding)

    def mixer_shardings(has: Callable[[Mixer], Any]) -> tuple[Any, ...]:
        """Return for each layer the sharding of its first mixer for which `has` holds, or None."""
        pairs = zip(layers, all_layers(params), strict=True)
        return tuple(
            next((pool_sharding(mixer, layer) for mixer in kind.mixers if has(mixer)), None)
            for kind, layer in pairs
        )

    def kv_shardings(i: int) -> tuple[Any, ...]:
        """Return for each layer the sharding of its keys (i = 0) or values (i = 1), or None."""
        return mixer_shardings(lambda mixer: isinstance(mixer, AttentionMixer) and mixer.cache_shapes[i])

    return KVCache(
        kv_shardings(0),
        kv_shardings(1),
        mixer_shardings(lambda mixer: mixer.state_shapes),
        kernel_isa(params),
    )


def weight_head_axes(weight: Any) -> str | tuple[str, ...] | None:
    """Return the mesh axes that split the heads of a weight [D,K,H]; None for a matrix, which one device
    holds. The weight may be codes and scales, or two factors."""
    leaf = next((x for x in jax.tree.leaves(weight) if len(x.shape) == 3), None)
    spec = leaf.sharding.spec if leaf is not None and isinstance(leaf.sharding, NamedSharding) else ()
    return spec[1] if len(spec) > 1 else None


def min_pool_parts(layers: Sequence[LayerKind], params: EngineParams) -> int:
    """Return the smallest number of parts that any pool is split into. A device holds one part of a pool."""
    shardings, counts = cache_shardings(layers, params), []
    for kind, keys, states in zip(layers, shardings.k, shardings.states, strict=True):
        row, state = kind.attention and kind.attention.cache_shapes[0], kind.state_shapes
        sizes = (row and row[0], keys), (state and state.shapes[0][0], states)
        counts += [heads // sharding.shard_shape((heads, 1, 1, 1))[0] for heads, sharding in sizes if heads]
    return min(counts)
