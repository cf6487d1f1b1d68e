"""Partition of consecutive layers into pipeline stages, so that the slowest stage is as fast as possible."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any

import jax

from ....model.config import GroupedQuery, LayerKind, ModelConfig
from ....model.transformer import decoder_spec
from ....model.tree import is_spec


def split_layers(config: ModelConfig, stages: int) -> list[range]:
    """Return the layers of each stage, balanced by the number of parameters that a step reads.

    Counts the layers' parameters, and the head's in the last stage. The embedding is not counted: it has no
    product, and a step reads few of its rows. Raises ValueError for more stages than layers, and for layers
    that read more than the output of the layer before.
    """
    if stages > 1 and (config.layer_input or any(needs_borrowed_keys(kind) for kind in config.layers)):
        source = "inputs of their own" if config.layer_input else "the keys of others"
        raise ValueError(
            f"pipeline_parallel_size {stages} is not allowed for a model whose layers read {source}: 1"
        )
    if not 1 <= stages <= config.num_layers:
        raise ValueError(
            f"pipeline_parallel_size {stages} is not allowed for {config.num_layers} layers: "
            f"1 to {config.num_layers}"
        )
    spec = decoder_spec(config)
    layers = [count_params(layer) for layer in spec.layers]
    return balance_costs(layers, stages, last_cost=config.vocab_size * config.hidden_size)


def needs_borrowed_keys(kind: LayerKind) -> bool:
    """Return True if a layer reads the keys of another layer."""
    return isinstance(kind.mixer, GroupedQuery) and kind.mixer.kv_layers_back > 0


def count_params(spec: Any) -> int:
    """Return the number of parameters of a spec."""
    return sum(prod(leaf.shape) for leaf in jax.tree.leaves(spec, is_leaf=is_spec))


def balance_costs(costs: Sequence[int], stages: int, last_cost: int = 0) -> list[range]:
    """Return the partition of costs into consecutive ranges whose largest sum is smallest. Among equal
    partitions, the sum of squares is smallest. `last_cost` is added to the last range's sum."""
    cumulative = [0, *accumulate(costs)]

    @cache
    def best_ranges(first: int, num_left: int) -> tuple[int, int, tuple[int, ...]]:
        """Return the best partition of the costs from `first` on into `num_left` ranges: the largest sum, the
        sum of squares, and the end of each range."""
        if num_left == 1:
            last_sum = cumulative[-1] - cumulative[first] + last_cost
            return last_sum, last_sum**2, (len(costs),)
        candidates = []
        for end in range(first + 1, len(costs) - num_left + 2):
            largest, squares, ends = best_ranges(end, num_left - 1)
            first_sum = cumulative[end] - cumulative[first]
            candidates.append((max(largest, first_sum), squares + first_sum**2, (end, *ends)))
        return min(candidates)

    ends = best_ranges(0, stages)[2]
    return [range(start, end) for start, end in zip((0, *ends), ends, strict=False)]
