"""Seconds of calls, from a device's roofline with a stated efficiency."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import jax

from ....kvcache.stages import config_of
from ....model.config import Experts, LayerKind, ModelConfig
from ....model.sharding import Layout
from ....model.transformer import Decoder
from ....model.tree import nbytes
from ...runtime.compiled.shapes import Shape
from ...runtime.pipeline.split import split
from ..roofline.floor import Demand, demand
from ..roofline.targets import Peaks

FIRST_CONTEXT = 128  # tokens; times are linear between contexts that double from here on


class StepCall(NamedTuple):
    """A call of a program.

    rows: that are not empty.
    tokens: that they compute.
    cached: tokens that all of them have in the cache.
    """

    shape: Shape
    rows: int
    tokens: int
    cached: int


class StepTimes(Protocol):
    """Seconds of a call in each of `stages`, one behind the other."""

    @property
    def stages(self) -> int: ...

    def __call__(self, call: StepCall) -> Sequence[float]: ...


# ---------------------------------------------------------------- of the host


class Host(NamedTuple):
    """Seconds of the host for a step, for each of its rows, and for each request that takes a seat."""

    step: float = 0.0
    row: float = 0.0
    seat: float = 0.0


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
    def host(self) -> Host:
        return Host(self.step, self.row)


STATED, ONE = Efficiency(), Layout()


@dataclass
class Demands:
    """The work of a model's calls: `params` are shapes without numbers, and say how many bytes the weights
    have. Each kind of layer is counted once, alone, and stands for all that are like it."""

    config: ModelConfig
    params: Decoder
    dtype: str
    kv_cache_dtype: str = "auto"
    known: dict[tuple[Any, ...], Demand] = field(default_factory=dict)

    def __post_init__(self):
        sizes = [sum(nbytes(leaf) for leaf in jax.tree.leaves(layer)) for layer in self.params.layers]
        first: dict[tuple[LayerKind, int], int] = {}
        alike = enumerate(zip(self.config.layers, sizes, strict=True))
        self._like = [first.setdefault(key, i) for i, key in alike]

    def of(self, shape: Shape, context: int, span: range, shards: int) -> Demand:
        """Return the work of the layers of a stage, whole, or of one shard if experts are split over
        `shards`."""
        bare = self._part(None, False, shape, context, shards)
        ends = self._part(None, span.stop == self.config.num_layers, shape, context, shards)
        flops, moved = ends.flops, ends.bytes
        for layer, count in Counter(self._like[span.start : span.stop]).items():
            own = self._part(layer, False, shape, context, shards)
            flops += count * (own.flops - bare.flops)
            moved += count * (own.bytes - bare.bytes)
        return Demand(flops, moved)

    def _part(self, layer: int | None, samples: bool, shape: Shape, context: int, shards: int) -> Demand:
        """The demand of one layer, or of none."""
        key = layer, samples, shape, context, shards
        if key not in self.known:
            i = 0 if layer is None else layer
            span = range(i, i if layer is None else i + 1)
            own = replace(self.params, layers=self.params.layers[span.start : span.stop])
            config, kept = config_of(self.config, span), self.kv_cache_dtype
            self.known[key] = demand(
                shape, config, self.dtype, context, own, kept, samples=samples, shards=shards
            )
        return self.known[key]


@dataclass
class Roofline:
    """Times from a model's demands and a device's peaks, with an efficiency. Demands are those of rows with
    equal contexts, at some contexts, and times are linear between them."""

    demands: Demands
    peaks: Peaks
    layout: Layout = ONE
    efficiency: Efficiency = STATED
    known: dict[tuple[Shape, int], tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self):
        self.config, whole = self.demands.config, range(self.demands.config.num_layers)
        self.spans = [whole] if self.stages == 1 else split(self.config, self.stages)

    @property
    def stages(self) -> int:
        return self.layout.stages

    def __call__(self, call: StepCall) -> Sequence[float]:
        context = call.cached / (call.rows if call.shape.phase == "prefill" else call.shape.rows)
        low = 0 if context < FIRST_CONTEXT else FIRST_CONTEXT << int(context / FIRST_CONTEXT).bit_length() - 1
        high = max(2 * low, FIRST_CONTEXT)
        share = (context - low) / (high - low)
        ends = zip(self._at(call.shape, low), self._at(call.shape, high), strict=True)
        return [a + share * (b - a) for a, b in ends]

    def _at(self, shape: Shape, context: int) -> tuple[float, ...]:
        found = self.known.get((shape, context))
        if found is None:
            found = tuple(self._stage(shape, context, span) for span in self.spans)
            self.known[shape, context] = found
        return found

    def _stage(self, shape: Shape, context: int, span: range) -> float:
        """Seconds of the layers of a stage on each of its devices, what they exchange included."""
        lay, e, p = self.layout, self.efficiency, self.peaks
        shards = lay.data if lay.experts else 1
        own = self.demands.of(shape, context, span, shards)
        flops = lay.tensor * e.compute * p.flops(self.demands.dtype)
        at_most = flops, lay.tensor * e.memory * p.bandwidth
        passes = shape.tokens if shape.phase == "decode" else 1  # one after the other
        return own.floor(*at_most) + passes * self._exchanged(shape, span) + e.call

    def _exchanged(self, shape: Shape, span: range) -> float:
        """Seconds in which devices exchange what each made of a token: two sums of each layer that is split
        (a ring sends nearly twice the bytes), tokens of all shards where these split experts, and what a
        stage hands on."""
        lay, layers = self.layout, self.config.layers[span.start : span.stop]
        tokens = shape.rows if shape.phase == "decode" else shape.area
        size = 2 * tokens * self.config.hidden_size
        moved, times = 0.0, 0
        if lay.tensor > 1:
            moved, times = 2 * size * 2 * (lay.tensor - 1) / lay.tensor * len(layers), 2 * len(layers)
        if lay.data > 1 and lay.experts:
            count = sum(isinstance(kind.ffn, Experts) for kind in layers)
            moved, times = moved + 2 * size * (lay.data - 1) * count, times + 2 * count
        if span.stop < self.config.num_layers:
            moved, times = moved + size, times + 1
        return moved / self.peaks.link + times * self.efficiency.exchange if times else 0.0
