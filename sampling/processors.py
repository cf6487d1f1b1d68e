"""Logits processors: what each sampling parameter does to logits, and which rows use it.

Each is an exact identity on the rows that do not use it. `PIPELINE`, at the end, has them in their order.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Num

from ..model.gpus import has_gpu_compiler
from ..model.layers import index_or_drop, mark_first_occurrences
from ..model.tree import pytree
from .custom_processors import History, LogitsProcessor
from .noise import gumbel
from .params import NO_TOKEN, Knobs
from .search import fixed_point_probs, max_or_nonfinite, threshold_by_bisection, threshold_by_radix
from .state import BANNED, EARLY, MASKED, SamplingState


@pytree
class SamplingRows:
    """Inputs of logits processors besides the logits. The state stays by slot: its dense rows are gathered
    (`rows.state.bias[rows.slot]`) only where they are needed."""

    knobs: Knobs  # [B,...]
    position: Any  # int32 [B], position of the token that is being chosen
    live: Any  # bool [B], False for rows whose token is not used
    slot: Any  # int32 [B]
    state: SamplingState


# ---------------------------------------------------------------- functions of users

MAX_CUSTOM_LOGIT = 1e24  # absolute value of a logit that a user's function returns; masks are larger


def apply_custom_processor(x: Float[Array, "B V"], rows: SamplingRows, i: int) -> Float[Array, "B V"]:
    """Run the user's function i on each row. Its logits are clipped to `MAX_CUSTOM_LOGIT`; a NaN of its own
    masks the token, as -inf does. NaN and inf of the model are kept."""
    token_history, slot, state = rows.state.token_history, rows.slot, rows.state
    history = History(
        token_history.tokens[slot],
        token_history.length[slot],
        token_history.prompt_len[slot],
        state.output_counts[slot],
        state.in_prompt[slot],
    )
    output = jax.vmap(state.processors[i].call)(x, history, rows.knobs.custom[i].values)
    cut = jnp.clip(
        jnp.where(jnp.isnan(output), -MAX_CUSTOM_LOGIT, output), -MAX_CUSTOM_LOGIT, MAX_CUSTOM_LOGIT
    )
    return jnp.where(x < jnp.inf, cut, x)


# ---------------------------------------------------------------- offsets: biases and masks


def uses_bias(rows: SamplingRows) -> Bool[Array, " B"]:
    """True for rows with biases, allowed ids, or bad words of one token."""
    return rows.knobs.has_bias


def apply_logit_bias(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Add the biases of logit_bias, allowed_token_ids, and bad words of one token."""
    return x + rows.state.bias[rows.slot]


def has_bans(rows: SamplingRows) -> Bool[Array, " B"]:
    """True for rows with bad words of several tokens, or with stop ids below min_tokens."""
    return (rows.knobs.bad_words[:, 0, -1] != NO_TOKEN) | below_min_tokens(rows)


def below_min_tokens(rows: SamplingRows) -> Bool[Array, " B"]:
    """True for rows with stop ids that have fewer than min_tokens tokens."""
    return (rows.position < rows.knobs.min_position) & (rows.knobs.stop_ids[:, 0] != NO_TOKEN)


def apply_bans(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Mask the last token of each bad word whose other tokens were generated last, and stop ids below
    min_tokens. Logits become at most BANNED and EARLY. One scatter with unique indices does both."""
    k, V = rows.knobs, x.shape[1]
    start, last = k.bad_words[:, :, :-1], k.bad_words[:, :, -1]
    recent = rows.state.recent_tokens[rows.slot]
    matches = jnp.all((start == recent[:, None, :]) | (start == NO_TOKEN), axis=2) & (last != NO_TOKEN)
    early = below_min_tokens(rows)[:, None] & (k.stop_ids != NO_TOKEN)
    # id V is dropped; of equal ids the first is kept, so bad words have precedence over stop ids
    ids = jnp.concatenate([jnp.where(matches, last, V), jnp.where(early, k.stop_ids, V)], axis=1)
    masks = jnp.where(jnp.arange(ids.shape[1], dtype=jnp.int32) < last.shape[1], BANNED, EARLY)
    row = jnp.arange(len(x), dtype=jnp.int32)[:, None]
    ids = index_or_drop(ids, mark_first_occurrences(ids) & (ids < V), V)
    return x.at[row, ids].min(masks[None], mode="drop", unique_indices=True)


def uses_token_masks(rows: SamplingRows) -> Bool[Array, " B"]:
    """True for rows with a grammar or a trace."""
    return rows.knobs.is_constrained


def apply_token_masks(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Mask tokens that the grammar does not allow. This mask is deeper than all others, so it comes last of
    the offsets."""
    allowed = rows.state.token_masks
    ahead = jnp.clip(rows.position - allowed.first[rows.slot], 0, allowed.masks.shape[1] - 1)
    words = allowed.masks[rows.slot, ahead]
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)[None, None]) & jnp.uint32(1)
    may_follow = bits.reshape(len(bits), -1)[:, : x.shape[1]] == 1
    return jnp.where(may_follow, jnp.maximum(x, BANNED), MASKED)


# ---------------------------------------------------------------- penalties


def has_penalty(rows: SamplingRows) -> Bool[Array, " B"]:
    """True for rows with a repetition, frequency or presence penalty."""
    k = rows.knobs
    return (k.repetition_penalty != 1) | (k.frequency_penalty != 0) | (k.presence_penalty != 0)


