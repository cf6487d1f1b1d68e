"""Where an engine's arrays lie, read off the shardings of the parameters: one device and a mesh of them are
one case.

Pools are split as the heads of their layer's keys are, so that every device keeps the keys that it makes;
XLA's partitioner (GSPMD, Xu et al., arXiv 2105.04663) derives the rest from the parameters. Rows that all
heads share are on every device. Of several shards of rows each has pages of its own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ..model.config import Keyed, LayerKind, Mixer
from ..model.pair import Params, layers_of, target_of
from ..model.sharding import DATA
from ..model.weights.cpu.packed import kernels_in
from .pages import KVCache


def everywhere(params: Params) -> Sharding:
    """The sharding of what is replicated on all of the devices that sample tokens: those of the last norm,
    which are all devices but for a pipeline's."""
    return whole(target_of(params).norm.gain.sharding)


def seats(params: Params, shards: int) -> Sharding:
    """The sharding of what has a place for each request, its first axis: on all devices, or of several shards
    each on its own."""
    own = target_of(params).norm.gain.sharding
    return split(own, PartitionSpec(DATA)) if isinstance(own, NamedSharding) and shards > 1 else whole(own)


def whole(own: Sharding) -> Sharding:
    """The sharding of what is replicated on all of a sharding's devices."""
    return split(own, PartitionSpec()) if isinstance(own, NamedSharding) else own


def automatic(own: Sharding) -> Sharding:
    """The same placement with programs split by XLA's partitioner, whatever types the axes of the user's mesh
    have."""
    return split(own, own.spec) if isinstance(own, NamedSharding) else own


def split(own: NamedSharding, spec: PartitionSpec) -> NamedSharding:
    mesh: Any = own.mesh
    return NamedSharding(Mesh(mesh.devices, mesh.axis_names), spec)


def cache_shardings(layers: Sequence[LayerKind], params: Params, shards: int = 1) -> KVCache:
    """A sharding for each pool [K,P,W,H] of a cache for all layers of the parameters, for its scales [K,P,W]
    if it has some, and for each array of a layer's states; P are the pages of all shards."""

    def pool(mixer: Mixer, layer: Any) -> Any:
        own, weight = layer.any_norm.gain.sharding, mixer.cached_by
        axes = head_axes(getattr(layer.of(mixer), weight)) if weight else None
        if shards > 1 and isinstance(own, NamedSharding):
            return split(own, PartitionSpec(axes, DATA))
        return split(own, PartitionSpec(axes)) if axes else whole(own)

    def of(has: Callable[[Mixer], Any]) -> tuple[Any, ...]:
        """The sharding of each layer's mixer for which `has` holds, or None."""
        each = zip(layers, layers_of(params), strict=True)
        return tuple(
            next((pool(mixer, layer) for mixer in kind.mixers if has(mixer)), None) for kind, layer in each
        )

    def kept(i: int) -> tuple[Any, ...]:
        return of(lambda mixer: isinstance(mixer, Keyed) and mixer.cached[i])

    return KVCache(kept(0), kept(1), of(lambda mixer: mixer.state), kernels_in(params))


def head_axes(weight: Any) -> str | tuple[str, ...] | None:
    """Mesh axes over which the heads of a weight [D,K,H] are split, which may be codes and scales or two
    factors; none of a matrix, which lies on one device."""
    leaf = next((x for x in jax.tree.leaves(weight) if len(x.shape) == 3), None)
    spec = leaf.sharding.spec if leaf is not None and isinstance(leaf.sharding, NamedSharding) else ()
    return spec[1] if len(spec) > 1 else None


def parts(layers: Sequence[LayerKind], params: Params) -> int:
    """The fewest parts that a pool is split into; a device holds one of them."""
    places, found = cache_shardings(layers, params), []
    for kind, keys, states in zip(layers, places.k, places.states, strict=True):
        row, state = kind.keys and kind.keys.cached[0], kind.state
        sizes = (row and row[0], keys), (state and state.shapes[0][0], states)
        found += [heads // own.shard_shape((heads, 1, 1, 1))[0] for heads, own in sizes if heads]
    return min(found)
