"""From logits to tokens: one small function a parameter, each an exact identity on the rows that do not use
it.

Order and meaning are vLLM's: bias, bad words, min_tokens, grammar, penalties, temperature, min_p, top_k,
top_p, draw. A row's token is a function of its logits, knobs, history and position alone: neighbours only
decide what is computed for nothing. What no row wants is not computed, so a greedy batch pays for an argmax.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num, UInt

from ..model.scatter import apart, first_of_each
from ..model.tree import pytree
from .checks import MAX_LOGPROBS
from .params import NO_LOGPROBS, NO_TOKEN, Knobs
from .search import argmax, argmax_here, by_digits, by_halves, fixed_point, largest, pairwise_sum, whole
from .state import BANNED, EARLY, MASKED, SamplingState

LARGE = 1024.0  # a number beside which float32 loses what distinguishes logits


@pytree
class Scores:
    """Tokens as the unprocessed logits see them: log-probability, rank (1 is the likeliest; equal logits
    share the larger rank), and the likeliest tokens with theirs, padded with NO_TOKEN where the vocabulary is
    smaller."""

    logprob: Any  # float32 [B]
    rank: Any  # int32 [B]
    top_ids: Any  # int32 [B,n_top]
    top_logprobs: Any  # float32 [B,n_top]


@pytree
class Sampled:
    """Tokens, and their scores as in `Scores`; the scores of a slot that wants none are arbitrary."""

    token: Any  # int32 [B]
    logprob: Any  # float32 [B]
    rank: Any  # int32 [B]
    top_ids: Any  # int32 [B,n_top]
    top_logprobs: Any  # float32 [B,n_top]


Wants = Callable[["SamplingRows"], Bool[Array, " B"]]  # which rows use a parameter
Change = Callable[[Float[Array, "B V"], "SamplingRows"], Float[Array, "B V"]]  # what it does to logits
Changes = Sequence[tuple[Wants, Change]]


@pytree
class SamplingRows:
    """What the functions of this file may read beside the logits. The state stays by slot: its dense rows are
    gathered (`rows.state.bias[rows.slot]`) only where they are needed."""

    knobs: Knobs  # of each row
    position: Any  # int32 [B], of the token that is being chosen
    live: Any  # bool [B]
    slot: Any  # int32 [B]
    state: SamplingState


def sample(
    logits: Float[Array, "B V"],
    position: Int[Array, " B"],
    slot: Int[Array, " B"],
    live: Bool[Array, " B"],
    state: SamplingState,
) -> Sampled:
    """The token of each row for `position`, by the knobs and history of `slot`; of a dead row any."""
    logits = logits.astype(jnp.float32)
    rows = SamplingRows(jax.tree.map(lambda x: x[slot], state.knobs), position, live, slot, state)
    token = jax.lax.cond(jnp.any(wants_choice(rows)), choose, lambda x, _: argmax(x), logits, rows)
    return scored(logits, token, live & (rows.knobs.logprobs != NO_LOGPROBS), state.n_top)


def scored(
    logits: Float[Array, "B V"], token: Int[Array, " B"], wanted: Bool[Array, " B"], n_top: int
) -> Sampled:
    """Chosen tokens with their scores, which are only computed where a row wants its own."""
    some = partial(score, n_top=n_top)
    x = jax.lax.cond(jnp.any(wanted), some, lambda x, _: no_scores(x.shape[0], n_top), logits, token)
    return Sampled(token, x.logprob, x.rank, x.top_ids, x.top_logprobs)


# ---------------------------------------------------------------- scores


def score(logits: Float[Array, "B V"], targets: Int[Array, " B"], n_top: int = MAX_LOGPROBS) -> Scores:
    """Scores of the given tokens, and the `n_top` likeliest beside them."""
    logits = whole(logits.astype(jnp.float32))
    top = jnp.max(logits, axis=-1, keepdims=True)
    log_total = jnp.log(pairwise_sum(jnp.exp(logits - top)))
    own = jnp.take_along_axis(logits, targets[:, None], axis=1)
    values, ids = largest(logits, min(n_top, logits.shape[1]))
    missing = ((0, 0), (0, n_top - ids.shape[1]))
    return Scores(
        logprob=((own - top) - log_total)[:, 0],
        rank=jnp.sum(logits >= own, axis=-1, dtype=jnp.int32),
        top_ids=jnp.pad(ids, missing, constant_values=NO_TOKEN),
        top_logprobs=jnp.pad((values - top) - log_total, missing, constant_values=-jnp.inf),
    )


def no_scores(B: int, n_top: int) -> Scores:
    zero, top = jnp.zeros(B, jnp.float32), jnp.zeros((B, n_top), jnp.float32)
    return Scores(zero, zero.astype(jnp.int32), top.astype(jnp.int32), top)


# ---------------------------------------------------------------- choosing


def only(
    wanted: Bool[Array, " B"], change: Change, x: Float[Array, "B V"], rows: SamplingRows
) -> Float[Array, "B V"]:
    """`change(x)` on the wanted rows, the very bits of x on the others; nothing runs where none is wanted."""
    return jax.lax.cond(
        jnp.any(wanted), lambda x, r: jnp.where(wanted[:, None], change(x, r), x), lambda x, _: x, x, rows
    )


def changed(x: Float[Array, "B V"], rows: SamplingRows, changes: Changes) -> Float[Array, "B V"]:
    """Every change in turn, on the rows that want it. A branch not taken copies x: one is around all."""

    def in_turn(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
        for wants, change in changes:
            x = only(rows.live & wants(rows), change, x, rows)
        return x

    return only(rows.live & wants_any(rows, changes), in_turn, x, rows)


def wants_any(rows: SamplingRows, changes: Changes) -> Bool[Array, " B"]:
    return jnp.any(jnp.stack([wants(rows) for wants, _ in changes]), axis=0)


def is_drawn(rows: SamplingRows) -> Bool[Array, " B"]:
    return rows.live & (rows.knobs.temperature > 0)


def wants_choice(rows: SamplingRows) -> Bool[Array, " B"]:
    """Whether the token may be another than the argmax of the logits as they are."""
    return is_drawn(rows) | (rows.live & wants_any(rows, EDITS))


def choose(logits: Float[Array, "B V"], rows: SamplingRows) -> Int[Array, " B"]:
    """Argmax of the edited logits, or a draw where the temperature is not 0."""
    x = changed(whole(logits), rows, EDITS)
    drawn, greedy = is_drawn(rows), argmax_here(x)
    return jax.lax.cond(
        jnp.any(drawn),
        lambda x, r: jnp.where(drawn, draw(narrowed(x, r), r), greedy),
        lambda x, r: greedy,
        x,
        rows,
    )


def narrowed(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Log-weights to draw from: 0 for the likeliest, MASKED or less outside min_p, top_k, top_p."""
    return changed(tempered(x, rows), rows, NARROWINGS)


