"""Next-token distributions of a small target and its draft, and the test that draws follow one."""

from dataclasses import dataclass
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import chdtrc

from duetto.sampling.accept import DRAFT, DraftTokens, draw_from_probs
from duetto.sampling.search import pairwise_sum

DRAWS = 100_000
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Language:
    """Next-token probabilities after every prefix, of a target (p) and a draft (q): made from a seed, zeros
    included."""

    V: int
    seed: int
    noise: float  # how far the draft is from the target; 0 is the target itself

    @cache  # noqa: B019
    def p(self, prefix: Prefix) -> np.ndarray:
        rng = np.random.default_rng((self.seed, *prefix))
        weight = rng.gamma(0.5, size=self.V).astype(np.float32)
        weight[rng.integers(self.V)] = 0
        return weight / weight.sum()

    @cache  # noqa: B019
    def q(self, prefix: Prefix) -> np.ndarray:
        rng = np.random.default_rng((self.seed + 1, *prefix))
        weight = (
            self.p(prefix) * rng.gamma(1 / max(self.noise, 1e-9), size=self.V)
            if self.noise
            else self.p(prefix)
        )
        weight = (weight + 0.1 * self.noise * rng.random(self.V)).astype(np.float32)
        return weight / weight.sum()

    @cache  # noqa: B019
    def joint(self, prefix: Prefix, length: int) -> np.ndarray:
        """The target's probability of every continuation, float64 [V] * length."""
        if length == 0:
            return np.ones(())
        after = [self.joint((*prefix, x), length - 1) for x in range(self.V)]
        return np.stack([float(w) * a for w, a in zip(self.p(prefix), after, strict=True)])


def draw_distinct(q: jax.Array, seed: jax.Array, position: jax.Array, count: int) -> DraftTokens:
    """`count` different guesses for one position, each drawn from what q leaves beside those before it."""
    tokens, real, probs = [], [], []
    for c in range(count):
        tokens.append(draw_from_probs(q, seed, position, DRAFT + c))
        real.append(jnp.any(q > 0, axis=1))
        probs.append(q)
        q = without(q, tokens[-1])
    return DraftTokens(*(jnp.stack(x, axis=1) for x in (tokens, real, probs)))


def without(q: jax.Array, token: jax.Array) -> jax.Array:
    """A distribution after one token was taken out of it; all zeros where nothing is left."""
    row = jnp.arange(q.shape[0], dtype=jnp.int32)
    rest = q.at[row, token].set(0.0)
    return rest / jnp.maximum(pairwise_sum(rest), jnp.finfo(q.dtype).tiny)


def assert_distributed(cells: np.ndarray, probabilities: np.ndarray) -> None:
    """Pearson's test over cells that expect at least five draws; the rest are one cell. Impossible ones must
    be empty."""
    counts = np.bincount(cells, minlength=probabilities.size)
    wanted = probabilities.ravel().astype(np.float64)
    expected = wanted / wanted.sum() * len(cells)
    assert not counts[expected == 0].any()
    common = expected >= 5
    observed, expected = (np.append(x[common], x[~common].sum()) for x in (counts, expected))
    statistic = np.sum((observed - expected) ** 2 / np.maximum(expected, 1e-9))
    assert chdtrc(max(1, np.count_nonzero(expected) - 1), statistic) > 1e-3
