"""Sleep of an engine: released memory of the device, and the parameters meanwhile."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from ....model.draft_pair import EngineParams, target_params, with_target
from ...host.process import use_huge_pages
from ...runtime.compiled.lowering import StepArguments
from .weight_update import require_one_process, shapes_with_shardings

TAGS = ("weights", "kv_cache", "scheduling")  # parts of an engine that `wake_up` may name; vLLM's words


@dataclass
class SleepState:
    """Sleep of one engine.

    missing: tags to get back before the engine steps again.
    params: parameters that are off the device: arrays on the host, or shapes if they were discarded.
    discarded: True until new parameters replace discarded ones.
    """

    missing: set[str] = field(default_factory=set)
    params: Any = None
    discarded: bool = False

    def check_awake(self) -> None:
        """Raise RuntimeError unless steps can be taken."""
        if self.missing:
            what = " and ".join(sorted(self.missing))
            remedy = "resume_generation" if what == "scheduling" else "wake_up"
            raise RuntimeError(f"the engine sleeps, without {what}: call {remedy} first")
        if self.discarded:
            raise RuntimeError("sleep(level=2) has discarded the parameters: give others with update_params")

    def pause(self) -> None:
        """Stop steps, and keep all arrays."""
        self.missing.add("scheduling")

    def release_arguments(
        self, arguments: StepArguments, argument_shapes: StepArguments, discard: bool
    ) -> StepArguments:
        """Release the device's arrays; returns their shapes.

        arguments: arrays to release. Cache and slots may be futures.
        argument_shapes: shapes of cache and slots.
        discard: drop the target's parameters. Otherwise all parameters are copied to the host.

        Raises ValueError in a group of processes.
        """
        require_one_process(arguments.params, "sleep")
        params = arguments.params if self.params is None else self.params
        if discard:
            params = with_target(params, shapes_with_shardings(target_params(arguments.params)))
        self.missing, self.params = set(TAGS), copy_to_host(params)
        self.discarded = self.discarded or discard
        return replace(argument_shapes, params=shapes_with_shardings(arguments.params))

    def restore(
        self,
        arguments: StepArguments,
        tags: Iterable[str],
        make_fresh_arguments: Callable[[EngineParams], StepArguments],
    ) -> StepArguments:
        """Restore the parts that `tags` name; `make_fresh_arguments` returns parameters with an unused cache
        and slots."""
        for tag in self.missing_tags(tags):
            if tag == "weights":
                arguments = replace(arguments, params=copy_to_device(self.params, arguments.params))
            elif tag == "kv_cache":
                arguments = make_fresh_arguments(arguments.params)
            self.on_restored(tag)
        return arguments

    def missing_tags(self, tags: Iterable[str]) -> list[str]:
        """Return the given tags that are missing. Raises ValueError for an unknown one."""
        tags = {tags} if isinstance(tags, str) else set(tags)
        if not tags <= set(TAGS):
            raise ValueError(
                f"wake_up: tags {sorted(tags)} are not allowed: of {', '.join(TAGS)}, or None for all"
            )
        return sorted(self.missing & tags)

    def on_restored(self, tag: str) -> None:
        """Record that the part of a tag is restored. Once all parts are there, steps are allowed."""
        if tag == "weights":
            self.params = None
        self.missing -= {tag} if self.missing - {tag, "scheduling"} else {tag, "scheduling"}

    def on_params_replaced(self, target: Any) -> None:
        """Record that other parameters are served from now on."""
        self.params = None if self.params is None else with_target(self.params, target)
        self.discarded = False


def copy_to_host(params: Any) -> Any:
    """Copy arrays to the host; shapes stay shapes."""
    return jax.tree.map(lambda x: x if isinstance(x, jax.ShapeDtypeStruct) else np.asarray(x), params)


def copy_to_device(params: Any, shapes: Any) -> Any:
    """Copy parameters to the devices, in the shardings of `shapes`; shapes stay shapes."""

    def place_array(x: Any, shape: jax.ShapeDtypeStruct) -> Any:
        return x if isinstance(x, jax.ShapeDtypeStruct) else jax.device_put(x, shape.sharding)

    placed_params = jax.block_until_ready(jax.tree.map(place_array, params, shapes))
    use_huge_pages(placed_params)
    return placed_params
