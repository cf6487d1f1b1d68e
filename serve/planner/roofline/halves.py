"""When feed-forward layers of their own devices pay (Step-3, Wang et al., arXiv 2507.19427), against experts
that are dealt over devices which all attend: decode on a number of equal devices, from their peaks alone.

Either way rows are as many as the keys' memory holds, and a time between tokens allows. What devices exchange
goes over their links while others compute, where there are micro-batches for that.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from ....model.config import Dense, Experts, ModelConfig
from ....model.transformer import decoder_spec, layer_spec
from ....model.tree import paths
from .floor import Demand, row_size
from .targets import Peaks

SHARE = 0.9  # of a device's memory, for weights and keys
HIDDEN = 2  # bytes of a number of what devices exchange


class Ffn(NamedTuple):
    """The feed-forward layers of one kind.

    layers: number of layers.
    experts: parameters of all experts of a layer.
    rest: parameters of a layer that every token is multiplied with.
    """

    kind: Dense | Experts
    layers: int
    experts: int
    rest: int

    def met(self, tokens: float) -> float:
        """Return how many parameters of a layer's experts a batch of `tokens` tokens reads."""
        return self.experts * self.kind.met(round(tokens)) if isinstance(self.kind, Experts) else 0.0

    @property
    def chosen(self) -> float:
        """Parameters of a layer's experts that one token is multiplied with."""
        return self.experts * self.kind.active / self.kind.count if isinstance(self.kind, Experts) else 0.0

    @property
    def copies(self) -> int:
        return self.kind.active if isinstance(self.kind, Experts) else 1


@dataclass(frozen=True)
class Sides:
    """A model cut into attention and feed-forward layers.

    attention: parameters outside of feed-forward layers, without the embedding.
    weight: bytes of a parameter.
    key: bytes of a number of a key.
    """

    config: ModelConfig
    attention: float
    weight: float = 1.0
    key: float = 1.0

    @classmethod
    def of(cls, config: ModelConfig, weight: float = 1.0, key: float = 1.0) -> "Sides":
        """Cut a model as this engine has it."""
        spec = decoder_spec(config)
        numbers = sum(prod(own.shape) for path, own in paths(spec).items() if ".ffn." not in path)
        looked_up = 0 if spec.head is None else prod(spec.embed.shape)
        return cls(config, numbers - looked_up, weight, key)

    @cached_property
    def ffns(self) -> list[Ffn]:
        found = Counter(kind for kind in self.config.layers if kind.ffn is not None)
        return [self._ffn(kind, count) for kind, count in found.items()]

    def _ffn(self, kind: Any, count: int) -> Ffn:
        own = paths(layer_spec(kind, self.config).ffn)
        numbers = {path: prod(spec.shape) for path, spec in own.items()}
        experts = sum(n for path, n in numbers.items() if path.startswith("experts."))
        return Ffn(kind.ffn, count, experts, sum(numbers.values()) - experts)

    @property
    def experts(self) -> float:
        """Parameters of the experts of all layers."""
        return sum(own.layers * own.experts for own in self.ffns)

    @property
    def rest(self) -> float:
        """Parameters of feed-forward layers that every token is multiplied with."""
        return sum(own.layers * own.rest for own in self.ffns)

    @property
    def active(self) -> float:
        """Parameters of feed-forward layers that one token is multiplied with."""
        return sum(own.layers * (own.rest + own.chosen) for own in self.ffns)

    @cached_property
    def pair_flops(self) -> int:
        """Operations for a query and a key in all layers."""
        return sum(mixer.pair_flops for kind in self.config.layers for mixer in kind.mixers)

    @cached_property
    def key_bytes(self) -> float:
        """Bytes that a token leaves in the cache."""
        return self.key * sum(map(row_size, self.config.layers))

    def ridge(self, peaks: Peaks) -> float:
        """Tokens of a feed-forward batch from which on it computes for as long as it reads all weights."""
        return peaks.flops16 / peaks.bandwidth * self.weight / 2 * (self.experts + self.rest) / self.active

    def attend(self, rows: float, context: int) -> Demand:
        """All attention halves, and the head, for rows of one device."""
        read = self.weight * self.attention + rows * context * self.key_bytes
        return Demand(rows * (2 * self.attention + context * self.pair_flops), read)

    def feed(self, tokens: float, devices: int, at_home: bool) -> Demand:
        """Work of all feed-forward layers for a batch of `tokens` tokens on one of `devices` devices. Experts
        are split over them; the rest is on each device that attends (`at_home`), or split too."""
        met = sum(own.layers * own.met(tokens) for own in self.ffns)
        read = met / devices + self.rest / (1 if at_home else devices)
        return Demand(2 * self.active * tokens / devices, self.weight * read)

    def sent(self, rows: float, devices: int) -> float:
        """Bytes that a device sends, and is sent back, for its rows in all layers: each goes to where its
        experts are, one copy for each device."""
        copies = sum(own.layers * min(own.copies, devices) for own in self.ffns)
        return rows * self.config.hidden_size * HIDDEN * copies


