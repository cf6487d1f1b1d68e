"""Embeddings of texts: the hidden states of a prompt's tokens, pooled."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..refusals import quote
from .tree import pytree

Pooling = Literal["last", "mean"]

# Sums are of integers: their bits do not depend on a prompt's chunks.
FIXED_POINT_UNIT = 2.0**17  # 1.0 in fixed point: resolves hidden states to 8e-6
MAX_FIXED_POINT = 2.0**29  # in fixed point: hidden states up to 4096
LOW_BITS = 14  # bits of a number's lower part: 2^16 parts add up to less than 2^31


@dataclass(frozen=True)
class PoolingParams:
    """Parameters of an embedding.

    pooling: the hidden state of the "last" token or the "mean" of all. None: the model's own, else last.
    dimensions: number of the embedding's numbers that are kept, the first ones. None: all.
    normalize: True to scale the embedding to length 1.

    Raises ValueError naming the field, its value and what is allowed.
    """

    dimensions: int | None = None
    normalize: bool = True
    pooling: Pooling | None = None

    def __post_init__(self):
        if self.pooling is not None and self.pooling not in get_args(Pooling):
            raise ValueError(f"pooling {quote(self.pooling)} is not allowed: 'last' or 'mean'")
        if type(self.normalize) is not bool:
            raise ValueError(f"normalize {quote(self.normalize)} is not allowed: True or False")
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise ValueError(f"dimensions {quote(self.dimensions)} is not allowed: 1 or more")


@pytree
class Pooled:
    """Pooled hidden states of a step's rows.

    last: hidden state of the last token, float32 [B,D]. NaN if a token has a number that is NaN or infinite.
    high, low: upper and lower bits of the sum over tokens in fixed point, int32 [B,D].
    """

    last: Any
    high: Any
    low: Any


def pool_hidden_states(hidden: Float[Array, "B T D"], count: Int[Array, " B"]) -> Pooled:
    """Pool each row's first `count` hidden states."""
    B, T = hidden.shape[:2]
    assert T < 1 << 16, T
    hidden = hidden.astype(jnp.float32)
    fixed = jnp.round(jnp.clip(hidden * FIXED_POINT_UNIT, -MAX_FIXED_POINT, MAX_FIXED_POINT)).astype(
        jnp.int32
    )
    is_real = jnp.arange(T)[None, :, None] < count[:, None, None]
    fixed = jnp.where(is_real, fixed, 0)
    is_finite = jnp.all(jnp.isfinite(hidden) | ~is_real, axis=(1, 2))
    last = jnp.where(is_finite[:, None], hidden[jnp.arange(B), jnp.maximum(count - 1, 0)], jnp.nan)
    return Pooled(last, jnp.sum(fixed >> LOW_BITS, axis=1), jnp.sum(fixed & (1 << LOW_BITS) - 1, axis=1))


@dataclass(eq=False)
class Pooler:
    """Pooled hidden states of one prompt, whose chunks arrive in order.

    params: parameters of the embedding, with `pooling` set.
    length: tokens of the prompt.
    has_nan: True if a hidden state has a number that is NaN or infinite.
    """

    params: PoolingParams
    length: int
    has_nan: bool = False
    _vector: Float[np.ndarray, " D"] | None = None  # None before the whole prompt is read

    @property
    def needs_all_tokens(self) -> bool:
        """Return True if every token must be computed, also one whose keys are cached."""
        return self.params.pooling == "mean"

    @property
    def embedding(self) -> Float[np.ndarray, " D"] | None:
        """Return the embedding, or None before the whole prompt is read.

        It may be cut to its first numbers (Matryoshka representations, Kusupati et al., arXiv 2205.13147).
        """
        if self._vector is None:
            return None
        cut = self._vector[: self.params.dimensions].astype(np.float64)
        length = np.linalg.norm(cut) if self.params.normalize else 1.0
        return (cut / max(length, 1e-12)).astype(np.float32)

    def add_chunk(self, pooled: Pooled, row: int, start: int, end: int) -> None:
        """Add row `row` of a step, which holds the prompt's tokens from `start` to `end`."""
        self.has_nan = self.has_nan or bool(np.isnan(np.asarray(pooled.last)[row]).any())
        if self.needs_all_tokens:
            self._add_sums(np.asarray(pooled.high)[row], np.asarray(pooled.low)[row], start)
        if end == self.length:
            self._vector = (
                self._compute_mean() if self.needs_all_tokens else np.asarray(pooled.last)[row].copy()
            )

    def _add_sums(self, high: Int[np.ndarray, " D"], low: Int[np.ndarray, " D"], start: int) -> None:
        """Add a chunk's sums, or begin again at the prompt's start."""
        chunk_sum = (high.astype(np.int64) << LOW_BITS) + low
        self._sum = chunk_sum if start == 0 else self._sum + chunk_sum

    def _compute_mean(self) -> Float[np.ndarray, " D"]:
        """Return the mean of all tokens' hidden states."""
        return (self._sum / (FIXED_POINT_UNIT * self.length)).astype(np.float32)
