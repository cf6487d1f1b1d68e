"""Seconds of calls, from a device's roofline with a stated efficiency."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import jax

from ....kvcache.stages import stage_config
from ....model.config import Experts, LayerKind, ModelConfig
from ....model.sharding import Layout
from ....model.transformer import Decoder
from ....model.tree import tree_bytes
from ...runtime.compiled.shapes import Shape
from ...runtime.pipeline.split import split_layers
from ..roofline.floor import Demand, program_demand
from ..roofline.targets import Peaks

MIN_CONTEXT = 128  # tokens; times are linear between contexts that double from here


class StepCall(NamedTuple):
    """A call of a program.

    shape: of the program.
    rows: number of rows that are not empty.
    tokens: number of tokens that they compute.
    cached: number of cached tokens of all rows together.
    """

    shape: Shape
    rows: int
    tokens: int
    cached: int


class StepTimes(Protocol):
    """Model of time: seconds of a call in each of `num_stages` pipeline stages, in their order."""

    @property
    def num_stages(self) -> int: ...

    def __call__(self, call: StepCall) -> Sequence[float]: ...


# ---------------------------------------------------------------- of the host


class HostTimes(NamedTuple):
    """Seconds of host work.

    step: for a step.
    row: for each of its rows.
    slot: for each request that is admitted.
    """

    step: float = 0.0
    row: float = 0.0
    slot: float = 0.0


# ---------------------------------------------------------------- from a device's peaks


class Efficiency(NamedTuple):
    """Efficiency of real programs on a device.

    compute, memory: shares of the device's peaks.
    call: seconds added to each call.
    exchange: seconds added to each exchange between devices.
    step, row: seconds of the host for a step, and for each of its rows.
    """

    compute: float = 0.6
    memory: float = 0.75
    call: float = 0.3e-3
    exchange: float = 15e-6
    step: float = 0.5e-3
    row: float = 15e-6

    @property
    def host(self) -> HostTimes:
        """Return the seconds of host work."""
        return HostTimes(self.step, self.row)


STATED_EFFICIENCY, ONE_DEVICE_LAYOUT = Efficiency(), Layout()


@dataclass
class Demands:
    """Work of a model's calls. Layers of one kind and size are counted once.

    params: shapes without numbers, for the bytes of the weights.
    cache: work that was counted before.
    """

    config: ModelConfig
    params: Decoder
    dtype: str
    kv_cache_dtype: str = "auto"
    cache: dict[tuple[Any, ...], Demand] = field(default_factory=dict)

    def __post_init__(self):
        sizes = [sum(tree_bytes(leaf) for leaf in jax.tree.leaves(layer)) for layer in self.params.layers]
        first: dict[tuple[LayerKind, int], int] = {}
        alike = enumerate(zip(self.config.layers, sizes, strict=True))
        self._first_alike = [first.setdefault(key, i) for i, key in alike]

    def stage_demand(self, shape: Shape, context: int, span: range, shards: int) -> Demand:
        """Return the work of a stage's layers. With `shards` above 1 experts are split over the shards, and
        the work is one shard's."""
        bare = self._layer_demand(None, False, shape, context, shards)
        ends = self._layer_demand(None, span.stop == self.config.num_layers, shape, context, shards)
        flops, moved = ends.flops, ends.bytes
        for layer, count in Counter(self._first_alike[span.start : span.stop]).items():
            layer_demand = self._layer_demand(layer, False, shape, context, shards)
            flops += count * (layer_demand.flops - bare.flops)
            moved += count * (layer_demand.bytes - bare.bytes)
        return Demand(flops, moved)

    def _layer_demand(
        self, layer: int | None, samples: bool, shape: Shape, context: int, shards: int
    ) -> Demand:
        """Return the work of one layer, or of no layer, together with the embedding. If it `samples`, the
        head is included."""
        key = layer, samples, shape, context, shards
        if key not in self.cache:
            i = 0 if layer is None else layer
            span = range(i, i if layer is None else i + 1)
            span_params = replace(self.params, layers=self.params.layers[span.start : span.stop])
            config, cache_dtype = stage_config(self.config, span), self.kv_cache_dtype
            self.cache[key] = program_demand(
                shape, config, self.dtype, context, span_params, cache_dtype, samples=samples, shards=shards
            )
        return self.cache[key]


