"""An engine's sleep: which of the device's memory it has released, and where the parameters are."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ...model.pair import with_target
from ...model.transformer import Decoder
from ...model.tree import paths

TAGS = ("weights", "kv_cache", "scheduling")  # what sleeps, and what `wake_up` may name; vLLM's words


@dataclass
class Sleep:
    """`missing` are the tags that an engine has to get back before it steps again.

    `params` are its parameters while they are off the device: arrays on the host, shapes of discarded ones.
    """

    missing: set[str] = field(default_factory=set)
    params: Any = None
    discarded: bool = False

    def check(self) -> None:
        """Raise RuntimeError unless steps can be taken."""
        if self.missing:
            raise RuntimeError(
                f"the engine sleeps, without {' and '.join(sorted(self.missing))}: call wake_up first"
            )
        if self.discarded:
            raise RuntimeError("sleep(level=2) has discarded the parameters: give others with update_params")

    def pause(self) -> None:
        self.missing.add("scheduling")

    def begin(self, params: Any, discarded: bool) -> None:
        self.missing, self.params, self.discarded = set(TAGS), params, discarded

    def asked(self, tags: Iterable[str]) -> list[str]:
        """Those of the tags that are missing. Raises ValueError for one that is none."""
        tags = {tags} if isinstance(tags, str) else set(tags)
        if not tags <= set(TAGS):
            raise ValueError(
                f"wake_up: tags {sorted(tags)} are not allowed: of {', '.join(TAGS)}, or None for all"
            )
        return sorted(self.missing & tags)

    def woke(self, tag: str) -> None:
        """What a tag names is back; once nothing else is missing, steps are allowed."""
        if tag == "weights":
            self.params = None
        self.missing -= {tag} if self.missing - {tag, "scheduling"} else {tag, "scheduling"}

    def replaced(self, target: Any) -> None:
        """Other parameters decide on tokens from now on."""
        self.params = None if self.params is None else with_target(self.params, target)
        self.discarded = False


def shapes_of(tree: Any) -> Any:
    """Shapes, types and placement of a tree's arrays, without their numbers."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def on_host(params: Any) -> Any:
    """A copy on the host; shapes stay shapes."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x), params)


def on_device(params: Any, shapes: Any) -> Any:
    """The parameters where their shapes say; those that are shapes themselves stay so."""

    def placed(x: Any, shape: jax.ShapeDtypeStruct) -> Any:
        return x if isinstance(x, jax.ShapeDtypeStruct) else jax.device_put(x, shape.sharding)

    return jax.block_until_ready(jax.tree.map(placed, params, shapes))


def require_like(own: Decoder, given: Decoder) -> None:
    """Raise ValueError where parameters differ in a shape, dtype or sharding from those that are served."""
    old, new = paths(own), paths(given)
    for path in old | new:
        a, b = old.get(path), new.get(path)
        if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
            raise ValueError(f"update_params: {path} is {describe(b)}, expected {describe(a)}")
        if not b.sharding.is_equivalent_to(a.sharding, a.ndim):
            raise ValueError(f"update_params: {path} lies in {b.sharding}, expected {a.sharding}")


def describe(x: jax.Array | None) -> str:
    return "missing" if x is None else f"{x.dtype}{list(x.shape)}"
