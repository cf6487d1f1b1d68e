"""Memory of a layout on devices that need not be here: the bytes of each, and the engine's sizes, by the
rules of a start."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from ....kvcache.quantised import kept_as
from ....kvcache.stages import params_of
from ....model.config import GroupedQuery, LayerKind, ModelConfig
from ....model.pair import PairConfig
from ....model.sharding import Layout, device_bytes, shardings
from ....model.transformer import Decoder, decoder_spec
from ....model.tree import abstract, nbytes
from ....model.weights.compress import form_spec
from ....model.weights.prepared import LANES, Lanes
from ...engine.startup.mesh import layout_of, layout_rules, put
from ...options.engine import EngineOptions
from ...runtime.compiled.shapes import Sizes
from ...runtime.compiled.sizing import (
    StageBudget,
    check_slots,
    moved_bytes,
    scratch_bytes,
    sizes_in,
    slot_bytes,
    widened_bytes,
)
from ...runtime.pipeline.split import split
from ..roofline.targets import Known


@dataclass(frozen=True)
class Fitted:
    """A layout that fits: the engine's options and sizes, and bytes on a device of its fullest stage."""

    options: EngineOptions
    layout: Layout
    sizes: Sizes
    weights: int
    cache: int
    limit: int

    @property
    def cached_tokens(self) -> int:
        """Tokens that the caches of all shards hold, of layers that keep all keys."""
        return self.sizes.shards * max(self.sizes.pages) * self.sizes.page_size


@dataclass(frozen=True)
class PlannedModel:
    """A model on a target: its sizes, and the dtype that it computes in."""

    name: str
    config: ModelConfig
    target: Known
    dtype: str = "bfloat16"
    read: Callable[[str | None], Decoder] | None = None  # a checkpoint's own; else as the sizes say

    def params(self, quantization: str | None) -> Decoder:
        """Its parameters in a quantisation as shapes, with their bytes."""
        if self.read is not None:
            return self.read(quantization)
        return abstract(form_spec(self.config, quantization), jnp.dtype(self.dtype))


def fit(job: PlannedModel, options: EngineOptions, params: Decoder) -> Fitted:
    """The sizes of an engine with these options on the target, of parameters in their quantisation.

    Raises ValueError where the layout is not allowed, or does not fit, with what would.
    """
    options = options.on(job.target.memory)
    layout, pair = layout_of(options), PairConfig(job.config)
    if layout.ffn:
        raise ValueError("experimental_ffn_devices is not allowed here: its steps have no model of time")
    options.check_stages(layout.stages)
    if layout.size > job.target.count:
        raise ValueError(f"{layout.size} devices are not allowed: {job.target.name} has {job.target.count}")
    if layout.stages > job.config.num_layers:
        raise ValueError(f"{layout.stages} stages are not allowed: {job.config.num_layers} layers")
    replace(layout, stages=1).check(job.config.layers)
    check_slots(pair, options, job.target.memory)
    weights = stage_bytes(job, layout, params)
    beside = 2 * slot_bytes(pair, options) + scratch_bytes(pair, options, job.dtype)
    beside += widened_bytes(params, job.dtype)
    ways = parted(job.config.layers, layout)
    lanes = Lanes(lanes_on(job.target), layout.tensor)
    beside += moved_bytes(pair, options, jnp.dtype(job.dtype), lanes) // ways
    budget = int(job.target.memory * options.gpu_memory_utilization) - beside
    spans, W = spans_of(job.config, layout), options.page_size
    places = [
        StageBudget(slice(span.start, span.stop), budget - own, ways, lanes)
        for span, own in zip(spans, weights, strict=True)
    ]
    if min(place.budget for place in places) <= 0:
        raise ValueError(
            f"{max(weights) / 2**30:.1f} GiB of weights and {beside / 2**30:.1f} of temporaries do not fit "
            f"{job.target.memory * options.gpu_memory_utilization / 2**30:.1f} GiB of a device"
        )
    sizes = sizes_in(pair, options, places, jnp.dtype(job.dtype))
    counts = dict(zip(pair.within(sizes.max_model_len).windows, sizes.pages, strict=True))
    layers = job.config.within(sizes.max_model_len).layers
    kept = kept_as(options.kv_cache_dtype, jnp.dtype(job.dtype))
    cache = max(place.bytes_of(counts, place.page_bytes(layers, W, kept)) for place in places)
    return Fitted(options, layout, sizes, max(weights), cache, places[0].budget)


def stage_bytes(job: PlannedModel, layout: Layout, params: Decoder) -> list[int]:
    """Bytes of the weights on a device of each stage."""
    placed = on_mesh(job.config, layout, params, lanes_on(job.target))
    if layout.stages == 1:
        return [bytes_of(placed)]
    if placed.head is None:
        placed = replace(placed, head=placed.embed)
    return [bytes_of(params_of(placed, span)) for span in spans_of(job.config, layout)]


def spans_of(config: ModelConfig, layout: Layout) -> list[range]:
    """The layers of each stage."""
    return [range(config.num_layers)] if layout.stages == 1 else split(config, layout.stages)


def on_mesh(config: ModelConfig, layout: Layout, params: Decoder, lanes: int) -> Decoder:
    """Parameters as they lie on the devices of a stage."""
    own = replace(layout, stages=1)
    if own.size == 1:
        return params
    axes = own.axes(config.layers)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    rules = layout_rules(layout, config.layers, mesh, lanes)
    return put(shardings(decoder_spec(config), mesh, rules), params)


def lanes_on(target: Known) -> int:
    return LANES if target.platform == "tpu" else 1


def bytes_of(tree: Any) -> int:
    """Bytes on one device, of shapes that lie on a mesh or on none."""
    return sum(
        nbytes(leaf) if leaf.sharding is None else device_bytes(leaf) for leaf in jax.tree.leaves(tree)
    )


def parted(layers: Sequence[LayerKind], layout: Layout) -> int:
    """The fewest parts that a pool is split into: of layers with fewer key heads than devices one for each
    head, of latent rows and states one."""

    def ways(kind: LayerKind) -> int:
        if not isinstance(kind.keys, GroupedQuery) or kind.state:
            return 1
        heads = kind.keys.num_kv_heads
        return layout.tensor if heads % layout.tensor == 0 else heads

    return min(map(ways, layers))