def apply_penalties(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Apply the repetition penalty (Keskar et al., arXiv 1909.05858) to tokens of prompt and output, and
    OpenAI's two penalties to tokens of the output."""
    k, counts = rows.knobs, rows.state.output_counts[rows.slot]
    seen = (counts > 0) | rows.state.in_prompt[rows.slot]
    factor = jnp.where(seen, k.repetition_penalty[:, None], 1.0)
    x = jnp.where(x > 0, x / factor, x * factor)
    x = x - k.frequency_penalty[:, None] * counts.astype(jnp.float32)
    return x - jnp.where(counts > 0, k.presence_penalty[:, None], 0.0)


# ---------------------------------------------------------------- narrowings: from which tokens a row draws


def is_random(rows: SamplingRows) -> Bool[Array, " B"]:
    """True for rows that draw a token at random."""
    return rows.live & (rows.knobs.temperature > 0)


def apply_temperature(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Divide by the temperature of each row, as `scale_by_temperature` does."""
    return scale_by_temperature(x, rows.knobs.temperature)


def scale_by_temperature(
    logits: Float[Array, "B V"], temperature: Float[Array, " B"] | Float[Array, ""] | float
) -> Float[Array, "B V"]:
    """Subtract the largest logit of each row, and divide by its temperature, in float32. No result is above
    0.

    temperature: of each row, or one of all; 0 (greedy) divides by 1
    """
    x = logits.astype(jnp.float32)
    t = jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), x.shape[:1])
    return (x - max_or_nonfinite(x)[:, None]) / jnp.where(t > 0, t, 1.0)[:, None]


def has_min_p(rows: SamplingRows) -> Bool[Array, " B"]:
    """True for rows with min_p that draw at random."""
    return is_random(rows) & (rows.knobs.min_p > 0)


def apply_min_p(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Mask tokens whose probability is below min_p times the highest."""
    return jnp.where(x >= jnp.log(rows.knobs.min_p)[:, None], x, MASKED)


def has_top_k(rows: SamplingRows) -> Bool[Array, " B"]:
    """True for rows with top_k that draw at random."""
    return is_random(rows) & (rows.knobs.top_k > 0)


def apply_top_k(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Keep the k largest logits. Ties with the k-th are kept too."""
    goal = jnp.minimum(rows.knobs.top_k, x.shape[1]).astype(jnp.float32)
    return mask_tail(x, jnp.ones_like(x), goal)


def has_top_p(rows: SamplingRows) -> Bool[Array, " B"]:
    """True for rows with top_p that draw at random."""
    return is_random(rows) & (rows.knobs.top_p < 1)


def apply_top_p(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Keep the fewest largest logits whose probabilities sum to p. Ties with the last are kept too.
    Probabilities are relative to the tokens that are not masked yet."""
    weight = fixed_point_probs(x)
    total = jnp.sum(weight, axis=-1).astype(jnp.float32)
    return mask_tail(x, weight, jnp.ceil(rows.knobs.top_p * total).astype(jnp.int32))


def mask_tail(
    x: Float[Array, "B V"], weight: Num[Array, "B V"], goal: Num[Array, " B"]
) -> Float[Array, "B V"]:
    """Keep the largest x (all x <= 0) until their weights sum to `goal`, exactly, without a sort.

    The bits of non-negative floats are ordered as integers. So a search through integers finds the smallest
    sufficient distance -x. Weights are whole numbers, so their sums are exact in every order of addition.
    """
    distance = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    # on a GPU each loop iteration waits for the host; on a CPU radix select costs more arithmetic
    cuda = {"cuda": threshold_by_radix} if has_gpu_compiler() else {}  # tracing it takes time
    border = jax.lax.platform_dependent(distance, weight, goal, default=threshold_by_bisection, **cuda)
    return jnp.where(distance <= border[:, None], x, MASKED)


def add_gumbel_noise(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
    """Add Gumbel noise to log-weights, so that their argmax is a draw (the Gumbel-max trick). The noise
    depends on (seed, position) alone."""
    return x + gumbel(rows.knobs.seed, rows.position, x.shape[1])


# ---------------------------------------------------------------- a sampling step in its order

UsesStage = Callable[[SamplingRows], Bool[Array, " B"]]  # returns the rows that use a stage
# changes the logits of all rows
LogitsChange = Callable[[Float[Array, "B V"], SamplingRows], Float[Array, "B V"]]
StageGroup = Literal["custom", "offset", "edit", "narrowing", "draw"]
SamplingStage = tuple[StageGroup, UsesStage, LogitsChange]

PIPELINE: dict[str, SamplingStage] = {  # after users' functions; the token is the argmax of the result
    "bias": ("offset", uses_bias, apply_logit_bias),  # logit_bias, allowed_token_ids, bad words of one token
    "bans": ("offset", has_bans, apply_bans),  # other bad words, min_tokens
    "grammar": ("offset", uses_token_masks, apply_token_masks),
    "penalties": ("edit", has_penalty, apply_penalties),
    "temperature": ("draw", is_random, apply_temperature),
    "min_p": ("narrowing", has_min_p, apply_min_p),
    "top_k": ("narrowing", has_top_k, apply_top_k),
    "top_p": ("narrowing", has_top_p, apply_top_p),
    "draw": ("draw", is_random, add_gumbel_noise),
}


def stage_names(group: StageGroup) -> tuple[str, ...]:
    """Return the names of the stages of a group, in their order."""
    return tuple(name for name, (stage_group, _, _) in PIPELINE.items() if stage_group == group)


def custom_stages(processors: Sequence[LogitsProcessor]) -> dict[str, SamplingStage]:
    """Return the stages of users' functions: each changes the rows whose request asked for it."""
    return {
        f"custom {i}": (
            "custom",
            lambda rows, i=i: rows.knobs.custom[i].is_active,
            partial(apply_custom_processor, i=i),
        )
        for i in range(len(processors))
    }
