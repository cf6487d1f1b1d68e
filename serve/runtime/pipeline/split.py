"""Partition of layers into pipeline stages: consecutive ones, so that the slowest stage is as fast as
possible."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any

import jax

from ....model.config import GroupedQuery, LayerKind, ModelConfig
from ....model.transformer import decoder_spec
from ....model.tree import is_spec


def split(config: ModelConfig, stages: int) -> list[range]:
    """Return the layers of each stage, balanced by the parameters that a step reads: those of the layers, and
    the head's in the last stage. The embedding costs no product, and a step reads few of its rows.

    Raises ValueError for more stages than layers, and for layers that read more than the output of the one
    before.
    """
    if stages > 1 and (config.layer_input or any(borrowed(kind) for kind in config.layers)):
        what = "inputs of their own" if config.layer_input else "the keys of others"
        raise ValueError(
            f"pipeline_parallel_size {stages} is not allowed for a model whose layers read {what}: 1"
        )
    if not 1 <= stages <= config.num_layers:
        raise ValueError(
            f"pipeline_parallel_size {stages} is not allowed for {config.num_layers} layers: "
            f"1 to {config.num_layers}"
        )
    spec = decoder_spec(config)
    layers = [numbers(layer) for layer in spec.layers]
    return balanced(layers, stages, behind=config.vocab_size * config.hidden_size)


def borrowed(kind: LayerKind) -> bool:
    """Tell if a layer reads the keys of another."""
    return isinstance(kind.mixer, GroupedQuery) and kind.mixer.borrows > 0


def numbers(spec: Any) -> int:
    return sum(prod(leaf.shape) for leaf in jax.tree.leaves(spec, is_leaf=is_spec))


def balanced(costs: Sequence[int], stages: int, behind: int = 0) -> list[range]:
    """Return consecutive ranges of costs with the smallest possible largest sum, and of several the most
    even. `behind` is added to the last."""
    until = [0, *accumulate(costs)]

    @cache
    def best(first: int, left: int) -> tuple[int, int, tuple[int, ...]]:
        """The largest sum, the sum of squares, and where each of the ranges from `first` on ends."""
        if left == 1:
            last = until[-1] - until[first] + behind
            return last, last**2, (len(costs),)
        found = []
        for end in range(first + 1, len(costs) - left + 2):
            most, squares, ends = best(end, left - 1)
            own = until[end] - until[first]
            found.append((max(most, own), squares + own**2, (end, *ends)))
        return min(found)

    ends = best(0, stages)[2]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]