class Decode(NamedTuple):
    """Decode on several devices.

    attending: number of devices that attend.
    rows: of all devices.
    seconds: between a row's tokens.
    rate: tokens a second of a device.
    """

    attending: int
    rows: int
    batch: int  # tokens that feed-forward layers take together
    seconds: float
    rate: float


@dataclass(frozen=True)
class Cluster:
    """Equal devices that decode.

    context: tokens in the cache of each row.
    limit: seconds between a row's tokens, at most.
    micro_batches: of parts that take turns.
    """

    peaks: Peaks
    devices: int
    context: int
    limit: float = 0.05
    micro_batches: int = 3

    def together(self, sides: Sides) -> Decode | None:
        """Every device attends, experts are dealt over all (DeepSeek-V3, arXiv 2412.19437); None where that
        does not fit."""
        n = self.devices

        def seconds(rows: int) -> float:
            own = sides.attend(rows, self.context), sides.feed(n * rows, n, at_home=True)
            halves = sides.attend(rows / 2, self.context), sides.feed(n * rows / 2, n, at_home=True)
            wire = self._wire(sides.sent(rows, n))
            return min(self._sum(own) + wire, 2 * max(self._sum(halves), wire / 2))

        weights = sides.attention + sides.rest + sides.experts / n
        rows = self._most(sides, weights, seconds)
        if not rows:
            return None
        return Decode(n, n * rows, n * rows, seconds(rows), rows / seconds(rows))

    def apart(self, sides: Sides, attending: int | None = None) -> Decode | None:
        """Some devices attend, the others have the feed-forward layers; by default as many as is best."""
        tried = range(1, self.devices) if attending is None else [attending]
        found = [own for a in tried if (own := self._apart(sides, a))]
        return max(found, key=lambda own: own.rate, default=None)

    def _apart(self, sides: Sides, a: int) -> Decode | None:
        f, m = self.devices - a, self.micro_batches
        if sides.weight * (sides.experts + sides.rest) > f * SHARE * self.peaks.memory:
            return None

        def seconds(rows: int) -> float:
            return m * max(self.turns(sides, a, rows / m))

        rows = self._most(sides, sides.attention, seconds)
        if not rows:
            return None
        return Decode(
            a, a * rows, round(a * rows / m), seconds(rows), a * rows / seconds(rows) / self.devices
        )

    def turns(self, sides: Sides, a: int, rows: float) -> tuple[float, float, float]:
        """Seconds of a micro-batch of `rows` rows for each of `a` devices that attend: in attention, in the
        feed-forward layers, and on the links of either."""
        f = self.devices - a
        attended, fed = sides.attend(rows, self.context), sides.feed(a * rows, f, at_home=False)
        sent = sides.sent(rows, f)
        return self._sum([attended]), self._sum([fed]), self._wire(sent * max(1, a / f))

    def _most(self, sides: Sides, weights: float, seconds: Callable[[int], float]) -> int:
        """Most rows of a device that attends: their keys fit beside `weights` parameters, and `seconds` of
        them stay in the limit."""
        free = SHARE * self.peaks.memory - sides.weight * weights
        most = max(0, int(free // (self.context * sides.key_bytes)))
        return bisect_right(range(1, most + 1), self.limit, key=seconds)

    def _wire(self, sent: float) -> float:
        return 2 * sent / self.peaks.link

    def _sum(self, demands: Sequence[Demand]) -> float:
        return sum(own.floor(self.peaks.flops16, self.peaks.bandwidth) for own in demands)
