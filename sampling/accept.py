"""Rejection acceptance of guesses: other tokens than without guesses, drawn from exactly the same
distribution.

Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318) for one guess a position; where several
stand for the same position each is tried in turn against what those before it left of the target (SpecInfer,
Miao et al., arXiv 2305.09781; recursive rejection sampling, Jeon et al., arXiv 2402.14160). The target is
what `sample` draws from, after every sampling parameter; a greedy row's is its one token.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from ..model.tree import pytree
from .noise import gumbel, uniform
from .params import NO_LOGPROBS
from .sample import Sampled, edited, narrowed, rows_of, sample, scored, who_wants
from .search import argmax_here, pairwise_sum, whole
from .state import MASKED, SamplingState

# Independent random numbers of one position; `sample` draws from the position's own key.
ACCEPT, RESAMPLE, DRAFT = 1, 2, 3
NONE_KEPT = -1  # where the number of the guess that was kept would stand


@pytree
class DraftTokens:
    """Draft tokens for one position of each row, in the order in which they are tried.

    `probs`: distribution that each was drawn from, given those before it; None for drafts without randomness.
    """

    token: Any  # int32 [B,guesses]
    real: Any  # bool [B,guesses], False where there is no guess
    probs: Any = None  # float32 [B,guesses,V]


# ---------------------------------------------------------------- the two rules


@runtime_checkable
class Rule(Protocol):
    """Acceptance rule: returns the token at a position of each row, and the index of the accepted draft
    token, or NONE_KEPT."""

    def __call__(
        self,
        logits: Float[Array, "B V"],
        position: Int[Array, " B"],
        slot: Int[Array, " B"],
        live: Bool[Array, " B"],
        state: SamplingState,
        guesses: DraftTokens,
    ) -> tuple[Sampled, Int[Array, " B"]]: ...


def coupled(
    logits: Float[Array, "B V"],
    position: Int[Array, " B"],
    slot: Int[Array, " B"],
    live: Bool[Array, " B"],
    state: SamplingState,
    guesses: DraftTokens,
) -> tuple[Sampled, Int[Array, " B"]]:
    """The token that is sampled without guesses; those of a tree are looked up."""
    drawn = sample(logits, position, slot, live, state)
    right = guesses.real & (guesses.token == drawn.token[:, None])
    return drawn, first_of(right)


def first_of(kept: Bool[Array, "B guesses"]) -> Int[Array, " B"]:
    """Which guess is the first that was kept, or NONE_KEPT."""
    return jnp.where(jnp.any(kept, axis=1), jnp.argmax(kept, axis=1).astype(jnp.int32), NONE_KEPT)


def rejection(
    logits: Float[Array, "B V"],
    position: Int[Array, " B"],
    slot: Int[Array, " B"],
    live: Bool[Array, " B"],
    state: SamplingState,
    guesses: DraftTokens,
) -> tuple[Sampled, Int[Array, " B"]]:
    """A guess or another token, distributed as the one that is sampled without guesses."""
    p = target_probs(logits, position, slot, live, state)
    token, kept = decide(p, guesses, state.knobs.seed[slot], position)
    wanted = live & (state.knobs.logprobs[slot] != NO_LOGPROBS)
    return scored(logits.astype(jnp.float32), token, wanted, state.n_top), kept


RULES: dict[str, Rule] = {"coupled": coupled, "rejection": rejection}

# ---------------------------------------------------------------- the target


def target_probs(
    logits: Float[Array, "B V"],
    position: Int[Array, " B"],
    slot: Int[Array, " B"],
    live: Bool[Array, " B"],
    state: SamplingState,
) -> Float[Array, "B V"]:
    """The distribution of the token that `sample` draws from; its bits do not depend on B."""
    rows = rows_of(position, slot, live, state)
    wanted = who_wants(rows)
    x = edited(whole(logits.astype(jnp.float32)), rows, wanted)
    likeliest = jax.nn.one_hot(argmax_here(x), x.shape[1], dtype=jnp.float32)
    drawn = wanted["draw"]
    return jax.lax.cond(
        jnp.any(drawn),
        lambda x, r: jnp.where(drawn[:, None], normalised(jnp.exp(narrowed(x, r, wanted))), likeliest),
        lambda x, r: likeliest,
        x,
        rows,
    )


def normalised(weight: Float[Array, "B V"]) -> Float[Array, "B V"]:
    return weight / pairwise_sum(weight)


# ---------------------------------------------------------------- the rule


def acceptance(p: Float[Array, "B V"], q: Float[Array, "B V"], token: Int[Array, " B"]) -> Float[Array, " B"]:
    """The probability of keeping a token that was drawn from q where p is wanted: min(1, p/q)."""
    wanted, offered = (jnp.take_along_axis(x, token[:, None], axis=1)[:, 0] for x in (p, q))
    return jnp.where(offered > wanted, wanted / jnp.maximum(offered, jnp.finfo(q.dtype).tiny), 1.0)


def residual(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Residual distribution after a rejection, norm(max(0, p - q)); p where rounding leaves nothing."""
    rest = jnp.maximum(p - q, 0.0)
    total = pairwise_sum(rest)
    return jnp.where(total > 0, rest / jnp.maximum(total, jnp.finfo(p.dtype).tiny), p)


