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
from ....model.tree import leaves_by_path
from .floor import Demand, cached_elements_per_token
from .targets import Peaks

MEMORY_SHARE = 0.9  # share of a device's memory for weights and keys
SENT_ELEMENT_BYTES = 2  # bytes of one number of the exchanged activations


class Ffn(NamedTuple):
    """The feed-forward layers of one kind.

    kind: configuration of the layers.
    layers: number of layers.
    expert_params: parameters of all experts of a layer.
    dense_params: parameters of a layer that every token is multiplied with.
    """

    kind: Dense | Experts
    layers: int
    expert_params: int
    dense_params: int

    def num_read_params(self, tokens: float) -> float:
        """Return the number of parameters of a layer's experts that a batch of `tokens` tokens reads."""
        return (
            self.expert_params * self.kind.active_share(round(tokens))
            if isinstance(self.kind, Experts)
            else 0.0
        )

    @property
    def active_params(self) -> float:
        """Return the number of parameters of a layer's experts that one token is multiplied with."""
        return (
            self.expert_params * self.kind.active / self.kind.count if isinstance(self.kind, Experts) else 0.0
        )

    @property
    def experts_per_token(self) -> int:
        return self.kind.active if isinstance(self.kind, Experts) else 1


@dataclass(frozen=True)
class ModelHalves:
    """A model cut into attention and feed-forward layers.

    attention_params: parameters outside of feed-forward layers, without the embedding.
    param_bytes: bytes of a parameter.
    key_element_bytes: bytes of a number of a key.
    """

    config: ModelConfig
    attention_params: float
    param_bytes: float = 1.0
    key_element_bytes: float = 1.0

    @classmethod
    def from_config(
        cls, config: ModelConfig, param_bytes: float = 1.0, key_element_bytes: float = 1.0
    ) -> "ModelHalves":
        """Cut a model as this engine has it."""
        spec = decoder_spec(config)
        non_ffn_params = sum(
            prod(param.shape) for path, param in leaves_by_path(spec).items() if ".ffn." not in path
        )
        embedding_params = 0 if spec.head is None else prod(spec.embed.shape)
        return cls(config, non_ffn_params - embedding_params, param_bytes, key_element_bytes)

    @cached_property
    def ffns(self) -> list[Ffn]:
        counts = Counter(kind for kind in self.config.layers if kind.ffn is not None)
        return [self._make_ffn(kind, count) for kind, count in counts.items()]

    def _make_ffn(self, kind: Any, count: int) -> Ffn:
        specs = leaves_by_path(layer_spec(kind, self.config).ffn)
        param_counts = {path: prod(spec.shape) for path, spec in specs.items()}
        expert_params = sum(n for path, n in param_counts.items() if path.startswith("experts."))
        return Ffn(kind.ffn, count, expert_params, sum(param_counts.values()) - expert_params)

    @property
    def expert_params(self) -> float:
        """Return the number of parameters of the experts of all layers."""
        return sum(ffn.layers * ffn.expert_params for ffn in self.ffns)

    @property
    def dense_params(self) -> float:
        """Return the number of feed-forward parameters that every token is multiplied with."""
        return sum(ffn.layers * ffn.dense_params for ffn in self.ffns)

    @property
    def active_params(self) -> float:
        """Return the number of feed-forward parameters that one token is multiplied with."""
        return sum(ffn.layers * (ffn.dense_params + ffn.active_params) for ffn in self.ffns)

    @cached_property
    def pair_flops(self) -> int:
        """Return the operations for a query and a key in all layers."""
        return sum(mixer.pair_flops for kind in self.config.layers for mixer in kind.mixers)

    @cached_property
    def cached_token_bytes(self) -> float:
        """Return the bytes of a token in the cache."""
        return self.key_element_bytes * sum(map(cached_elements_per_token, self.config.layers))

    def ridge_point(self, peaks: Peaks) -> float:
        """Return the smallest feed-forward batch, in tokens, that computes as long as it reads all
        weights."""
        return (
            peaks.flops16
            / peaks.bandwidth
            * self.param_bytes
            / 2
            * (self.expert_params + self.dense_params)
            / self.active_params
        )

    def attention_demand(self, rows: float, context: int) -> Demand:
        """Return the work of all attention halves and of the head, for rows of one device."""
        read = self.param_bytes * self.attention_params + rows * context * self.cached_token_bytes
        return Demand(rows * (2 * self.attention_params + context * self.pair_flops), read)

    def ffn_demand(self, tokens: float, devices: int, replicates_dense: bool) -> Demand:
        """Return the work of all feed-forward layers for `tokens` tokens on one of `devices` devices. Experts
        are split over the devices. The rest is on each device that attends (`replicates_dense`), or split
        too."""
        read_experts = sum(ffn.layers * ffn.num_read_params(tokens) for ffn in self.ffns)
        read = read_experts / devices + self.dense_params / (1 if replicates_dense else devices)
        return Demand(2 * self.active_params * tokens / devices, self.param_bytes * read)

    def sent_bytes(self, rows: float, devices: int) -> float:
        """Return the bytes that a device sends for its rows in all layers, and receives back. A row goes once
        to each device that has one of its experts."""
        copies = sum(ffn.layers * min(ffn.experts_per_token, devices) for ffn in self.ffns)
        return rows * self.config.hidden_size * SENT_ELEMENT_BYTES * copies


