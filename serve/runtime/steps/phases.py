"""Protocol `Phases`: the functions that compiled steps run. Phases with a draft model or a head are in
`serve.engine.speculation`."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ....kvcache.pages import Batch, KVCache
from ....model.config import ModelConfig
from ....model.draft_pair import PairConfig
from ....model.transformer import Decoder, ObserveOptions
from ....sampling.accept import RULES
from ....sampling.sample import Sampled
from . import step
from .encoding import encode_into_pool
from .output import ForwardOutput, Output, SampleRows
from .step import Slots

PhaseResult = tuple[KVCache, Slots, Output]


@runtime_checkable
class Phases(Protocol):
    """Functions of a step, one for each phase. The repr names everything that decides what they compute:
    stored programs are found by it."""

    @property
    def config(self) -> PairConfig: ...

    def prefill(self, params: Any, cache: KVCache, slots: Slots, batch: Batch, /) -> PhaseResult: ...

    def decode(self, params: Any, cache: KVCache, slots: Slots, batch: Batch, /) -> PhaseResult: ...

    def verify(self, params: Any, cache: KVCache, slots: Slots, batch: Batch, /) -> PhaseResult: ...


@dataclass(frozen=True)
class TargetOnly:
    """Phases of a model without a drafter on the device.

    target_config: config of the model.
    acceptance: rule for the host's draft tokens.
    observe: inner values that prefill and decode report, if any.
    """

    target_config: ModelConfig
    acceptance: str = "coupled"
    observe: ObserveOptions | None = None

    @property
    def config(self) -> PairConfig:
        return PairConfig(self.target_config)

    def prefill(self, params: Decoder, cache: KVCache, slots: Slots, batch: Batch) -> PhaseResult:
        return step.prefill(params, cache, slots, batch, config=self.target_config, observe=self.observe)

    def decode(self, params: Decoder, cache: KVCache, slots: Slots, batch: Batch) -> PhaseResult:
        return step.decode(params, cache, slots, batch, config=self.target_config, observe=self.observe)

    def forward(
        self, params: Decoder, cache: KVCache, slots: Slots, batch: Batch
    ) -> tuple[KVCache, ForwardOutput]:
        """Run a prefill, or a decode of one token a row, up to its samples."""
        return step.forward_step(params, cache, slots, batch, config=self.target_config, observe=self.observe)

    def sample(self, params: Decoder, slots: Slots, rows: SampleRows) -> tuple[Slots, Sampled]:
        """Sample the rows of a forward pass, under the masks that the slots have now."""
        return step.sample_rows(params, self.target_config, slots, rows)

    def encode(self, params: Any, pool: Any, rows: Any, encoder_input: Any) -> Any:
        """Encode an input into rows of the pool of embeddings; returns the pool."""
        assert self.target_config.encoder is not None
        return encode_into_pool(self.target_config.encoder, params, pool, rows, encoder_input)

    def verify(self, params: Decoder, cache: KVCache, slots: Slots, batch: Batch) -> PhaseResult:
        rule = RULES[self.acceptance]
        return step.verify(params, cache, slots, batch, config=self.target_config, rule=rule)
