"""Which axes of a model are split over which axis of a mesh: tensor parallelism as one table (Shoeybi et al.,
Megatron-LM, arXiv 1909.08053). XLA's partitioner derives the collectives."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, Sharding

from .tree import Spec, is_spec

RULES = {"heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "expert_ffn": "tensor", "vocab": "tensor"}


def shardings(specs: Any, mesh: Mesh | AbstractMesh, rules: Mapping[str, str] = RULES) -> Any:
    """A sharding for each parameter of a tree of specs.

    Raises ValueError where a size is no multiple of the devices, and for a mesh that lacks an axis of the
    rules.
    """
    if missing := set(rules.values()) - set(mesh.axis_names):
        raise ValueError(
            f"mesh has axes {', '.join(mesh.axis_names)}, expected {', '.join(sorted(missing))} among them"
        )
    return jax.tree.map(lambda spec: sharding(spec, mesh, rules), specs, is_leaf=is_spec)


def sharding(spec: Spec, mesh: Mesh | AbstractMesh, rules: Mapping[str, str] = RULES) -> NamedSharding:
    """How one array is split."""
    axes = [rules.get(name) for name in spec.axes]
    for name, size, axis in zip(spec.axes, spec.shape, axes, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(
                f"{size} {name} cannot be split over {mesh.shape[axis]} devices: choose a divisor of {size}"
            )
    return NamedSharding(mesh, PartitionSpec(*axes))


def fitted(own: Sharding | None, shape: Sequence[int]) -> Sharding | None:
    """A parameter's sharding for one of the arrays that stand for it, codes, scales or factors: split where
    its axes allow it. None is the default device."""
    if not isinstance(own, NamedSharding):
        return own
    mesh = own.mesh
    spec = own.spec if len(own.spec) <= len(shape) else ()
    kept = [axes if size % ways(mesh, axes) == 0 else None for axes, size in zip(spec, shape, strict=False)]
    return NamedSharding(mesh, PartitionSpec(*kept))


def ways(mesh: Mesh | AbstractMesh, axes: str | tuple[str, ...] | None) -> int:
    """Into how many parts the devices along some axes of a mesh cut an array."""
    names = (axes,) if isinstance(axes, str) else axes or ()
    return prod(mesh.shape[name] for name in names)


def device_bytes(tree: Any) -> int:
    """Bytes of a tree's arrays on one of their devices."""
    return sum(prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
