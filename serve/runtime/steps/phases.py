"""The seam `Phases`: the functions that compiled steps run. Those with a draft model or a head are in
`speculation`."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float

from ....kvcache.pages import Batch, KVCache
from ....model.config import ModelConfig
from ....model.pair import PairConfig
from ....model.transformer import Decoder, Observe
from ....sampling.accept import RULES
from . import step
from .step import Output, Slots

Result = tuple[KVCache, Slots, Output]


@runtime_checkable
class Phases(Protocol):
    """Phases of a step. The repr names everything that decides what they compute: kept programs are found by
    it."""

    @property
    def config(self) -> PairConfig: ...

    def prefill(self, params: Any, cache: KVCache, slots: Slots, batch: Batch, /) -> Result: ...

    def decode(self, params: Any, cache: KVCache, slots: Slots, batch: Batch, /) -> Result: ...

    def verify(self, params: Any, cache: KVCache, slots: Slots, batch: Batch, /) -> Result: ...


@dataclass(frozen=True)
class TargetOnly:
    """Steps of a model without a drafter on the device; `acceptance` is the rule for the host's draft tokens,
    `observe` what prefill and decode report besides."""

    target: ModelConfig
    acceptance: str = "coupled"
    observe: Observe | None = None

    @property
    def config(self) -> PairConfig:
        return PairConfig(self.target)

    def prefill(self, params: Decoder, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        return step.prefill(params, cache, slots, batch, config=self.target, observe=self.observe)

    def decode(self, params: Decoder, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        return step.decode(params, cache, slots, batch, config=self.target, observe=self.observe)

    def forward(
        self, params: Decoder, cache: KVCache, slots: Slots, batch: Batch
    ) -> tuple[KVCache, Float[Array, "B T D"]]:
        """Run a decode of one token a row, T = 1, up to the hidden states that tokens are drawn from. The
        slots stay as they are."""
        hidden, cache = step.run(params, cache, slots, step.awake(slots, batch), self.target)
        return cache, hidden

    def draw(
        self, params: Decoder, slots: Slots, batch: Batch, hidden: Float[Array, "B T D"]
    ) -> tuple[Slots, Output]:
        """Draw the tokens from the hidden states, under the masks that the slots have now."""
        return step.sampled(params, self.target, slots, step.awake(slots, batch), hidden)

    def verify(self, params: Decoder, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        rule = RULES[self.acceptance]
        return step.verify(params, cache, slots, batch, config=self.target, rule=rule)
