"""A model and what guesses tokens for it, side by side: the sizes of both, and the parameters of both.

The target decides on tokens. A draft model beside it has layers and keys of its own, a head has neither. A
cache and its page tables know nothing of the two: they hold the layers of both, the target's first.
"""

from dataclasses import dataclass, replace
from typing import Any

from .config import LayerKind, ModelConfig, windows_of
from .transformer import Decoder
from .tree import pytree


@dataclass(frozen=True)
class PairConfig:
    """Sizes of a model, and of a draft model if there is one."""

    target: ModelConfig
    draft: ModelConfig | None = None

    @property
    def layers(self) -> tuple[LayerKind, ...]:
        """All layers that keep keys in a cache."""
        return self.target.layers + (self.draft.layers if self.draft else ())

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of all layers, unlimited first."""
        return windows_of(self.layers)

    @property
    def block(self) -> int:
        """Alignment of a prefill's chunks, in tokens."""
        return max(config.block for config in (self.target, self.draft) if config)

    @property
    def boundary(self) -> int | None:
        """Tokens beyond which all keys of a sequence are others than before, in either model."""
        found = [config.boundary for config in (self.target, self.draft) if config and config.boundary]
        return min(found, default=None)

    def within(self, length: int) -> "PairConfig":
        """The same for sequences of at most `length` tokens."""
        return PairConfig(self.target.within(length), self.draft and self.draft.within(length))


@pytree
class Pair:
    """Parameters of a model, and of the draft model or the head that guesses for it."""

    target: Decoder
    draft: Any  # a Decoder or a Head


Params = Decoder | Pair  # what a step of an engine takes


def target_of(params: Params) -> Decoder:
    """The parameters that decide on tokens."""
    return params.target if isinstance(params, Pair) else params


def with_target(params: Params, target: Any) -> Any:
    """The same with other parameters to decide on tokens."""
    return replace(params, target=target) if isinstance(params, Pair) else target


def layers_of(params: Params) -> tuple[Any, ...]:
    """The parameters of all layers that keep keys, in the order of `PairConfig.layers`."""
    if isinstance(params, Decoder):
        return params.layers
    return params.target.layers + (params.draft.layers if isinstance(params.draft, Decoder) else ())
