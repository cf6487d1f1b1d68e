"""Sizes of the per-layer inputs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..config import Activation


@dataclass(frozen=True)
class LayerInput:
    """Every layer is given `size` numbers of its own that follow from the token, and from its embedding
    (Gemma 3n and 4)."""

    size: int  # P
    vocab_size: int  # V of their embedding
    activation: "Activation" = "gelu_tanh"
