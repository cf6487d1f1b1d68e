"""Tensor and expert parallelism as one table: which axes of a model are split over which axes of a mesh.

See Shoeybi et al., Megatron-LM, arXiv 1909.08053, and Lepikhin et al., GShard, arXiv 2006.16668. XLA's
partitioner derives the collectives.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool

from .config import Experts, GroupedQuery, LayerKind
from .gpus import target_device
from .tree import Spec, is_spec

Axes = str | tuple[str, ...]
SPLIT_AXES = ("heads", "kv_heads", "state_heads", "ffn", "expert_ffn", "vocab")
TENSOR_AXIS = "tensor"  # mesh axis: its devices split every layer
AXIS_RULES: Mapping[str, Axes] = dict.fromkeys(SPLIT_AXES, TENSOR_AXIS)
DATA_AXIS = "data"  # mesh axis: its devices have rows of their own, and all weights but whole experts
# Mesh axes for fewer key heads than devices: devices of a group share one.
KV_AXIS, KV_GROUP_AXIS = "kv", "group"
# Number of a rule's mesh axes that must divide an axis, the first ones; by default all. Several devices may
# hold the keys of one head, and each may hold a whole vocabulary or recurrent layer.
MIN_SPLIT_AXES = {"kv_heads": 1, "state_heads": 0, "vocab": 0}
MAX_TRIED_DEVICES = 256  # largest number of devices that an error's text considers


def array_devices(x: Any) -> frozenset[Any]:
    """Return the devices of an array or ShapeDtypeStruct, none if it has no sharding; of a traced array, the
    device that its program is compiled for."""
    if isinstance(x, Tracer):
        return frozenset([target_device()])
    return frozenset() if x.sharding is None else frozenset(x.sharding.device_set)


def tree_devices(tree: Any) -> frozenset[Any]:
    """Return all devices of a tree's arrays, or of its shapes with shardings."""
    return frozenset().union(*map(array_devices, jax.tree.leaves(tree)))


