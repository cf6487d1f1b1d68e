"""Logits processors: what each sampling parameter does to logits, and which rows use it.

Each is an exact identity on the rows that do not use it. `PIPELINE`, at the end, has them in their order.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from ..model.gpus import compiles_for_gpus
from ..model.layers import apart, first_of_each
from ..model.tree import pytree
from .custom import History, LogitsProcessor
from .noise import gumbel
from .params import NO_TOKEN, Knobs
from .search import by_digits, by_halves, fixed_point
from .state import BANNED, EARLY, MASKED, SamplingState


@pytree
class SamplingRows:
    """Inputs of logits processors besides the logits. The state stays by slot: its dense rows are gathered
    (`rows.state.bias[rows.slot]`) only where they are needed."""

    knobs: Knobs  # of each row
    position: Any  # int32 [B], of the token that is being chosen
    live: Any  # bool [B]
    slot: Any  # int32 [B]
    state: SamplingState


# ---------------------------------------------------------------- functions of users

LARGEST = 1e24  # logit that a user's function returns: masks are deeper


def processed(x: Float[Array, "B V"], rows: SamplingRows, i: int) -> Float[Array, "B V"]:
    """Run function i on each row. Its logits are cut to LARGEST; NaN masks a token as -inf does."""
    kept, slot, state = rows.state.kept, rows.slot, rows.state
    history = History(
        kept.tokens[slot],
        kept.length[slot],
        kept.prompt_len[slot],
        state.output_counts[slot],
        state.in_prompt[slot],
    )
    found = jax.vmap(state.processors[i].call)(x, history, rows.knobs.custom[i].values)
    return jnp.clip(jnp.where(jnp.isnan(found), -LARGEST, found), -LARGEST, LARGEST)


# ---------------------------------------------------------------- offsets: biases and masks


def has_bias(rows: SamplingRows) -> Bool[Array, " B"]:
    return rows.knobs.has_bias


def biased(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """logit_bias, allowed_token_ids, and bad words of one token."""
    return x + rows.state.bias[rows.slot]


def has_bans(rows: SamplingRows) -> Bool[Array, " B"]:
    """Rows with bad words of several tokens, or with stop ids below min_tokens."""
    return (rows.knobs.bad_words[:, 0, -1] != NO_TOKEN) | below_min_tokens(rows)


def below_min_tokens(rows: SamplingRows) -> Bool[Array, " B"]:
    return (rows.position < rows.knobs.min_position) & (rows.knobs.stop_ids[:, 0] != NO_TOKEN)


def without_bans(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """At most BANNED at the last token of each bad word whose other tokens were generated last (padding
    matches all), and EARLY at stop ids below min_tokens: one scatter."""
    k, V = rows.knobs, x.shape[1]
    start, last = k.bad_words[:, :, :-1], k.bad_words[:, :, -1]
    recent = rows.state.recent[rows.slot]
    matches = jnp.all((start == recent[:, None, :]) | (start == NO_TOKEN), axis=2) & (last != NO_TOKEN)
    early = below_min_tokens(rows)[:, None] & (k.stop_ids != NO_TOKEN)
    # an id of V is nothing; one of both is banned, as bad words come first
    ids = jnp.concatenate([jnp.where(matches, last, V), jnp.where(early, k.stop_ids, V)], axis=1)
    masks = jnp.where(jnp.arange(ids.shape[1], dtype=jnp.int32) < last.shape[1], BANNED, EARLY)
    row = jnp.arange(len(x), dtype=jnp.int32)[:, None]
    ids = apart(ids, first_of_each(ids) & (ids < V), V)
    return x.at[row, ids].min(masks[None], mode="drop", unique_indices=True)


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


# ---------------------------------------------------------------- penalties


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


# ---------------------------------------------------------------- narrowings: from which tokens a row draws


def is_drawn(rows: SamplingRows) -> Bool[Array, " B"]:
    return rows.live & (rows.knobs.temperature > 0)


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


def keep_heaviest(
    x: Float[Array, "B V"], weight: Num[Array, "B V"], goal: Num[Array, " B"]
) -> Float[Array, "B V"]:
    """Keep the largest x (all x <= 0) until their weights sum to `goal`, exactly, without a sort.

    The bits of non-negative floats are ordered as integers, so a search through these finds the smallest
    distance -x that suffices. Weights are whole numbers, so their sums are exact in every order of addition.
    """
    distance = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    # a GPU asks the host at each turn of a loop, a CPU's arithmetic costs more than its memory
    cuda = {"cuda": by_digits} if compiles_for_gpus() else {}  # else it need not even be traced
    border = jax.lax.platform_dependent(distance, weight, goal, default=by_halves, **cuda)
    return jnp.where(distance <= border[:, None], x, MASKED)


def perturbed(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Log-weights whose argmax is a draw (the Gumbel-max trick); (seed, position) decides the noise."""
    return x + gumbel(rows.knobs.seed, rows.position, x.shape[1])


# ---------------------------------------------------------------- a sampling step in its order

Wants = Callable[[SamplingRows], Bool[Array, " B"]]  # which rows use a parameter
Change = Callable[[Float[Array, "B V"], SamplingRows], Float[Array, "B V"]]  # what it does to logits
Group = Literal["custom", "offset", "edit", "narrowing", "draw"]
Stage = tuple[Group, Wants, Change]

PIPELINE: dict[str, Stage] = {  # behind users' functions; the token is the argmax of what comes out
    "bias": ("offset", has_bias, biased),  # logit_bias, allowed_token_ids, bad words of one token
    "bans": ("offset", has_bans, without_bans),  # other bad words, min_tokens
    "grammar": ("offset", is_constrained, within_grammar),
    "penalties": ("edit", has_penalty, penalized),
    "temperature": ("draw", is_drawn, tempered),
    "min_p": ("narrowing", has_min_p, within_min_p),
    "top_k": ("narrowing", has_top_k, within_top_k),
    "top_p": ("narrowing", has_top_p, within_top_p),
    "draw": ("draw", is_drawn, perturbed),
}


def stages(group: Group) -> tuple[str, ...]:
    return tuple(name for name, (own, _, _) in PIPELINE.items() if own == group)


def stages_of(processors: Sequence[LogitsProcessor]) -> dict[str, Stage]:
    """Return the stages of users' functions: each changes the rows that asked for it."""
    return {
        f"custom {i}": ("custom", lambda rows, i=i: rows.knobs.custom[i].asked, partial(processed, i=i))
        for i in range(len(processors))
    }
