"""Rotary position embeddings, and the ways to stretch them to contexts longer than those of the training."""

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

    `linear` divides every frequency by `factor`. `parse_llama3_rope` (Llama 3.1) divides low frequencies only
    and blends the middle. `yarn` (Peng et al., arXiv 2309.00071) blends between the dimensions that rotate
    `beta_fast` and `beta_slow` times. `parse_longrope` (Ding et al., arXiv 2402.13753) divides each frequency
    by its own
    factor: one of `long_factors` if the sequence is longer than `original_max_position`, else one of
    `short_factors`. `proportional` (Gemma 4) rotates the first `partial_rotary_factor` of the pairs only.
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
    scale: float = 1.0  # factor of cosine and sine: yarn's and longrope's attention factor
    partial_rotary_factor: float = 1.0  # share of the pairs, rounded down
    interleaved: bool = False  # a pair is two neighbours, not one of each half
    backward: bool = False  # pairs turn the other way (nanochat)
    # factor of log(1 + (position + growth_offset) // original_max_position) in the queries' growth
    query_growth: float = 0.0
    growth_offset: int = 0

    @property
    def longrope_boundary(self) -> int | None:
        """Return the sequence length, in tokens, beyond which frequencies change. None if they do not."""
        return self.original_max_position if self.kind == "longrope" else None

    def frequencies(self, H: int, long: bool = False) -> Float32[np.ndarray, " {H//2}"]:
        """Return the radians per position of each pair of H dimensions."""
        forward = self._forward_frequencies(H, long)
        return -forward if self.backward else forward

    def _forward_frequencies(self, H: int, long: bool) -> Float32[np.ndarray, " {H//2}"]:
        """Return the radians per position, above 0, of each pair of H dimensions."""
        plain = (1.0 / self.theta ** (np.arange(0, H, 2, dtype=np.float32) / H)).astype(np.float32)
        if self.kind == "default":
            return plain
        if self.kind == "longrope":
            return (plain / np.array(self.long_factors if long else self.short_factors)).astype(np.float32)
        if self.kind == "proportional":
            is_rotated = np.arange(H // 2) < int(self.partial_rotary_factor * H // 2)
            return np.where(is_rotated, plain / np.float32(self.factor), 0).astype(np.float32)
        keep = (
            self._llama3_share(plain)
            if self.kind == "llama3"
            else self._yarn_share(H)
            if self.kind == "yarn"
            else 0.0
        )
        return ((1 - keep) * plain / self.factor + keep * plain).astype(np.float32)

    def _llama3_share(self, plain: Float[np.ndarray, " pairs"]) -> Float[np.ndarray, " pairs"]:
        """Return the share of each frequency that is kept: 1 for one that rotates often in the original
        context."""
        num_rotations = self.original_max_position * plain / (2 * np.pi)
        return np.clip(
            (num_rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1
        )

    def _yarn_share(self, H: int) -> Float[np.ndarray, " {H//2}"]:
        """Return the share of each pair's frequency that is kept."""

        def find_dimension(num_rotations: float) -> float:
            return (
                H
                * math.log(self.original_max_position / (num_rotations * 2 * math.pi))
                / (2 * math.log(self.theta))
            )

        low, high = find_dimension(self.beta_fast), find_dimension(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, H - 1)
        ramp = (np.arange(H // 2, dtype=np.float32) - low) / (high - low or 0.001)
        return 1 - np.clip(ramp, 0, 1)


def alibi_slopes(num_heads: int, steepest: float) -> tuple[float, ...]:
    """Return each head's slope of ALiBi (Press et al., arXiv 2108.12409): by how much a key's score falls
    with each position before the query's.

    They are powers of two, the last one `-steepest`. Heads beyond a power of two get those between, from the
    second on.
    """
    whole = 2 ** math.floor(math.log2(num_heads))
    exponents = [*range(2, 2 * whole + 1, 2), *range(1, 2 * whole, 2)][:num_heads]
    return tuple(2.0 ** (-steepest * exponent / (2 * whole)) for exponent in exponents)


Angles = Float32[Array, "B T 1 pairs"]  # of each position and pair of dimensions


class RotaryFactors(NamedTuple):
    """Rotation of queries and keys at each position.

    cos, sin: cosine and sine of each pair's angle. Empty if there are no pairs.
    growth: factor of the queries, or None.
    """

    cos: Angles
    sin: Angles
    growth: Float32[Array, "B T 1 1"] | None = None


def rotary_factors(
    positions: Int[Array, "B T"], rope: Rope, H: int, long: Bool[Array, " B"] | None = None
) -> RotaryFactors:
    """Return the rotation of H dimensions at each position. `long`: rows whose sequence is beyond the rope's
    boundary."""
    frequencies = jnp.asarray(rope.frequencies(H))[None, None, None, :]
    if rope.longrope_boundary is not None and long is not None:
        stretched = jnp.asarray(rope.frequencies(H, long=True))[None, None, None, :]
        frequencies = jnp.where(long[:, None, None, None], stretched, frequencies)
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    query_growth = compute_query_growth(positions, rope) if rope.query_growth else None
    if not H:
        return RotaryFactors(angles, angles, query_growth)
    cos, sin = jax.lax.platform_dependent(
        angles,
        cpu=partial(cosine_and_sine_unfused, scale=rope.scale),
        default=partial(cosine_and_sine, scale=rope.scale),
    )
    return RotaryFactors(cos, sin, query_growth)


def compute_query_growth(positions: Int[Array, "B T"], rope: Rope) -> Float32[Array, "B T 1 1"]:
    """Return the factor by which queries grow with their position (Llama 4, and Ministral 3 after it)."""
    times = ((positions + rope.growth_offset) // rope.original_max_position).astype(jnp.float32)
    return 1 + rope.query_growth * jnp.log1p(times)[..., None, None]


def apply_query_growth(q: Float[Array, "B T N H"], rotary: RotaryFactors | None) -> Float[Array, "B T N H"]:
    """Scale queries by the growth of their positions (Llama 4), if there is one."""
    return q if rotary is None or rotary.growth is None else q * rotary.growth.astype(q.dtype)


def cosine_and_sine(angles: Angles, scale: float) -> tuple[Angles, Angles]:
    """Return the cosine and sine of angles, scaled."""
    return jnp.cos(angles) * scale, jnp.sin(angles) * scale


def cosine_and_sine_unfused(angles: Angles, scale: float) -> tuple[Angles, Angles]:
    """Return cosine and sine, within a conditional that keeps XLA from fusing them into every layer.

    Fused, both would be computed again in every layer, for each number of each head.
    """
    compute = partial(cosine_and_sine, scale=scale)
    return jax.lax.cond(angles.ravel()[0] >= 0, compute, compute, angles)


def rotate_heads(
    x: Float[Array, "B T heads H"], rotary: RotaryFactors, interleaved: bool = False
) -> Float[Array, "B T heads H"]:
    """Rotate the first dimensions of each head by their position's angle, as many as there are pairs for.

    Pairs are (i, i + half), or neighbours if `interleaved`.
    """
    cos, sin = rotary.cos, rotary.sin
    size = 2 * cos.shape[-1]
    if not size:
        return x
    rotated, rest = x[..., :size].astype(jnp.float32), x[..., size:]
    if interleaved:
        left, right = rotated[..., 0::2], rotated[..., 1::2]
    else:
        left, right = jnp.split(rotated, 2, axis=-1)
    pair = left * cos - right * sin, right * cos + left * sin
    rotated = jnp.stack(pair, -1).reshape(rotated.shape) if interleaved else jnp.concatenate(pair, -1)
    return jnp.concatenate([rotated.astype(x.dtype), rest], axis=-1)


def rows_past_boundary(rope: Rope, lengths: Int[Array, " B"]) -> Bool[Array, " B"] | None:
    """Return which rows of these lengths are past the rope's boundary, or None if it has none."""
    return None if rope.longrope_boundary is None else lengths > jnp.int32(rope.longrope_boundary)
