"""Which axes of a model are split over which axes of a mesh: tensor and expert parallelism as one table
(Shoeybi et al., Megatron-LM, arXiv 1909.08053; Lepikhin et al., GShard, arXiv 2006.16668). XLA's partitioner
derives the collectives."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Bool

from .config import Experts, GroupedQuery, LayerKind
from .tree import Spec, is_spec

Axes = str | tuple[str, ...]
SPLIT = ("heads", "kv_heads", "state_heads", "ffn", "expert_ffn", "vocab")
TENSOR = "tensor"  # of a mesh whose devices split every layer
RULES: Mapping[str, Axes] = dict.fromkeys(SPLIT, TENSOR)
DATA = "data"  # of a mesh whose devices along it have rows of their own, and all weights but whole experts
KV, GROUP = "kv", "group"  # of a mesh with fewer key heads than devices: devices of a group share one
# Number of mesh axes, the first of a rule, that must divide an axis; for all others every axis must. Keys of
# one head may lie on several devices, a vocabulary or a recurrent layer whole on each.
LEAST = {"kv_heads": 1, "state_heads": 0, "vocab": 0}
MOST = 256  # devices that are tried for an error's text


@dataclass(frozen=True)
class Layout:
    """Parallel layout of a model.

    `tensor`: devices that split every layer. `experts`: whole experts on each device, instead of a part of
    every expert. `stages`: pipeline stages of such devices. `data`: groups of them with rows of their own,
    over which whole experts are split too. `ffn`: devices of their own for feed-forward layers.
    """

    tensor: int = 1
    experts: bool = False
    stages: int = 1
    data: int = 1
    ffn: int = 0

    @property
    def size(self) -> int:
        """All devices."""
        return self.tensor * self.stages * self.data + self.ffn

    def axes(self, layers: Sequence[LayerKind]) -> dict[str, int]:
        """The mesh's axes with their sizes. Where key heads are fewer than devices there are two: devices
        with the same number on the first keep the same key heads."""
        few = [K for K in key_heads(layers) if K % self.tensor]
        each = {KV: min(few), GROUP: self.tensor // min(few)} if few else {TENSOR: self.tensor}
        if self.data == 1:
            return each
        return {DATA: self.data} | (each if self.tensor > 1 else {})

    def lacks(self, layers: Sequence[LayerKind]) -> str | None:
        """The part that this layout cannot split, in words; None if it fits."""
        n, few = self.tensor, {K for K in key_heads(layers) if K % self.tensor}
        if few and (len(few) > 1 or n % min(few)):
            return " and ".join(map(str, sorted(few))) + " key heads"
        parts = (part for kind in layers for part in split_sizes(kind, self.experts))
        over = {"experts": n * self.data}
        return next((f"{size} {name}" for name, size in parts if size % over.get(name, n)), None)

    def check(self, layers: Sequence[LayerKind]) -> None:
        """Raise ValueError, with the numbers that would do, where the layers cannot be split so."""
        if what := self.lacks(layers):
            name = "tensor" if replace(self, data=1).lacks(layers) else "data"
            tried = (n for n in range(1, MOST + 1) if not replace(self, **{name: n}).lacks(layers))
            can = list(tried) or [n for n in range(1, MOST + 1) if not Layout(n, self.experts).lacks(layers)]
            raise ValueError(
                f"{name}_parallel_size {getattr(self, name)} is not allowed: {what} cannot be split so; "
                f"{', '.join(map(str, can))} can"
            )

    def mesh(self, layers: Sequence[LayerKind], devices: Sequence[Any]) -> Mesh:
        """The first devices as a mesh. Raises ValueError for what cannot be split so, and for too few
        devices."""
        self.check(layers)
        n = self.tensor * self.data
        if len(devices) < n:
            hint = " (XLA_FLAGS=--xla_force_host_platform_device_count=N makes N of a CPU)"
            times = f" times data_parallel_size {self.data}" if self.data > 1 else ""
            raise ValueError(
                f"tensor_parallel_size {self.tensor}{times} is not allowed: devices here are {len(devices)}"
                + (hint if devices[0].platform == "cpu" else "")
            )
        axes = self.axes(layers)
        return Mesh(np.array(devices[:n]).reshape(*axes.values()), tuple(axes))


def key_heads(layers: Iterable[LayerKind]) -> set[int]:
    """Numbers of heads that the layers keep keys of; a latent layer's row is no head."""
    return {kind.keys.num_kv_heads for kind in layers if isinstance(kind.keys, GroupedQuery)}


def split_sizes(kind: LayerKind, experts: bool) -> Iterable[tuple[str, int]]:
    """The sizes of a layer that are split, by what they are."""
    if kind.keys is not None:
        yield "heads", kind.keys.num_heads
    if kind.ffn is None:
        return
    if not isinstance(kind.ffn, Experts):
        yield "ffn_size", kind.ffn.size
        return
    yield ("experts", kind.ffn.count) if experts else ("expert_ffn_size", kind.ffn.size)
    yield "shared_ffn_size", kind.ffn.shared


