"""Embeddings of texts: the hidden states of a prompt's tokens, pooled."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..refusals import shown
from .tree import pytree

Pooling = Literal["last", "mean"]

# Sums are of whole numbers, which have the same bits in whatever chunks a prompt is read.
UNIT = 2.0**17  # of fixed point: hidden states to 8e-6
MOST = 2.0**29  # of fixed point: hidden states of 4096
LOW = 14  # bits of a number's lower half: 2^16 of them add up to less than 2^31


@dataclass(frozen=True)
class PoolingParams:
    """Parameters of an embedding. `pooling`: the hidden state of the "last" token or the "mean" of all (None:
    the model's own, else last). `dimensions`: numbers that are kept, the first ones. `normalize`: scale to
    length 1.

    Raises ValueError naming the field, its value and what is allowed.
    """

    dimensions: int | None = None
    normalize: bool = True
    pooling: Pooling | None = None

    def __post_init__(self):
        if self.pooling is not None and self.pooling not in get_args(Pooling):
            raise ValueError(f"pooling {shown(self.pooling)} is not allowed: 'last' or 'mean'")
        if type(self.normalize) is not bool:
            raise ValueError(f"normalize {shown(self.normalize)} is not allowed: True or False")
        if self.dimensions is not None and (type(self.dimensions) is not int or self.dimensions < 1):
            raise ValueError(f"dimensions {shown(self.dimensions)} is not allowed: 1 or more")


@pytree
class Pooled:
    """Pooled hidden states of a step's rows. `last`: of the last token, float32 [B,D]. `high` and `low`:
    upper and lower bits of the sum over tokens in fixed point, int32 [B,D]."""

    last: Any
    high: Any
    low: Any


def pool(hidden: Float[Array, "B T D"], count: Int[Array, " B"]) -> Pooled:
    """Pool each row's first `count` hidden states."""
    B, T = hidden.shape[:2]
    assert T < 1 << 16, T
    hidden = hidden.astype(jnp.float32)
    fixed = jnp.round(jnp.clip(hidden * UNIT, -MOST, MOST)).astype(jnp.int32)
    fixed = jnp.where(jnp.arange(T)[None, :, None] < count[:, None, None], fixed, 0)
    last = hidden[jnp.arange(B), jnp.maximum(count - 1, 0)]
    return Pooled(last, jnp.sum(fixed >> LOW, axis=1), jnp.sum(fixed & (1 << LOW) - 1, axis=1))


@dataclass(eq=False)
class Pooler:
    """The hidden states of a prompt of `length` tokens, as its chunks come in order; the pooling of `params`
    is settled."""

    params: PoolingParams
    length: int
    _vector: Float[np.ndarray, " D"] | None = None  # once the prompt is read

    @property
    def is_whole(self) -> bool:
        """True if every token has to be computed, also one whose keys are cached."""
        return self.params.pooling == "mean"

    @property
    def embedding(self) -> Float[np.ndarray, " D"] | None:
        """Once the prompt is read. It may be cut (Matryoshka representations, Kusupati et al.,
        arXiv 2205.13147)."""
        if self._vector is None:
            return None
        cut = self._vector[: self.params.dimensions].astype(np.float64)
        length = np.linalg.norm(cut) if self.params.normalize else 1.0
        return (cut / max(length, 1e-12)).astype(np.float32)

    def take(self, pooled: Pooled, row: int, start: int, end: int) -> None:
        """Take in a step's row, which holds the prompt's tokens from `start` to `end`."""
        if self.is_whole:
            self._add(np.asarray(pooled.high)[row], np.asarray(pooled.low)[row], start)
        if end == self.length:
            self._vector = self._mean() if self.is_whole else np.asarray(pooled.last)[row].copy()

    def _add(self, high: Int[np.ndarray, " D"], low: Int[np.ndarray, " D"], start: int) -> None:
        new = (high.astype(np.int64) << LOW) + low
        self._sum = new if start == 0 else self._sum + new

    def _mean(self) -> Float[np.ndarray, " D"]:
        return (self._sum / (UNIT * self.length)).astype(np.float32)