@dataclass(frozen=True)
class Layout:
    """Parallel layout of a model.

    tensor: number of devices that split every layer.
    expert_parallel: True if each device holds whole experts, instead of a part of every expert.
    stages: number of pipeline stages, each of `tensor` devices.
    data: number of groups of devices with rows of their own. Whole experts are split over these too.
    ffn: number of separate devices for feed-forward layers.
    """

    tensor: int = 1
    expert_parallel: bool = False
    stages: int = 1
    data: int = 1
    ffn: int = 0

    @property
    def num_devices(self) -> int:
        """Return the number of all devices."""
        return self.tensor * self.stages * self.data + self.ffn

    def mesh_axes(self, layers: Sequence[LayerKind]) -> dict[str, int]:
        """Return the mesh's axes with their sizes.

        If key heads are fewer than devices there are two axes: devices with the same number on the first hold
        the same key heads.
        """
        few = [K for K in kv_head_counts(layers) if K % self.tensor]
        tensor_axes = (
            {KV_AXIS: min(few), KV_GROUP_AXIS: self.tensor // min(few)} if few else {TENSOR_AXIS: self.tensor}
        )
        if self.data == 1:
            return tensor_axes
        return {DATA_AXIS: self.data} | (tensor_axes if self.tensor > 1 else {})

    def describe_unsplittable(self, layers: Sequence[LayerKind]) -> str | None:
        """Return a description of the part that this layout cannot split, or None if it fits."""
        n, few = self.tensor, {K for K in kv_head_counts(layers) if K % self.tensor}
        if few and (len(few) > 1 or n % min(few)):
            return " and ".join(map(str, sorted(few))) + " key heads"
        parts = (part for kind in layers for part in split_sizes(kind, self.expert_parallel))
        over = {"experts": n * self.data}
        return next((f"{size} {name}" for name, size in parts if size % over.get(name, n)), None)

    def check_layers(self, layers: Sequence[LayerKind]) -> None:
        """Raise ValueError, with the sizes that are possible, if the layers cannot be split so."""
        if what := self.describe_unsplittable(layers):
            name = "tensor" if replace(self, data=1).describe_unsplittable(layers) else "data"
            tried = (
                n
                for n in range(1, MAX_TRIED_DEVICES + 1)
                if not replace(self, **{name: n}).describe_unsplittable(layers)
            )
            can = list(tried) or [
                n
                for n in range(1, MAX_TRIED_DEVICES + 1)
                if not Layout(n, self.expert_parallel).describe_unsplittable(layers)
            ]
            raise ValueError(
                f"{name}_parallel_size {getattr(self, name)} is not allowed: {what} cannot be split so; "
                f"{', '.join(map(str, can))} can"
            )

    def make_mesh(self, layers: Sequence[LayerKind], devices: Sequence[Any]) -> Mesh:
        """Return the first devices as a mesh. Raises ValueError for layers that cannot be split, and for too
        few devices."""
        self.check_layers(layers)
        n = self.tensor * self.data
        if len(devices) < n:
            hint = " (XLA_FLAGS=--xla_force_host_platform_device_count=N makes N of a CPU)"
            times = f" times data_parallel_size {self.data}" if self.data > 1 else ""
            raise ValueError(
                f"tensor_parallel_size {self.tensor}{times} is not allowed: devices here are {len(devices)}"
                + (hint if devices[0].platform == "cpu" else "")
            )
        axes = self.mesh_axes(layers)
        return Mesh(np.array(devices[:n]).reshape(*axes.values()), tuple(axes))


def kv_head_counts(layers: Iterable[LayerKind]) -> set[int]:
    """Return the different numbers of cached key heads of the layers. A latent layer's row is no head."""
    return {kind.attention.num_kv_heads for kind in layers if isinstance(kind.attention, GroupedQuery)}


def split_sizes(kind: LayerKind, expert_parallel: bool) -> Iterable[tuple[str, int]]:
    """Yield the name and size of each axis of a layer that is split."""
    if kind.attention is not None:
        yield "heads", kind.attention.num_heads
    if kind.ffn is None:
        return
    if not isinstance(kind.ffn, Experts):
        yield "ffn_size", kind.ffn.size
        return
    yield ("experts", kind.ffn.count) if expert_parallel else ("expert_ffn_size", kind.ffn.size)
    yield "shared_ffn_size", kind.ffn.shared


def make_axis_rules(
    mesh: Mesh | AbstractMesh, expert_parallel: bool = False, data_parallel: bool = False
) -> Mapping[str, Axes]:
    """Return the table for a mesh with the axis "tensor", or with "kv" and "group".

    expert_parallel: True if each device holds whole experts.
    data_parallel: True if the mesh has the axis "data" too, or no other. Only whole experts are split along
    it.
    """
    rules: dict[str, Axes] = dict(AXIS_RULES)
    if {KV_AXIS, KV_GROUP_AXIS} <= {*mesh.axis_names}:
        rules = dict.fromkeys(rules, (KV_AXIS, KV_GROUP_AXIS))
    elif data_parallel and mesh.axis_names == (DATA_AXIS,):
        rules = dict.fromkeys(rules, ())
    if expert_parallel:
        rules["experts"] = rules.pop("expert_ffn")
    if data_parallel:
        rules["experts"] = (DATA_AXIS, *axis_tuple(rules["experts"])) if expert_parallel else ()
    return rules


def make_shardings(specs: Any, mesh: Mesh | AbstractMesh, rules: Mapping[str, Axes] | None = None) -> Any:
    """Return a sharding for each parameter of a tree of specs, by default by the rules for the mesh's axes.

    Raises ValueError if a size is no multiple of the devices, or if the mesh lacks an axis of the rules.
    """
    rules = make_axis_rules(mesh) if rules is None else rules
    if missing := {name for axes in rules.values() for name in axis_tuple(axes)} - set(mesh.axis_names):
        raise ValueError(
            f"mesh has axes {', '.join(mesh.axis_names)}, expected {', '.join(sorted(missing))} among them"
        )
    return jax.tree.map(lambda spec: make_sharding(spec, mesh, rules), specs, is_leaf=is_spec)


def make_sharding(
    spec: Spec, mesh: Mesh | AbstractMesh, rules: Mapping[str, Axes] = AXIS_RULES
) -> NamedSharding:
    """Return the sharding of one array."""
    named = zip(spec.axes, spec.shape, strict=True)
    axes = [choose_split_axes(name, size, axis_tuple(rules.get(name)), mesh) for name, size in named]
    return NamedSharding(mesh, PartitionSpec(*axes))


def choose_split_axes(name: str, size: int, axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> Axes | None:
    """Return the first of a rule's axes, as many as divide a size."""
    for n in range(len(axes), min(MIN_SPLIT_AXES.get(name, len(axes)), len(axes)) - 1, -1):
        if size % num_splits(mesh, axes[:n]) == 0:
            return axes[:n] if n > 1 else axes[0] if n else None
    raise ValueError(
        f"{size} {name} cannot be split over {num_splits(mesh, axes)} devices: choose a divisor of {size}"
    )


def axis_tuple(axes: Axes | None) -> tuple[str, ...]:
    """Return the axes of a rule, or of an entry of a PartitionSpec, as a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def fit_sharding(sharding: Sharding | None, shape: Sequence[int]) -> Sharding | None:
    """Return a parameter's sharding for an array that stands for it: codes, scales or a factor.

    An axis that the mesh axes do not divide is replicated. None is the default device.
    """
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = sharding.mesh
    spec = sharding.spec if len(sharding.spec) <= len(shape) else ()
    kept = [
        axes if size % num_splits(mesh, axes) == 0 else None for axes, size in zip(spec, shape, strict=False)
    ]
    return NamedSharding(mesh, PartitionSpec(*kept))


def named_shardings(mesh: Mesh | AbstractMesh, specs: Any) -> Any:
    """Return a sharding for each PartitionSpec of a tree."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def place_on_devices(x: Any, sharding: Sharding | None) -> Any:
    """Place an array of the host or of a device as a sharding says.

    If the sharding spans several processes, each has the whole array and places the parts of its own devices.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    whole = np.asarray(x)
    # copied: on a CPU the array would be a view, which keeps the whole alive
    return jax.make_array_from_callback(whole.shape, sharding, lambda part: whole[part].copy())


def num_splits(mesh: Mesh | AbstractMesh, axes: Axes | None) -> int:
    """Return the number of parts into which devices along some axes of a mesh cut an array."""
    return prod(mesh.shape[name] for name in axis_tuple(axes))


def sharded_axes(x: Any, i: int) -> tuple[str, ...]:
    """Return the mesh axes that split axis i of an array, or of a shape with a NamedSharding."""
    spec = x.sharding.spec
    return axis_tuple(spec[i]) if len(spec) > i else ()


def automatic_axes(mesh: Any) -> tuple[str, ...]:
    """Return the axes of a mesh that XLA's partitioner splits. `shard_map` over all axes leaves none."""
    return tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)


def is_manual_shard(x: Any) -> bool:
    """Return True if a traced array is a device's own part under `shard_map`, where jax calls no
    partitioner."""
    return bool(jax.typeof(x).sharding.mesh.manual_axes)


def is_multi_device(tree: Any) -> bool:
    """Return True if a tree's arrays, traced or not, are on a mesh of several devices. Parts under
    `shard_map` are not."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
    return any(num_splits(mesh, automatic_axes(mesh)) > 1 for mesh in meshes)


def any_over_shards(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """Return True if the flag is set in any shard. Shards that exchange data in a loop must run it equally
    often."""
    if DATA_AXIS not in jax.typeof(flag).sharding.mesh.manual_axes:
        return flag
    return jax.lax.pmax(flag.astype(jnp.int32), DATA_AXIS) > 0


def device_bytes(tree: Any) -> int:
    """Return the bytes of a tree's arrays on one of their devices."""
    return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
