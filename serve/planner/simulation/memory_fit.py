"""Memory of a layout on devices that need not be present: the bytes of each, and the engine's sizes, by the
rules of a start."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from ....kvcache.quantised import choose_cache_format
from ....kvcache.stages import stage_params
from ....model.config import GroupedQuery, LayerKind, ModelConfig
from ....model.draft_pair import PairConfig
from ....model.sharding import Layout, device_bytes, make_shardings
from ....model.transformer import Decoder, decoder_spec
from ....model.tree import shapes_from_specs, tree_bytes
from ....model.weights.compression.compress import form_spec
from ....model.weights.device_forms import TPU_LANES, Lanes
from ...engine.startup.mesh import layout_axis_rules, make_layout, place_params
from ...options.engine import EngineOptions
from ...runtime.compiled.shapes import Sizes
from ...runtime.compiled.sizing import (
    StageBudget,
    check_slot_memory,
    dequantised_bytes,
    fit_sizes,
    max_scratch_bytes,
    slots_bytes,
    transfer_bytes,
)
from ...runtime.pipeline.split import split_layers
from ..roofline.targets import TargetFacts


@dataclass(frozen=True)
class FittedEngine:
    """A layout that fits.

    options, layout, sizes: of the engine.
    weight_bytes: bytes of weights on a device of the fullest stage.
    cache_bytes: bytes of pages on a device of the fullest stage.
    max_cache_bytes: bytes for the cache on a device of the first stage.
    """

    options: EngineOptions
    layout: Layout
    sizes: Sizes
    weight_bytes: int
    cache_bytes: int
    max_cache_bytes: int

    @property
    def cache_capacity_tokens(self) -> int:
        """Return the tokens that the caches of all shards hold, in layers without a window."""
        return self.sizes.shards * max(self.sizes.pages) * self.sizes.page_size


@dataclass(frozen=True)
class PlannedModel:
    """A model on a target.

    dtype: of the computation.
    read_params: reads a checkpoint's parameters as shapes in a quantisation; None for those of the sizes.
    """

    name: str
    config: ModelConfig
    target: TargetFacts
    dtype: str = "bfloat16"
    read_params: Callable[[str | None], Decoder] | None = None

    def param_shapes(self, quantization: str | None) -> Decoder:
        """Return the parameters in a quantisation, as shapes with their bytes."""
        if self.read_params is not None:
            return self.read_params(quantization)
        return shapes_from_specs(form_spec(self.config, quantization), jnp.dtype(self.dtype))


def fit_engine(model: PlannedModel, options: EngineOptions, params: Decoder) -> FittedEngine:
    """Choose the sizes of an engine with these options on the target. `params` are shapes in the options'
    quantisation.

    Raises ValueError if the layout is not allowed or does not fit; the message names what would.
    """
    options = options.with_device_load(model.target.memory)
    layout, pair = make_layout(options), PairConfig(model.config)
    if layout.ffn:
        raise ValueError("experimental_ffn_devices is not allowed here: its steps have no model of time")
    options.check_stages(layout.stages)
    if layout.num_devices > model.target.count:
        raise ValueError(
            f"{layout.num_devices} devices are not allowed: {model.target.name} has {model.target.count}"
        )
    if layout.stages > model.config.num_layers:
        raise ValueError(f"{layout.stages} stages are not allowed: {model.config.num_layers} layers")
    replace(layout, stages=1).check_layers(model.config.layers)
    check_slot_memory(pair, options, model.target.memory)
    weights = stage_weight_bytes(model, layout, params)
    other_bytes = 2 * slots_bytes(pair, options) + max_scratch_bytes(pair, options, model.dtype)
    other_bytes += dequantised_bytes(params, model.dtype)
    pool_parts = count_pool_parts(model.config.layers, layout)
    lanes = Lanes(lane_width(model.target), layout.tensor)
    other_bytes += transfer_bytes(pair, options, jnp.dtype(model.dtype), lanes) // pool_parts
    budget = int(model.target.memory * options.gpu_memory_utilization) - other_bytes
    spans, W = stage_spans(model.config, layout), options.page_size
    stage_budgets = [
        StageBudget(slice(span.start, span.stop), budget - weight_bytes, pool_parts, lanes)
        for span, weight_bytes in zip(spans, weights, strict=True)
    ]
    if min(stage_budget.budget for stage_budget in stage_budgets) <= 0:
        raise ValueError(
            f"{max(weights) / 2**30:.1f} GiB of weights and {other_bytes / 2**30:.1f} of temporaries do not "
            f"fit {model.target.memory * options.gpu_memory_utilization / 2**30:.1f} GiB of a device"
        )
    sizes = fit_sizes(pair, options, stage_budgets, jnp.dtype(model.dtype))
    counts = dict(zip(pair.drop_unreached_limits(sizes.max_model_len).windows, sizes.pages, strict=True))
    layers = model.config.drop_unreached_limits(sizes.max_model_len).layers
    cache_format = choose_cache_format(options.kv_cache_dtype, jnp.dtype(model.dtype))
    cache_bytes = max(
        stage_budget.cache_bytes(counts, stage_budget.page_bytes(layers, W, cache_format))
        for stage_budget in stage_budgets
    )
    return FittedEngine(options, layout, sizes, max(weights), cache_bytes, stage_budgets[0].budget)


def stage_weight_bytes(model: PlannedModel, layout: Layout, params: Decoder) -> list[int]:
    """Return the bytes of the weights on a device of each stage."""
    placed = shard_params_on_mesh(model.config, layout, params, lane_width(model.target))
    if layout.stages == 1:
        return [params_device_bytes(placed)]
    if placed.head is None:
        placed = replace(placed, head=placed.embed)
    return [params_device_bytes(stage_params(placed, span)) for span in stage_spans(model.config, layout)]


def stage_spans(config: ModelConfig, layout: Layout) -> list[range]:
    """Return the layers of each stage."""
    return [range(config.num_layers)] if layout.stages == 1 else split_layers(config, layout.stages)


def shard_params_on_mesh(config: ModelConfig, layout: Layout, params: Decoder, lanes: int) -> Decoder:
    """Shard parameters over the devices of a stage, as shapes."""
    stage_layout = replace(layout, stages=1)
    if stage_layout.num_devices == 1:
        return params
    axes = stage_layout.mesh_axes(config.layers)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    rules = layout_axis_rules(layout, config.layers, mesh, lanes)
    return place_params(make_shardings(decoder_spec(config), mesh, rules), params)


def lane_width(target: TargetFacts) -> int:
    """Return the row size that the target's arrays are padded to; 1 for none."""
    return TPU_LANES if target.platform == "tpu" else 1


def params_device_bytes(tree: Any) -> int:
    """Return the bytes on one device, of shapes with or without a sharding."""
    return sum(
        tree_bytes(leaf) if leaf.sharding is None else device_bytes(leaf) for leaf in jax.tree.leaves(tree)
    )


def count_pool_parts(layers: Sequence[LayerKind], layout: Layout) -> int:
    """Return the fewest parts that a pool is split into, over all layers. Layers with fewer key heads than
    devices have a part for each head. Latent rows and states have one part."""

    def layer_parts(kind: LayerKind) -> int:
        if not isinstance(kind.attention, GroupedQuery) or kind.state_shapes:
            return 1
        heads = kind.attention.num_kv_heads
        return layout.tensor if heads % layout.tensor == 0 else heads

    return min(map(layer_parts, layers))