@dataclass
class RooflineTimes:
    """Step times from a model's demands and a device's peaks, with an efficiency.

    Demands are counted for rows of equal contexts, at contexts that double. Times between them are linear.
    """

    demands: Demands
    peaks: Peaks
    layout: Layout = ONE_DEVICE_LAYOUT
    efficiency: Efficiency = STATED_EFFICIENCY
    cache: dict[tuple[Shape, int], tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self):
        self.config, whole = self.demands.config, range(self.demands.config.num_layers)
        self.spans = [whole] if self.num_stages == 1 else split_layers(self.config, self.num_stages)

    @property
    def num_stages(self) -> int:
        return self.layout.stages

    def __call__(self, call: StepCall) -> Sequence[float]:
        context = call.cached / (call.rows if call.shape.phase == "prefill" else call.shape.rows)
        low = 0 if context < MIN_CONTEXT else MIN_CONTEXT << int(context / MIN_CONTEXT).bit_length() - 1
        high = max(2 * low, MIN_CONTEXT)
        share = (context - low) / (high - low)
        ends = zip(
            self._seconds_at_context(call.shape, low), self._seconds_at_context(call.shape, high), strict=True
        )
        return [a + share * (b - a) for a, b in ends]

    def _seconds_at_context(self, shape: Shape, context: int) -> tuple[float, ...]:
        """Return the seconds of each stage at a context that demands are counted for."""
        seconds = self.cache.get((shape, context))
        if seconds is None:
            seconds = tuple(self._stage_seconds(shape, context, span) for span in self.spans)
            self.cache[shape, context] = seconds
        return seconds

    def _stage_seconds(self, shape: Shape, context: int, span: range) -> float:
        """Return the seconds of a stage's layers on each of its devices, with the exchanges between
        devices."""
        layout, efficiency, peaks = self.layout, self.efficiency, self.peaks
        shards = layout.data if layout.expert_parallel else 1
        work = self.demands.stage_demand(shape, context, span, shards)
        flops = layout.tensor * efficiency.compute * peaks.flops(self.demands.dtype)
        reached_rates = flops, layout.tensor * efficiency.memory * peaks.bandwidth
        sequential_steps = shape.tokens if shape.phase == "decode" else 1  # steps of a decode are sequential
        return (
            work.floor_seconds(*reached_rates)
            + sequential_steps * self._exchange_seconds(shape, span)
            + efficiency.call
        )

    def _exchange_seconds(self, shape: Shape, span: range) -> float:
        """Return the seconds of exchanges between devices. Each layer that is split has two all-reduces; a
        ring sends nearly twice the bytes. Experts that are split over shards exchange the tokens of all
        shards. A stage sends its activations to the next."""
        layout, layers = self.layout, self.config.layers[span.start : span.stop]
        tokens = shape.rows if shape.phase == "decode" else shape.area
        size = 2 * tokens * self.config.hidden_size
        moved_bytes, num_exchanges = 0.0, 0
        if layout.tensor > 1:
            moved_bytes, num_exchanges = (
                2 * size * 2 * (layout.tensor - 1) / layout.tensor * len(layers),
                2 * len(layers),
            )
        if layout.data > 1 and layout.expert_parallel:
            count = sum(isinstance(kind.ffn, Experts) for kind in layers)
            moved_bytes, num_exchanges = (
                moved_bytes + 2 * size * (layout.data - 1) * count,
                num_exchanges + 2 * count,
            )
        if span.stop < self.config.num_layers:
            moved_bytes, num_exchanges = moved_bytes + size, num_exchanges + 1
        return (
            moved_bytes / self.peaks.link + num_exchanges * self.efficiency.exchange if num_exchanges else 0.0
        )
