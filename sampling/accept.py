"""Rejection sampling of draft tokens: other tokens than without drafts, but drawn from exactly the same
distribution.

Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318) describe it for one draft token per
position. Several draft tokens for a position are tried one after the other. Each meets what the earlier ones
left of the target (SpecInfer, Miao et al., arXiv 2305.09781; recursive rejection sampling, Jeon et al., arXiv
2402.14160). The target is what `sample` draws from, after every sampling parameter; a greedy row's is its one
token.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from ..model.tree import pytree
from .noise import gumbel, uniform
from .params import NAN_TOKEN
from .sample import (
    Sampled,
    edit_logits,
    find_rows_by_stage,
    gather_sampling_rows,
    narrow_logits,
    sample,
    score_sampled,
)
from .search import argmax_unsharded, gather_vocab, pairwise_sum
from .state import MASKED, SamplingState

# Purposes of independent random numbers at one position. `sample` uses the position's key without a purpose.
ACCEPT, RESAMPLE, DRAFT = 1, 2, 3
NONE_ACCEPTED = -1  # in place of the number of the accepted draft token


@pytree
class DraftTokens:
    """Draft tokens for one position of each row, in the order in which they are tried.

    token: draft tokens [B,guesses]
    is_valid: False where there is no draft token
    probs: distribution from which each was drawn, given the earlier ones; None for drafts without randomness
    """

    token: Any  # int32 [B,guesses]
    is_valid: Any  # bool [B,guesses]
    probs: Any = None  # float32 [B,guesses,V]


# ---------------------------------------------------------------- the two rules


@runtime_checkable
class AcceptanceRule(Protocol):
    """Acceptance rule. Returns the token at a position of each row, and the number of the accepted draft
    token, or `NONE_ACCEPTED`."""

    def __call__(
        self,
        logits: Float[Array, "B V"],
        position: Int[Array, " B"],
        slot: Int[Array, " B"],
        live: Bool[Array, " B"],
        state: SamplingState,
        drafts: DraftTokens,
    ) -> tuple[Sampled, Int[Array, " B"]]: ...


def accept_coupled(
    logits: Float[Array, "B V"],
    position: Int[Array, " B"],
    slot: Int[Array, " B"],
    live: Bool[Array, " B"],
    state: SamplingState,
    drafts: DraftTokens,
) -> tuple[Sampled, Int[Array, " B"]]:
    """Sample as without drafts, and accept the draft token that equals the sampled token."""
    drawn = sample(logits, position, slot, live, state)
    accepted = drafts.is_valid & (drafts.token == drawn.token[:, None])
    return drawn, first_accepted(accepted)


def first_accepted(accepted: Bool[Array, "B guesses"]) -> Int[Array, " B"]:
    """Return the number of the first accepted draft token of each row, or `NONE_ACCEPTED`."""
    return jnp.where(jnp.any(accepted, axis=1), jnp.argmax(accepted, axis=1).astype(jnp.int32), NONE_ACCEPTED)


def accept_by_rejection(
    logits: Float[Array, "B V"],
    position: Int[Array, " B"],
    slot: Int[Array, " B"],
    live: Bool[Array, " B"],
    state: SamplingState,
    drafts: DraftTokens,
) -> tuple[Sampled, Int[Array, " B"]]:
    """Accept a draft token or draw another token, distributed as a token that is sampled without drafts."""
    p = target_probs(logits, position, slot, live, state)
    token, accepted = accept_or_resample(p, drafts, state.knobs.seed[slot], position)
    is_nan = jnp.isnan(p[:, 0])
    token, accepted = jnp.where(is_nan, NAN_TOKEN, token), jnp.where(is_nan, NONE_ACCEPTED, accepted)
    rows = gather_sampling_rows(position, slot, live, state)
    return score_sampled(logits.astype(jnp.float32), token, rows, find_rows_by_stage(rows)), accepted


RULES: dict[str, AcceptanceRule] = {"coupled": accept_coupled, "rejection": accept_by_rejection}

# ---------------------------------------------------------------- the target


def target_probs(
    logits: Float[Array, "B V"],
    position: Int[Array, " B"],
    slot: Int[Array, " B"],
    live: Bool[Array, " B"],
    state: SamplingState,
) -> Float[Array, "B V"]:
    """Return the distribution that `sample` draws from; its bits do not depend on B. NaN where `sample`
    returns NAN_TOKEN."""
    rows = gather_sampling_rows(position, slot, live, state)
    rows_by_stage = find_rows_by_stage(rows)
    x = edit_logits(gather_vocab(logits.astype(jnp.float32)), rows, rows_by_stage)
    first = argmax_unsharded(x)
    likeliest = jax.nn.one_hot(first, x.shape[1], dtype=jnp.float32)
    drawn = rows_by_stage["draw"]
    probs = jax.lax.cond(
        jnp.any(drawn),
        lambda x, r: jnp.where(
            drawn[:, None], normalise_weights(jnp.exp(narrow_logits(x, r, rows_by_stage))), likeliest
        ),
        lambda x, r: likeliest,
        x,
        rows,
    )
    return jnp.where((first == NAN_TOKEN)[:, None], jnp.nan, probs)


def normalise_weights(weight: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Divide each row by its sum."""
    return weight / pairwise_sum(weight)


