"""The seam `Phases`: what a compiled step runs. A model alone is the plainest of them; those that guess are
in `speculation`."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float

from ....kvcache.pages import Batch, KVCache
from ....model.config import ModelConfig
from ....model.pair import PairConfig
from ....model.transformer import Decoder
from ....sampling.accept import RULES
from . import step
from .step import Output, Slots

Result = tuple[KVCache, Slots, Output]


@runtime_checkable
class Phases(Protocol):
    """The phases of a step. Its repr names everything that decides what they compute, since kept programs are
    found by it."""

    @property
    def config(self) -> PairConfig: ...

    def prefill(self, params: Any, cache: KVCache, slots: Slots, batch: Batch, /) -> Result: ...

    def decode(self, params: Any, cache: KVCache, slots: Slots, batch: Batch, /) -> Result: ...

    def verify(self, params: Any, cache: KVCache, slots: Slots, batch: Batch, /) -> Result: ...


@dataclass(frozen=True)
class TargetOnly:
    """The steps of a model that nothing on the device guesses for; `acceptance` is the rule for the host's
    guesses."""

    target: ModelConfig
    acceptance: str = "coupled"

    @property
    def config(self) -> PairConfig:
        return PairConfig(self.target)

    def prefill(self, params: Decoder, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        return step.prefill(params, cache, slots, batch, config=self.target)

    def decode(self, params: Decoder, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        return step.decode(params, cache, slots, batch, config=self.target)

    def forward(
        self, params: Decoder, cache: KVCache, slots: Slots, batch: Batch
    ) -> tuple[KVCache, Float[Array, "B T D"]]:
        """A decode of one token a row, T = 1, up to the hidden states that tokens are drawn from: the slots
        stay as they are."""
        hidden, cache = step.run(params, cache, slots, step.awake(slots, batch), self.target)
        return cache, hidden

    def draw(
        self, params: Decoder, slots: Slots, batch: Batch, hidden: Float[Array, "B T D"]
    ) -> tuple[Slots, Output]:
        """The rest of it: tokens drawn from the hidden states, under the masks that the slots have now."""
        return step.sampled(params, self.target, slots, step.awake(slots, batch), hidden)

    def verify(self, params: Decoder, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        rule = RULES[self.acceptance]
        return step.verify(params, cache, slots, batch, config=self.target, rule=rule)
