"""What a decoder is before it has weights: sizes and kinds. Frozen and hashable, so it is static under jit."""

from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864) and its stretching to long contexts.

    `linear` divides every frequency by `factor`; `llama3` (Llama 3.1) divides low frequencies only and blends the middle.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def frequencies(self, H: int) -> np.ndarray:
        """Radians per position of each pair of dimensions, float32 [H/2]."""
        plain = (1.0 / self.theta ** (np.arange(0, H, 2, dtype=np.float32) / H)).astype(np.float32)
        if self.kind == "default":
            return plain
        if self.kind == "linear":
            return (plain / self.factor).astype(np.float32)
        turns = self.original_max_position * plain / (2 * np.pi)
        width = self.high_freq_factor - self.low_freq_factor
        blend = np.clip((turns - self.low_freq_factor) / width, 0, 1)
        return ((1 - blend) * plain / self.factor + blend * plain).astype(np.float32)


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a decoder; the letters are those of every einsum."""

    vocab_size: int  # V
    hidden_size: int  # D
    ffn_size: int  # F
    num_layers: int  # L
    num_heads: int  # N
    num_kv_heads: int  # K
    head_size: int  # H
    max_position: int = 2048
    norm_eps: float = 1e-5
    rope: Rope = Rope()
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size {self.head_size} is odd; rotary embeddings need pairs of dimensions")
