"""A target model and its drafter, side by side: the sizes of both, and the parameters of both.

The target decides on tokens. A draft model has layers and keys of its own; a draft head has neither. A cache
and its page tables do not distinguish the two: they hold the layers of both, the target's first.
"""

from dataclasses import dataclass, replace
from typing import Any

from .config import LayerKind, ModelConfig, distinct_windows
from .transformer import Decoder
from .tree import pytree


@dataclass(frozen=True)
class PairConfig:
    """Sizes of a target model, and of a draft model or None."""

    target: ModelConfig
    draft: ModelConfig | None = None

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """Return all layers that have a cache: the target's, then the draft model's."""
        return self.target.layers + (self.draft.layers if self.draft else ())

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the different windows of all layers, unlimited first."""
        return distinct_windows(self.layers)

    @property
    def prefill_alignment(self) -> int:
        """Return the alignment of a prefill's chunks, in tokens."""
        return max(config.prefill_alignment for config in (self.target, self.draft) if config)

    @property
    def longrope_boundary(self) -> int | None:
        """Return the sequence length, in tokens, beyond which longrope changes all keys of either model, or
        None."""
        boundaries = [
            config.longrope_boundary
            for config in (self.target, self.draft)
            if config and config.longrope_boundary
        ]
        return min(boundaries, default=None)

    def drop_unreached_limits(self, length: int) -> "PairConfig":
        """Drop limits that cannot take effect within `length` tokens from both models, as
        `ModelConfig.drop_unreached_limits`."""
        return PairConfig(
            self.target.drop_unreached_limits(length), self.draft and self.draft.drop_unreached_limits(length)
        )


@pytree
class Pair:
    """Parameters of a target model, and of the draft model or draft head."""

    target: Decoder
    draft: Any  # a Decoder or a DraftHead


EngineParams = Decoder | Pair  # of a step of an engine


def target_params(params: EngineParams) -> Decoder:
    """Return the parameters of the target model."""
    return params.target if isinstance(params, Pair) else params


def with_target(params: EngineParams, target: Any) -> Any:
    """Return the parameters with another target model."""
    return replace(params, target=target) if isinstance(params, Pair) else target


def all_layers(params: EngineParams) -> tuple[Any, ...]:
    """Return the parameters of all layers that have a cache, in the order of `PairConfig.layers`."""
    if isinstance(params, Decoder):
        return params.layers
    return params.target.layers + (params.draft.layers if isinstance(params.draft, Decoder) else ())
