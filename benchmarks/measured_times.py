"""Seconds of calls on this machine, from measured ones, to compare a simulation with a real run."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from duetto.serve.planner.simulation.step_times import StepCall
from duetto.serve.runtime.compiled.shapes import Shape


@dataclass(frozen=True)
class MeasuredTimes:
    """Seconds of shapes by measured lines.

    table: seconds of a shape, and of each token that its rows have in the cache. Shapes that were not
    measured take the seconds of the nearest one, in proportion to their areas.
    spread: of a shape, ratios of measured seconds to its line. A call takes one of them by chance: requests
    that arrive at random meet long calls more often than short ones.
    """

    table: Mapping[Shape, tuple[float, float]]
    spread: Mapping[Shape, Sequence[float]] = field(default_factory=dict)
    num_stages: int = 1
    chance: Random = field(default_factory=lambda: Random(0), compare=False)

    @classmethod
    def of(cls, samples: Iterable[tuple[Shape, int, float]]) -> "MeasuredTimes":
        """From samples: a shape, tokens in the cache of all its rows, and seconds. Lines are laid through
        them by least squares; they never fall with the tokens."""
        found: dict[Shape, list[tuple[int, float]]] = {}
        for shape, cached, seconds in samples:
            found.setdefault(shape, []).append((cached, seconds))
        table = {shape: line(points) for shape, points in found.items()}
        return cls(table, {shape: ratios(points, *table[shape]) for shape, points in found.items()})

    def __call__(self, call: StepCall) -> Sequence[float]:
        base, slope = self.table.get(call.shape) or self._alike(call.shape)
        spread = self.spread.get(call.shape)
        return ((base + slope * call.cached) * (self.chance.choice(spread) if spread else 1.0),)

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
    squares = sum((p[0] - x) ** 2 for p in points)
    slope = sum((p[0] - x) * (p[1] - y) for p in points) / squares if squares else 0.0
    slope = max(slope, 0.0)
    return max(y - slope * x, 0.0), slope


def ratios(points: Sequence[tuple[float, float]], base: float, slope: float) -> tuple[float, ...]:
    """Return the ratio of each point to the line."""
    return tuple(y / (base + slope * x) for x, y in points if base + slope * x > 0)
