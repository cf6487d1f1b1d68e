"""Trees of parameters: the records that hold them, and what is known of a parameter before it has numbers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Num, PRNGKeyArray

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """A frozen dataclass that is a pytree, of whose structure the fields that are `static` are a part.

    jax takes it apart in C++ at every call of a program, and rebuilds it by `__init__`: the types of fields
    admit what trees of specs and of shardings hold.
    """
    cls = dataclass(frozen=True)(cls)
    static = [f.name for f in fields(cls) if f.metadata.get("static")]  # type: ignore[arg-type]
    names = [f.name for f in fields(cls) if f.name not in static]  # type: ignore[arg-type]
    return jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=static)


def static(default: Any) -> Any:
    """A field of a pytree that programs are compiled for, such as a size: hashable, and no leaf."""
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


def init(key: PRNGKeyArray, specs: T, dtype: DTypeLike = jnp.float32) -> T:
    """Random parameters for a tree of specs."""
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)

    def draw(spec: Spec, k: PRNGKeyArray) -> Num[Array, "..."]:
        return (spec.mean + spec.scale * jax.random.normal(k, spec.shape, jnp.float32)).astype(
            spec.dtype or dtype
        )

    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(treedef, [draw(s, k) for s, k in zip(leaves, keys, strict=True)])


def abstract(specs: T, dtype: DTypeLike, sharding: jax.sharding.Sharding | None = None) -> T:
    """The tree as shapes without numbers, for compiling ahead of time and for memory plans."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype or dtype, sharding=sharding), specs, is_leaf=is_spec
    )


def nbytes(tree: Any) -> int:
    """Bytes of every array (or abstract array) of a tree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def paths(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by dotted path, e.g. `layers.0.attention.q`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_spec)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def not_finite(leaves: Mapping[str, jax.Array]) -> str | None:
    """The first path whose array holds NaN or infinity.

    Arrays are reduced where they lie, one after another: a device has few collectives on their way.
    """
    floats = (path for path, x in leaves.items() if jnp.issubdtype(x.dtype, jnp.floating))
    return next((path for path in floats if not all_finite(leaves[path])), None)


@jax.jit
def all_finite(x: Num[Array, "..."]) -> Bool[Array, ""]:
    return jnp.isfinite(x).all()


def holds(tree: Any, kind: type) -> bool:
    return any(isinstance(x, kind) for x in jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, kind)))


def unwrapped(tree: T, kind: type, whole: Callable[[Any], Any]) -> T:
    """The tree with `whole` of each record of a kind in its place; itself where it has none."""
    if not holds(tree, kind):
        return tree
    return jax.tree.map(
        lambda x: whole(x) if isinstance(x, kind) else x, tree, is_leaf=lambda x: isinstance(x, kind)
    )