class Decode(NamedTuple):
    """Decode on several devices.

    attending: number of devices that attend.
    rows: of all devices.
    batch: tokens that feed-forward layers compute together.
    seconds: between a row's tokens.
    rate: tokens a second of a device.
    """

    attending: int
    rows: int
    batch: int
    seconds: float
    rate: float


@dataclass(frozen=True)
class Cluster:
    """Equal devices that decode.

    peaks: of each device.
    devices: number of devices.
    context: tokens in the cache of each row.
    limit: seconds between a row's tokens, at most.
    micro_batches: number of micro-batches that alternate between the halves.
    """

    peaks: Peaks
    devices: int
    context: int
    limit: float = 0.05
    micro_batches: int = 3

    def best_colocated_decode(self, halves: ModelHalves) -> Decode | None:
        """Return the fastest decode in which every device attends and experts are split over all
        (DeepSeek-V3, arXiv 2412.19437). Return None if it does not fit."""
        n = self.devices

        def seconds(rows: int) -> float:
            batch_demands = (
                halves.attention_demand(rows, self.context),
                halves.ffn_demand(n * rows, n, replicates_dense=True),
            )
            half_batch_demands = (
                halves.attention_demand(rows / 2, self.context),
                halves.ffn_demand(n * rows / 2, n, replicates_dense=True),
            )
            link_seconds = self._link_seconds(halves.sent_bytes(rows, n))
            overlapped = 2 * max(self._total_seconds(half_batch_demands), link_seconds / 2)
            return min(self._total_seconds(batch_demands) + link_seconds, overlapped)

        weights = halves.attention_params + halves.dense_params + halves.expert_params / n
        rows = self._max_rows(halves, weights, seconds)
        if not rows:
            return None
        return Decode(n, n * rows, n * rows, seconds(rows), rows / seconds(rows))

    def best_disaggregated_decode(self, halves: ModelHalves, attending: int | None = None) -> Decode | None:
        """Return the fastest decode in which `attending` devices attend and the others have the feed-forward
        layers. By default try every split. Return None if none fits."""
        tried = range(1, self.devices) if attending is None else [attending]
        decodes = [decode for a in tried if (decode := self._disaggregated_decode(halves, a))]
        return max(decodes, key=lambda decode: decode.rate, default=None)

    def _disaggregated_decode(self, halves: ModelHalves, attending: int) -> Decode | None:
        f, m = self.devices - attending, self.micro_batches
        if (
            halves.param_bytes * (halves.expert_params + halves.dense_params)
            > f * MEMORY_SHARE * self.peaks.memory
        ):
            return None

        def seconds(rows: int) -> float:
            return m * max(self.micro_batch_seconds(halves, attending, rows / m))

        rows = self._max_rows(halves, halves.attention_params, seconds)
        if not rows:
            return None
        return Decode(
            attending,
            attending * rows,
            round(attending * rows / m),
            seconds(rows),
            attending * rows / seconds(rows) / self.devices,
        )

    def micro_batch_seconds(
        self, halves: ModelHalves, attending: int, rows: float
    ) -> tuple[float, float, float]:
        """Return the seconds of a micro-batch of `rows` rows on each of `attending` attending devices. They
        are spent in attention, in the feed-forward layers, and on the links."""
        f = self.devices - attending
        attended, fed = (
            halves.attention_demand(rows, self.context),
            halves.ffn_demand(attending * rows, f, replicates_dense=False),
        )
        sent = halves.sent_bytes(rows, f)
        return (
            self._total_seconds([attended]),
            self._total_seconds([fed]),
            self._link_seconds(sent * max(1, attending / f)),
        )

    def _max_rows(self, halves: ModelHalves, weights: float, seconds: Callable[[int], float]) -> int:
        """Return the most rows of an attending device. Their keys fit next to `weights` parameters, and
        `seconds` of them stay in the limit."""
        free = MEMORY_SHARE * self.peaks.memory - halves.param_bytes * weights
        fitting_rows = max(0, int(free // (self.context * halves.cached_token_bytes)))
        return bisect_right(range(1, fitting_rows + 1), self.limit, key=seconds)

    def _link_seconds(self, sent: float) -> float:
        return 2 * sent / self.peaks.link

    def _total_seconds(self, demands: Sequence[Demand]) -> float:
        return sum(demand.floor_seconds(self.peaks.flops16, self.peaks.bandwidth) for demand in demands)
