"""Sleep of an engine: released memory of the device, and the parameters meanwhile."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from ....model.pair import Params, target_of, with_target
from ...host.process import use_huge_pages
from ...runtime.compiled.compile import StepArguments
from .params import require_own

TAGS = ("weights", "kv_cache", "scheduling")  # what sleeps, and what `wake_up` may name; vLLM's words


@dataclass
class Sleep:
    """Sleep of one engine.

    missing: tags to get back before the engine steps again.
    params: the parameters while they are off the device: arrays on the host, shapes of discarded ones.
    """

    missing: set[str] = field(default_factory=set)
    params: Any = None
    discarded: bool = False

    def check(self) -> None:
        """Raise RuntimeError unless steps can be taken."""
        if self.missing:
            what = " and ".join(sorted(self.missing))
            remedy = "resume_generation" if what == "scheduling" else "wake_up"
            raise RuntimeError(f"the engine sleeps, without {what}: call {remedy} first")
        if self.discarded:
            raise RuntimeError("sleep(level=2) has discarded the parameters: give others with update_params")

    def pause(self) -> None:
        self.missing.add("scheduling")

    def begin(self, state: StepArguments, like: StepArguments, discard: bool) -> StepArguments:
        """Release a state's arrays; returns their shapes. Parameters are copied to the host, and the target's
        dropped instead if `discard`. Cache and slots may be futures, so their shapes are those of `like`.

        Raises ValueError in a group of processes.
        """
        require_own(state.params, "sleep")
        params = state.params if self.params is None else self.params
        if discard:
            params = with_target(params, shapes_of(target_of(state.params)))
        self.missing, self.params = set(TAGS), on_host(params)
        self.discarded = self.discarded or discard
        return replace(like, params=shapes_of(state.params))

    def end(
        self, state: StepArguments, tags: Iterable[str], empty: Callable[[Params], StepArguments]
    ) -> StepArguments:
        """Restore what `tags` name; `empty` makes an unused cache and unused slots."""
        for tag in self.chosen_tags(tags):
            if tag == "weights":
                state = replace(state, params=on_device(self.params, state.params))
            elif tag == "kv_cache":
                state = empty(state.params)
            self.woke(tag)
        return state

    def chosen_tags(self, tags: Iterable[str]) -> list[str]:
        """Return the tags that are missing. Raises ValueError for an unknown one."""
        tags = {tags} if isinstance(tags, str) else set(tags)
        if not tags <= set(TAGS):
            raise ValueError(
                f"wake_up: tags {sorted(tags)} are not allowed: of {', '.join(TAGS)}, or None for all"
            )
        return sorted(self.missing & tags)

    def woke(self, tag: str) -> None:
        """Record that a tag is restored; once nothing else is missing, steps are allowed."""
        if tag == "weights":
            self.params = None
        self.missing -= {tag} if self.missing - {tag, "scheduling"} else {tag, "scheduling"}

    def replaced(self, target: Any) -> None:
        """Record that other parameters are served from now on."""
        self.params = None if self.params is None else with_target(self.params, target)
        self.discarded = False


def shapes_of(tree: Any) -> Any:
    """Return the shapes, dtypes and placement of a tree's arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def on_host(params: Any) -> Any:
    """Copy arrays to the host; shapes stay shapes."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x), params)


def on_device(params: Any, shapes: Any) -> Any:
    """Put parameters where their shapes say; shapes stay shapes."""

    def placed(x: Any, shape: jax.ShapeDtypeStruct) -> Any:
        return x if isinstance(x, jax.ShapeDtypeStruct) else jax.device_put(x, shape.sharding)

    there = jax.block_until_ready(jax.tree.map(placed, params, shapes))
    use_huge_pages(there)
    return there