def draw(x: Float[Array, "B V"], rows: SamplingRows) -> Int[Array, " B"]:
    """A token from each row's log-weights by the Gumbel-max trick; (seed, position) decides the noise."""

    def noise(seed: UInt[Array, ""], position: Int[Array, ""]) -> Float[Array, " V"]:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        return jax.random.gumbel(key, x.shape[1:], jnp.float32)

    return argmax_here(x + jax.vmap(noise)(rows.knobs.seed, rows.position))


# ---------------------------------------------------------------- edits: they hold for greedy rows too


def has_offset(rows: SamplingRows) -> Bool[Array, " B"]:
    return wants_any(rows, OFFSETS)


def offset(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Biases and masks. Large ones count from the largest: logits lowered alike keep their bits."""
    amount = changed(jnp.zeros_like(x), rows, OFFSETS)
    most = jnp.max(amount, axis=-1, keepdims=True)
    return x + (amount - jnp.where(jnp.abs(most) > LARGE, most, 0.0))


def has_bias(rows: SamplingRows) -> Bool[Array, " B"]:
    return rows.knobs.has_bias


def biased(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """logit_bias, allowed_token_ids, and bad words of one token."""
    return x + rows.state.bias[rows.slot]


def has_bad_words(rows: SamplingRows) -> Bool[Array, " B"]:
    return jnp.any(rows.knobs.bad_words[:, :, -1] != NO_TOKEN, axis=1)


def without_bad_words(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Mask the last token of each sequence whose other tokens were generated last (padding matches all)."""
    start, last = rows.knobs.bad_words[:, :, :-1], rows.knobs.bad_words[:, :, -1]
    recent = rows.state.recent[rows.slot]
    matches = jnp.all((start == recent[:, None, :]) | (start == NO_TOKEN), axis=2) & (last != NO_TOKEN)
    return masked_at(x, jnp.where(matches, last, x.shape[1]), BANNED)


def below_min_tokens(rows: SamplingRows) -> Bool[Array, " B"]:
    return (rows.position < rows.knobs.min_position) & (rows.knobs.stop_ids[:, 0] != NO_TOKEN)


def without_stops(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    stop_ids = rows.knobs.stop_ids
    return masked_at(x, jnp.where(stop_ids != NO_TOKEN, stop_ids, x.shape[1]), EARLY)


def masked_at(x: Float[Array, "B V"], ids: Int[Array, "B ids"], mask: float) -> Float[Array, "B V"]:
    """At most `mask` at each row's ids; an id of V or more is nothing."""
    row = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    ids = apart(ids, first_of_each(ids) & (ids < x.shape[1]), x.shape[1])
    return x.at[row, ids].min(mask, mode="drop", unique_indices=True)


def is_constrained(rows: SamplingRows) -> Bool[Array, " B"]:
    return rows.knobs.is_constrained


def within_grammar(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Mask what the grammar does not allow, deeper than anything else masks: the last of all offsets."""
    allowed = rows.state.allowed
    ahead = jnp.clip(rows.position - allowed.first[rows.slot], 0, allowed.masks.shape[1] - 1)
    words = allowed.masks[rows.slot, ahead]
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & jnp.uint32(1)
    may_follow = bits.reshape(len(bits), -1)[:, : x.shape[1]] == 1
    return jnp.where(may_follow, jnp.maximum(x, BANNED), MASKED)


OFFSETS = (
    (has_bias, biased),
    (has_bad_words, without_bad_words),
    (below_min_tokens, without_stops),
    (is_constrained, within_grammar),
)


def has_penalty(rows: SamplingRows) -> Bool[Array, " B"]:
    k = rows.knobs
    return (k.repetition_penalty != 1) | (k.frequency_penalty != 0) | (k.presence_penalty != 0)


def penalized(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Repetition penalty (Keskar et al., arXiv 1909.05858) on prompt and output, OpenAI's two on output."""
    k, counts = rows.knobs, rows.state.output_counts[rows.slot]
    seen = (counts > 0) | rows.state.in_prompt[rows.slot]
    factor = jnp.where(seen, k.repetition_penalty[:, None], 1.0)
    x = jnp.where(x > 0, x / factor, x * factor)
    x = x - k.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return x - jnp.where(counts > 0, k.presence_penalty[:, None], 0.0)


EDITS = ((has_offset, offset), (has_penalty, penalized))

# ---------------------------------------------------------------- narrowings: from which tokens a row draws


def tempered(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Logits below the largest, over the temperature (over 1 where the row is greedy); none is above 0."""
    t = rows.knobs.temperature
    return (x - jnp.max(x, axis=-1, keepdims=True)) / jnp.where(t > 0, t, 1.0)[:, None]


def has_min_p(rows: SamplingRows) -> Bool[Array, " B"]:
    return is_drawn(rows) & (rows.knobs.min_p > 0)


def within_min_p(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    return jnp.where(x >= jnp.log(rows.knobs.min_p)[:, None], x, MASKED)


def has_top_k(rows: SamplingRows) -> Bool[Array, " B"]:
    return is_drawn(rows) & (rows.knobs.top_k > 0)


def within_top_k(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Keep the k largest; those that equal the k-th stay too."""
    goal = jnp.minimum(rows.knobs.top_k, x.shape[1]).astype(jnp.float32)
    return keep_heaviest(x, jnp.ones_like(x), goal)


def has_top_p(rows: SamplingRows) -> Bool[Array, " B"]:
    return is_drawn(rows) & (rows.knobs.top_p < 1)


def within_top_p(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Keep the fewest largest whose probabilities among what is left sum to p; ties at the border stay."""
    weight = fixed_point(x)
    whole = jnp.sum(weight, axis=-1).astype(jnp.float32)
    return keep_heaviest(x, weight, jnp.ceil(rows.knobs.top_p * whole).astype(jnp.int32))


NARROWINGS = ((has_min_p, within_min_p), (has_top_k, within_top_k), (has_top_p, within_top_p))


def keep_heaviest(
    x: Float[Array, "B V"], weight: Num[Array, "B V"], goal: Num[Array, " B"]
) -> Float[Array, "B V"]:
    """Keep the largest x (all x <= 0) until their weights sum to `goal`, exactly, without a sort.

    The bits of non-negative floats are ordered as integers, so a search through these finds the smallest
    distance -x that suffices. Weights are whole numbers, so their sums are exact in every order of addition.
    """
    distance = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    # a GPU asks the host at each turn of a loop, a CPU's arithmetic costs more than its memory
    border = jax.lax.platform_dependent(distance, weight, goal, cuda=by_digits, default=by_halves)
    return jnp.where(distance <= border[:, None], x, MASKED)