# ---------------------------------------------------------------- acceptance


def acceptance_probs(
    p: Float[Array, "B V"], q: Float[Array, "B V"], token: Int[Array, " B"]
) -> Float[Array, " B"]:
    """Return the probability of accepting a token that was drawn from q when the target is p: min(1, p/q)."""
    target_prob, draft_prob = (jnp.take_along_axis(x, token[:, None], axis=1)[:, 0] for x in (p, q))
    return jnp.where(
        draft_prob > target_prob, target_prob / jnp.maximum(draft_prob, jnp.finfo(q.dtype).tiny), 1.0
    )


def residual_probs(p: Float[Array, "B V"], q: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Return the distribution after a rejection, norm(max(0, p - q)); p where rounding leaves nothing."""
    rest = jnp.maximum(p - q, 0.0)
    total = pairwise_sum(rest)
    return jnp.where(total > 0, rest / jnp.maximum(total, jnp.finfo(p.dtype).tiny), p)


def draft_probs(drafts: DraftTokens, c: int, V: int) -> Float[Array, "B V"]:
    """Return the distribution of draft token c: the draft model's probabilities, or all on the token. Zeros
    where there is no draft token."""
    if drafts.probs is None:
        probs = jax.nn.one_hot(drafts.token[:, c], V, dtype=jnp.float32)
    else:
        probs = drafts.probs[:, c]
    return jnp.where(drafts.is_valid[:, c, None], probs, 0.0)


def sequential_acceptance_probs(
    p: Float[Array, "B V"], drafts: DraftTokens
) -> tuple[Float[Array, "B guesses"], Float[Array, "B V"]]:
    """Return the probability of accepting each draft token if the earlier ones were rejected, and the
    distribution to draw from if all were."""
    keep_probs = []
    for c in range(drafts.token.shape[1]):
        token = drafts.token[:, c]
        real = drafts.is_valid[:, c]
        q = draft_probs(drafts, c, p.shape[1])
        keep_probs.append(jnp.where(real, acceptance_probs(p, q, token), 0.0))
        p = jnp.where(real[:, None], residual_probs(p, q), p)
    return jnp.stack(keep_probs, axis=1), p


def accept_or_resample(
    p: Float[Array, "B V"], drafts: DraftTokens, seed: UInt[Array, " B"], position: Int[Array, " B"]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Return a token of each row, distributed as p, and the number of its draft token, or `NONE_ACCEPTED`.

    Randomness depends on (seed, position) alone. Draft tokens must be drawn independently of it, as
    `draw_draft` does.
    """

    keep_probs, rest = sequential_acceptance_probs(p, drafts)
    accepted = first_accepted(uniform(seed, position, keep_probs.shape[1], ACCEPT) < keep_probs)
    chosen = jnp.take_along_axis(drafts.token, jnp.maximum(accepted, 0)[:, None], axis=1)[:, 0]
    return jnp.where(
        accepted == NONE_ACCEPTED, draw_from_probs(rest, seed, position, RESAMPLE), chosen
    ), accepted


# ---------------------------------------------------------------- draws


def draw_from_probs(
    p: Float[Array, "B V"], seed: UInt[Array, " B"], position: Int[Array, " B"], purpose: int
) -> Int[Array, " B"]:
    """Draw a token from each row's probabilities by the Gumbel-max trick."""

    score = jnp.where(p > 0, jnp.log(p) + gumbel(seed, position, p.shape[1], purpose), MASKED)
    return argmax_unsharded(score)


def draw_draft(
    q: Float[Array, "B V"], seed: UInt[Array, " B"], position: Int[Array, " B"]
) -> Int[Array, " B"]:
    """Draw a draft token for a position, independently of the random numbers of `accept_or_resample`."""
    return draw_from_probs(q, seed, position, DRAFT)
