"""Trees of parameters: their records, and what is known of a parameter before it has numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Num, PRNGKeyArray

T = TypeVar("T")
Kinds = type | tuple[type, ...]  # classes of records, as `isinstance` takes them


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass and a pytree. Its `static` fields are a part of the tree's structure.

    jax flattens it in C++ at every call of a program, and rebuilds it by `__init__`. So the types of fields
    admit what trees of specs and of shardings hold.
    """
    cls = dataclass(frozen=True)(cls)
    static = [f.name for f in fields(cls) if f.metadata.get("static")]  # type: ignore[arg-type]
    names = [f.name for f in fields(cls) if f.name not in static]  # type: ignore[arg-type]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=static)


def static(default: Any) -> Any:
    """Declare a field of a pytree that programs are compiled for, such as a size. It is hashable, and no
    leaf."""
    return field(default=default, metadata={"static": True})


@dataclass(frozen=True)
class Spec:
    """Specification of a parameter: shape, axes' names and initialisation.

    `axes` names each dimension by meaning ("model", "heads", ...); shardings map those names to a mesh. A
    fresh parameter is drawn from a normal distribution around `mean` with standard deviation `scale`.
    `dtype`, if not None, overrides the model's.
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    mean: float = 0.0
    scale: float = 0.02
    dtype: Any = None

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), f"{self.axes} does not name the axes of {self.shape}"


def is_spec(x: Any) -> bool:
    return isinstance(x, Spec)


def init_params(key: PRNGKeyArray, specs: T, dtype: DTypeLike = jnp.float32) -> T:
    """Draw random parameters for a tree of specs."""
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)

    def draw(spec: Spec, k: PRNGKeyArray) -> Num[Array, "..."]:
        return (spec.mean + spec.scale * jax.random.normal(k, spec.shape, jnp.float32)).astype(
            spec.dtype or dtype
        )

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(treedef, [draw(s, k) for s, k in zip(leaves, keys, strict=True)])


def shapes_from_specs(specs: T, dtype: DTypeLike, sharding: jax.sharding.Sharding | None = None) -> T:
    """Return a tree of specs as shapes without numbers, for compilation ahead of time and for memory
    plans."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype or dtype, sharding=sharding), specs, is_leaf=is_spec
    )


def tree_bytes(tree: Any) -> int:
    """Return the bytes of all arrays, or ShapeDtypeStructs, of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by dotted path, such as `layers.0.attention.q`."""
    return dict(paths_and_leaves(tree))


def paths_and_leaves(tree: Any, kinds: Kinds = ()) -> list[tuple[str, Any]]:
    """Return the leaves of a tree with their dotted paths. Records of `kinds` are leaves."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, kinds))
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


def map_by_path(tree: T, kinds: Kinds, convert: Callable[[str, Any], Any]) -> T:
    """Replace each leaf by what `convert` makes of its dotted path and the leaf. Records of `kinds` are
    leaves. Returns the tree itself if `convert` returns all leaves unchanged."""
    leaves = paths_and_leaves(tree, kinds)
    converted = [convert(path, leaf) for path, leaf in leaves]
    if all(new is old for new, (_, old) in zip(converted, leaves, strict=True)):
        return tree
    treedef = jax.tree.structure(tree, is_leaf=lambda x: isinstance(x, kinds))
    return jax.tree.unflatten(treedef, converted)


def find_non_finite(leaves: Mapping[str, jax.Array]) -> str | None:
    """Return the first path whose array holds NaN or infinity, or None.

    Arrays are reduced on their devices, one after another, so that a device has few collectives in flight.
    """
    floats = (path for path, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.floating))
    return next((path for path in floats if not is_all_finite(leaves[path])), None)


@jax.jit
def is_all_finite(x: Num[Array, "..."]) -> Bool[Array, ""]:
    """Return True if all numbers are finite."""
    return jnp.isfinite(x).all()


def has_instance(tree: Any, kinds: Kinds) -> bool:
    """Return True if a node of the tree is of these kinds."""
    return any(isinstance(x, kinds) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kinds)))


def map_instances(tree: T, kinds: Kinds, convert: Callable[[Any], Any]) -> T:
    """Replace each record of these kinds by what `convert` makes of it. Returns the tree itself if `convert`
    returns all records unchanged."""
    nodes, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, kinds))
    converted = [convert(x) if isinstance(x, kinds) else x for x in nodes]
    is_unchanged = all(new is old for new, old in zip(converted, nodes, strict=True))
    return tree if is_unchanged else jax.tree.unflatten(treedef, converted)


# Former names, until 0.3: docs/releasing.md
init = init_params
