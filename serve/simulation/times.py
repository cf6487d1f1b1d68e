"""How long a call takes: measured on this machine, as a run has recorded it, or a device's roofline with a
stated efficiency."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple, Protocol

from ...kvcache.stages import config_of
from ...model.config import Experts, ModelConfig
from ...model.sharding import Layout
from ...model.transformer import Decoder
from ..programs.shapes import Shape
from ..roofline.floor import Demand, demand
from ..roofline.targets import Peaks

FIRST_CONTEXT = 128  # tokens; times are linear between contexts that double from here on


class Call(NamedTuple):
    """What a step is asked: its shape, rows that are not empty, the tokens that they compute, and the tokens
    that all of them have in the cache."""

    shape: Shape
    rows: int
    tokens: int
    cached: int


class StepTimes(Protocol):
    """Seconds of a call in each of `stages`, one behind the other."""

    @property
    def stages(self) -> int: ...

    def __call__(self, call: Call) -> Sequence[float]: ...


class Recorded:
    """Times of a run's calls, in the order in which they were made."""

    stages = 1

    def __init__(self, seconds: Iterable[float]):
        self._seconds: Iterator[float] = iter(seconds)

    def __call__(self, call: Call) -> Sequence[float]:
        return (next(self._seconds),)


@dataclass(frozen=True)
class Measured:
    """Times of shapes: of each some seconds, and so many more for each token that its rows have in the
    cache. Shapes that were not measured take as long as the nearest that were, in proportion to their
    areas."""

    table: Mapping[Shape, tuple[float, float]]
    stages: int = 1

    @classmethod
    def of(cls, samples: Iterable[tuple[Shape, int, float]]) -> "Measured":
        """From samples: a shape, tokens in the cache of all its rows, and seconds. Lines are laid through
        them by least squares; they never fall with the tokens."""
        found: dict[Shape, list[tuple[int, float]]] = {}
        for shape, cached, seconds in samples:
            found.setdefault(shape, []).append((cached, seconds))
        return cls({shape: line(points) for shape, points in found.items()})

    def __call__(self, call: Call) -> Sequence[float]:
        base, slope = self.table.get(call.shape) or self._alike(call.shape)
        return (base + slope * call.cached,)

    def _alike(self, shape: Shape) -> tuple[float, float]:
        own = [other for other in self.table if other.phase == shape.phase]
        if not own:
            raise ValueError(f"no time of {shape} is known: no {shape.phase} was measured")
        near = min(own, key=lambda other: (abs(other.area - shape.area), other))
        base, slope = self.table[near]
        return base * shape.area / near.area, slope


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """A line a + b x through points, with b of 0 or more."""
    n = len(points)
    x, y = sum(p[0] for p in points) / n, sum(p[1] for p in points) / n
    spread = sum((p[0] - x) ** 2 for p in points)
    slope = sum((p[0] - x) * (p[1] - y) for p in points) / spread if spread else 0.0
    slope = max(slope, 0.0)
    return max(y - slope * x, 0.0), slope


# ---------------------------------------------------------------- from a device's peaks


class Efficiency(NamedTuple):
    """What real programs reach of a device's peaks, of its arithmetic and of its memory; and seconds that
    each call takes beside, each exchange between devices, and the host for a step and for each of its
    rows."""

    compute: float = 0.6
    memory: float = 0.75
    call: float = 0.3e-3
    exchange: float = 15e-6
    step: float = 0.5e-3
    row: float = 15e-6


STATED, ONE = Efficiency(), Layout()


@dataclass
class Demands:
    """The work of a model's calls, each counted once: `params` are shapes without numbers, and say how many
    bytes the weights have."""

    config: ModelConfig
    params: Decoder
    dtype: str
    kv_cache_dtype: str = "auto"
    known: dict[tuple[Shape, int, range, int], Demand] = field(default_factory=dict)

    def of(self, shape: Shape, context: int, span: range, shards: int) -> Demand:
        """That of the layers of a stage, whole; of `shards` over which experts are split one's part."""
        key = shape, context, span, shards
        if key not in self.known:
            own = replace(self.params, layers=self.params.layers[span.start : span.stop])
            config, last = config_of(self.config, span), span.stop == self.config.num_layers
            kept = self.kv_cache_dtype
            self.known[key] = demand(
                shape, config, self.dtype, context, own, kept, samples=last, shards=shards
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
        self.config = self.demands.config

    @property
    def stages(self) -> int:
        return self.layout.stages

    def __call__(self, call: Call) -> Sequence[float]:
        context = call.cached / (call.rows if call.shape.phase == "prefill" else call.shape.rows)
        low = 0 if context < FIRST_CONTEXT else FIRST_CONTEXT << int(context / FIRST_CONTEXT).bit_length() - 1
        high = max(2 * low, FIRST_CONTEXT)
        share = (context - low) / (high - low)
        ends = zip(self._at(call.shape, low), self._at(call.shape, high), strict=True)
        return [a + share * (b - a) for a, b in ends]

    def _at(self, shape: Shape, context: int) -> tuple[float, ...]:
        found = self.known.get((shape, context))
        if found is None:
            found = tuple(self._stage(shape, context, span) for span in spans(self.config, self.stages))
            self.known[shape, context] = found
        return found

    def _stage(self, shape: Shape, context: int, span: range) -> float:
        """Seconds of the layers of a stage on each of its devices, what they exchange included."""
        lay, e, p = self.layout, self.efficiency, self.peaks
        shards = lay.data if lay.experts else 1
        own = self.demands.of(shape, context, span, shards)
        flops = lay.tensor * e.compute * p.flops(self.demands.dtype)
        at_most = flops, lay.tensor * e.memory * p.bandwidth
        return own.floor(*at_most) + shape_steps(shape) * self._exchanged(shape, span) + e.call

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


def shape_steps(shape: Shape) -> int:
    """Passes of the model that a call takes one after the other."""
    return shape.tokens if shape.phase == "decode" else 1


def spans(config: ModelConfig, stages: int) -> list[range]:
    """The layers of each of some stages, as even as may be."""
    ends = [round(i * config.num_layers / stages) for i in range(stages + 1)]
    return [range(a, b) for a, b in pairwise(ends)]