def rules_for(mesh: Mesh | AbstractMesh, experts: bool = False, data: bool = False) -> Mapping[str, Axes]:
    """The table for a mesh with the axis "tensor", or with "kv" and "group"; `experts` lie whole on one
    device each. With `data` it has that axis too, or no other: all else is whole along it."""
    rules: dict[str, Axes] = dict(RULES)
    if {KV, GROUP} <= {*mesh.axis_names}:
        rules = dict.fromkeys(rules, (KV, GROUP))
    elif data and mesh.axis_names == (DATA,):
        rules = dict.fromkeys(rules, ())
    if experts:
        rules["experts"] = rules.pop("expert_ffn")
    if data:
        rules["experts"] = (DATA, *listed(rules["experts"])) if experts else ()
    return rules


def shardings(specs: Any, mesh: Mesh | AbstractMesh, rules: Mapping[str, Axes] | None = None) -> Any:
    """A sharding for each parameter of a tree of specs, by default by the rules for the mesh's axes.

    Raises ValueError where a size is no multiple of the devices, and for a mesh that lacks an axis of the
    rules.
    """
    rules = rules_for(mesh) if rules is None else rules
    if missing := {name for axes in rules.values() for name in listed(axes)} - set(mesh.axis_names):
        raise ValueError(
            f"mesh has axes {', '.join(mesh.axis_names)}, expected {', '.join(sorted(missing))} among them"
        )
    return jax.tree.map(lambda spec: sharding(spec, mesh, rules), specs, is_leaf=is_spec)


def sharding(spec: Spec, mesh: Mesh | AbstractMesh, rules: Mapping[str, Axes] = RULES) -> NamedSharding:
    """Sharding of one array."""
    named = zip(spec.axes, spec.shape, strict=True)
    axes = [dividing(name, size, listed(rules.get(name)), mesh) for name, size in named]
    return NamedSharding(mesh, PartitionSpec(*axes))


def dividing(name: str, size: int, axes: tuple[str, ...], mesh: Mesh | AbstractMesh) -> Axes | None:
    """The first of a rule's axes that divide a size, as many as do."""
    for n in range(len(axes), min(LEAST.get(name, len(axes)), len(axes)) - 1, -1):
        if size % ways(mesh, axes[:n]) == 0:
            return axes[:n] if n > 1 else axes[0] if n else None
    raise ValueError(
        f"{size} {name} cannot be split over {ways(mesh, axes)} devices: choose a divisor of {size}"
    )


def listed(axes: Axes | None) -> tuple[str, ...]:
    """Axes of a rule or of an entry of a PartitionSpec."""
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


def fitted(own: Sharding | None, shape: Sequence[int]) -> Sharding | None:
    """A parameter's sharding for one of the arrays that stand for it, codes, scales or factors: split where
    its axes allow it. None is the default device."""
    if not isinstance(own, NamedSharding):
        return own
    mesh = own.mesh
    spec = own.spec if len(own.spec) <= len(shape) else ()
    kept = [axes if size % ways(mesh, axes) == 0 else None for axes, size in zip(spec, shape, strict=False)]
    return NamedSharding(mesh, PartitionSpec(*kept))


def placed(mesh: Mesh | AbstractMesh, specs: Any) -> Any:
    """A sharding for each spec of a tree of them."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def place_at(x: Any, where: Sharding | None) -> Any:
    """A host's array, or one on a device, where a sharding says; of one over several processes, each of which
    has the whole, every process places what its devices hold."""
    if where is None or where.is_fully_addressable:
        return jax.device_put(x, where)
    whole = np.asarray(x)
    # copied, since on a CPU a view becomes the array, and would keep the whole
    return jax.make_array_from_callback(whole.shape, where, lambda part: whole[part].copy())


def ways(mesh: Mesh | AbstractMesh, axes: Axes | None) -> int:
    """Into how many parts the devices along some axes of a mesh cut an array."""
    return prod(mesh.shape[name] for name in listed(axes))


def axes_of(x: Any, i: int) -> tuple[str, ...]:
    """The axes of a mesh over which axis i of an array, or of a shape with a NamedSharding, is split."""
    spec = x.sharding.spec
    return listed(spec[i]) if len(spec) > i else ()


def automatic_axes(mesh: Any) -> tuple[str, ...]:
    """The axes of a mesh that XLA's partitioner splits: what a device does by itself under `shard_map` has
    none."""
    return tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)


def in_shards(x: Any) -> bool:
    """True if a traced array is a device's own part under `shard_map`, where jax calls no partitioner."""
    return bool(jax.typeof(x).sharding.mesh.manual_axes)


def on_several_devices(tree: Any) -> bool:
    """True if arrays of a tree, traced or not, lie on a mesh of several devices; parts under `shard_map` do
    not."""
    meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree))
    return any(ways(mesh, automatic_axes(mesh)) > 1 for mesh in meshes)


def in_any_shard(flag: Bool[Array, ""]) -> Bool[Array, ""]:
    """True if the flag is set in any shard: shards that exchange data in a loop must run it equally often."""
    if DATA not in jax.typeof(flag).sharding.mesh.manual_axes:
        return flag
    return jax.lax.pmax(flag.astype(jnp.int32), DATA) > 0


def device_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays on one of their devices."""
    return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
