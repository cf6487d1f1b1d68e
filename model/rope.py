"""Rotary position embeddings and the ways to stretch them to contexts longer than those of the training."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al., RoFormer, arXiv 2104.09864).

    `linear` divides every frequency by `factor`; `llama3` (Llama 3.1) divides low frequencies only and blends
    the middle; `yarn` (Peng et al., arXiv 2309.00071) blends between the dimensions that turn `beta_fast` and
    `beta_slow` times; `longrope` (Ding et al., arXiv 2402.13753) divides each frequency by a factor of its
    own, one of `long_factors` where the sequence is longer than `original_max_position`, else one of
    `short_factors`; `proportional` (Gemma 4) turns the first `share` of the pairs only.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: the blend begins and ends at whole dimensions
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    scale: float = 1.0  # of cosine and sine: yarn's and longrope's attention factor
    share: float = 1.0  # of the pairs, rounded down
    interleaved: bool = False  # a pair is two neighbours, not two halves
    # queries grow by this times the logarithm of how often their position, and `growth_from`, exceeds the
    # length of the training
    query_growth: float = 0.0
    growth_from: int = 0

    @property
    def boundary(self) -> int | None:
        """Tokens up to which a sequence has other frequencies than beyond, if any."""
        return self.original_max_position if self.kind == "longrope" else None

    def frequencies(self, H: int, long: bool = False) -> Float32[np.ndarray, " {H//2}"]:
        """Radians per position of each pair of H dimensions."""
        plain = (1.0 / self.theta ** (np.arange(0, H, 2, dtype=np.float32) / H)).astype(np.float32)
        if self.kind == "default":
            return plain
        if self.kind == "longrope":
            return (plain / np.array(self.long_factors if long else self.short_factors)).astype(np.float32)
        if self.kind == "proportional":
            turned = np.arange(H // 2) < int(self.share * H // 2)
            return np.where(turned, plain / np.float32(self.factor), 0).astype(np.float32)
        keep = self._llama3(plain) if self.kind == "llama3" else self._yarn(H) if self.kind == "yarn" else 0.0
        return ((1 - keep) * plain / self.factor + keep * plain).astype(np.float32)

    def _llama3(self, plain: Float[np.ndarray, " pairs"]) -> Float[np.ndarray, " pairs"]:
        """The share of each frequency that is kept: all of one that turns often in the original context."""
        turns = self.original_max_position * plain / (2 * np.pi)
        return np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)

    def _yarn(self, H: int) -> Float[np.ndarray, " {H//2}"]:
        def dimension(turns: float) -> float:
            return (
                H * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(self.theta))
            )

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, H - 1)
        ramp = (np.arange(H // 2, dtype=np.float32) - low) / (high - low or 0.001)
        return 1 - np.clip(ramp, 0, 1)


Angles = Float32[Array, "B T 1 pairs"]  # of every position, for each pair of dimensions


class Rotation(NamedTuple):
    """Rotation of queries and keys at each position: cosine and sine of each pair's angle, none if there are
    no pairs. `growth`: factor of the queries, or None."""

    cos: Angles
    sin: Angles
    growth: Float32[Array, "B T 1 1"] | None = None


def rotation(
    positions: Int[Array, "B T"], rope: Rope, H: int, long: Bool[Array, " B"] | None = None
) -> Rotation:
    """Rotation of H dimensions at each position. `long`: rows whose sequence is beyond the rope's
    boundary."""
    frequencies = jnp.asarray(rope.frequencies(H))[None, None, None, :]
    if rope.boundary is not None and long is not None:
        stretched = jnp.asarray(rope.frequencies(H, long=True))[None, None, None, :]
        frequencies = jnp.where(long[:, None, None, None], stretched, frequencies)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    grown = growth(positions, rope) if rope.query_growth else None
    if not H:
        return Rotation(angles, angles, grown)
    cos, sin = jax.lax.platform_dependent(
        angles,
        cpu=partial(computed_once, scale=rope.scale),
        default=partial(cosine_and_sine, scale=rope.scale),
    )
    return Rotation(cos, sin, grown)


def growth(positions: Int[Array, "B T"], rope: Rope) -> Float32[Array, "B T 1 1"]:
    """Factor by which queries grow with their position (Llama 4, and Ministral 3 after it)."""
    times = ((positions + rope.growth_from) // rope.original_max_position).astype(jnp.float32)
    return 1 + rope.query_growth * jnp.log1p(times)[..., None, None]


def cosine_and_sine(angles: Angles, scale: float) -> tuple[Angles, Angles]:
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def computed_once(angles: Angles, scale: float) -> tuple[Angles, Angles]:
    """A conditional that keeps XLA from computing both again in every layer, for each number of each head."""
    compute = partial(cosine_and_sine, scale=scale)
    return jax.lax.cond(angles.ravel()[0] >= 0, compute, compute, angles)


def rotate(
    x: Float[Array, "B T heads H"], turn: Rotation, interleaved: bool = False
) -> Float[Array, "B T heads H"]:
    """Turn the first dimensions of each head by their position's angle, as many as `turn` has pairs for.

    Pairs are (i, i + half), or neighbours where they are `interleaved`.
    """
    cos, sin = turn.cos, turn.sin
    size = 2 * cos.shape[-1]
    if not size:
        return x
    turned, rest = x[..., :size].astype(jnp.float32), x[..., size:]
    if interleaved:
        left, right = turned[..., 0::2], turned[..., 1::2]
    else:
        left, right = jnp.split(turned, 2, axis=-1)
    pair = left * cos - right * sin, right * cos + left * sin
    turned = jnp.stack(pair, -1).reshape(turned.shape) if interleaved else jnp.concatenate(pair, -1)
    return jnp.concatenate([turned.astype(x.dtype), rest], axis=-1)


def beyond(rope: Rope, lengths: Int[Array, " B"]) -> Bool[Array, " B"] | None:
    """Which rows of these lengths are past the rope's boundary; None where it has none."""
    return None if rope.boundary is None else lengths > jnp.int32(rope.boundary)
