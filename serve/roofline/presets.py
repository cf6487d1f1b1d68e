"""Sizes of well-known models, for plans and measurements without their weights."""

from ...model.config import ModelConfig
from ...model.rope import Rope

PRESETS = {
    "135m": ModelConfig.uniform(
        49152, 576, 1536, 30, 9, 3, 64, 8192, tied_embeddings=True, rope=Rope(100000.0)
    ),
    "0.6b": ModelConfig.uniform(
        151936, 1024, 3072, 28, 16, 8, 128, 32768, tied_embeddings=True, rope=Rope(1e6)
    ),
    "8b": ModelConfig.uniform(128256, 4096, 14336, 32, 32, 8, 128, 8192, rope=Rope(500000.0)),
}
