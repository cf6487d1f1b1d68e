"""Which axes of a model are split over which axis of a mesh: tensor parallelism as one table (Shoeybi et al., Megatron-LM,
arXiv 1909.08053). XLA's partitioner derives the collectives."""

from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .tree import Spec, is_spec

RULES = {"heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "vocab": "tensor"}


def shardings(specs: Any, mesh: Mesh, rules: Mapping[str, str] = RULES) -> Any:
    """A sharding for each parameter of a tree of specs. Raises ValueError where a size is no multiple of the devices."""
    return jax.tree.map(lambda spec: sharding(spec, mesh, rules), specs, is_leaf=is_spec)


def sharding(spec: Spec, mesh: Mesh, rules: Mapping[str, str] = RULES) -> NamedSharding:
    """How one array is split."""
    axes = [rules.get(name) for name in spec.axes]
    for name, size, axis in zip(spec.axes, spec.shape, axes, strict=True):
        if axis is not None and size % mesh.shape[axis]:
            raise ValueError(
                f"{size} {name} cannot be split over {mesh.shape[axis]} devices: choose a divisor of {size}"
            )
    return NamedSharding(mesh, PartitionSpec(*axes))