def offered(guesses: DraftTokens, c: int, V: int) -> Float[Array, "B V"]:
    """The distribution of guess c: its draft's, or all on the guess; nothing where there is none."""
    if guesses.probs is None:
        probs = jax.nn.one_hot(guesses.token[:, c], V, dtype=jnp.float32)
    else:
        probs = guesses.probs[:, c]
    return jnp.where(guesses.real[:, c, None], probs, 0.0)


def trials(
    p: Float[Array, "B V"], guesses: DraftTokens
) -> tuple[Float[Array, "B guesses"], Float[Array, "B V"]]:
    """The probability of keeping each guess when those before it were not kept, and what to draw from when
    none was."""
    keep = []
    for c in range(guesses.token.shape[1]):
        token = guesses.token[:, c]
        real = guesses.real[:, c]
        q = offered(guesses, c, p.shape[1])
        keep.append(jnp.where(real, acceptance(p, q, token), 0.0))
        p = jnp.where(real[:, None], residual(p, q), p)
    return jnp.stack(keep, axis=1), p


def decide(
    p: Float[Array, "B V"], guesses: DraftTokens, seed: UInt[Array, " B"], position: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """A token of each row, distributed as p, and which of its guesses it is, or NONE_KEPT.

    (seed, position) alone decides the randomness; guesses must have been drawn independently of it, as
    `draw_guess` does.
    """

    keep, rest = trials(p, guesses)
    which = first_of(uniform(seed, position, keep.shape[1], ACCEPT) < keep)
    chosen = jnp.take_along_axis(guesses.token, jnp.maximum(which, 0)[:, None], axis=1)[:, 0]
    return jnp.where(which == NONE_KEPT, draw_probs(rest, seed, position, RESAMPLE), chosen), which


# ---------------------------------------------------------------- draws


def draw_probs(
    p: Float[Array, "B V"], seed: UInt[Array, " B"], position: Int[Array, " B"], purpose: int
) -> Int[Array, " B"]:
    """A token from each row's probabilities by the Gumbel-max trick."""

    score = jnp.where(p > 0, jnp.log(p) + gumbel(seed, position, p.shape[1], purpose), MASKED)
    return argmax_here(score)


def draw_guess(
    q: Float[Array, "B V"], seed: UInt[Array, " B"], position: Int[Array, " B"]
) -> Int[Array, " B"]:
    """A draft's guess for a position, independent of how `decide` judges it."""
    return draw_probs(q, seed, position, DRAFT)
