"""From logits to tokens, by a pipeline of logits processors.

Order and meaning are vLLM's. A row's token is a function of its own logits, knobs, history and position.
Neighbours only decide what is computed in vain. A stage that no row uses is not computed, so a greedy batch
costs an argmax.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..model.tree import pytree
from .checks import MAX_LOGPROBS, PROCESSED_LOGPROBS
from .params import NO_LOGPROBS, NO_TOKEN, TRACE_LOGPROBS
from .processors import (
    PIPELINE,
    LogitsChange,
    SamplingRows,
    SamplingStage,
    add_gumbel_noise,
    apply_temperature,
    custom_stages,
    stage_names,
)
from .search import argmax, argmax_unsharded, gather_vocab, max_or_nonfinite, pairwise_sum, top_logits
from .state import MASKED_DISTANCE, SamplingState

OFFSETS, NARROWINGS = stage_names("offset"), stage_names("narrowing")
EDITS = (*OFFSETS, *stage_names("edit"))  # apply to greedy rows too
LARGE_OFFSET = 1024.0  # larger offsets would round away the differences between float32 logits
RowsByStage = dict[str, Bool[Array, " B"]]  # rows that use each stage, by the stage's name


@pytree
class Scores:
    """Scores of tokens by some logits.

    logprob: log-probability of the token
    rank: 1 is the most likely; equal logits share the larger rank
    top_ids: most likely tokens, padded with NO_TOKEN where the vocabulary is smaller
    top_logprobs: log-probabilities of these
    """

    logprob: Any  # float32 [B]
    rank: Any  # int32 [B]
    top_ids: Any  # int32 [B,n_top]
    top_logprobs: Any  # float32 [B,n_top]


@pytree
class Sampled:
    """Sampled tokens, with their scores as in `Scores`; the scores of a slot that wants none are
    arbitrary."""

    token: Any  # int32 [B]
    logprob: Any  # float32 [B]
    rank: Any  # int32 [B]
    top_ids: Any  # int32 [B,n_top]
    top_logprobs: Any  # float32 [B,n_top]


@partial(jax.jit, inline=True)  # programs with equally many rows share one trace
@jax.named_scope("sample")
def sample(
    logits: Float[Array, "B V"],
    position: Int[Array, " B"],
    slot: Int[Array, " B"],
    live: Bool[Array, " B"],
    state: SamplingState,
) -> Sampled:
    """Return the token of each row for `position`, by the knobs and history of `slot`. A row that is not live
    gets any token. NAN_TOKEN where the largest logit is NaN or infinite."""
    logits, rows = logits.astype(jnp.float32), gather_sampling_rows(position, slot, live, state)
    rows_by_stage = find_rows_by_stage(rows)
    token = jax.lax.cond(
        jnp.any(rows_using_any(rows_by_stage, (*edit_stage_names(state), "draw"))),
        choose_tokens,
        lambda x, *_: argmax(x),
        logits,
        rows,
        rows_by_stage,
    )
    return score_sampled(logits, token, rows, rows_by_stage)


def gather_sampling_rows(
    position: Int[Array, " B"], slot: Int[Array, " B"], live: Bool[Array, " B"], state: SamplingState
) -> SamplingRows:
    """Gather the knobs of each row from its slot."""
    return SamplingRows(jax.tree.map(lambda x: x[slot], state.knobs), position, live, slot, state)


def find_rows_by_stage(rows: SamplingRows) -> RowsByStage:
    """Return the rows that use each stage. It is computed once, because each `cond` branch would compute it
    again."""
    return {name: rows.live & wants(rows) for name, (_, wants, _) in sampling_stages(rows.state).items()}


def sampling_stages(state: SamplingState) -> dict[str, SamplingStage]:
    """Return all stages in their order. Users' functions come first and see the model's logits. Biases, bans,
    grammars and penalties apply to their results."""
    return custom_stages(state.processors) | PIPELINE


def edit_stage_names(state: SamplingState) -> tuple[str, ...]:
    """Return the names of the stages that apply to greedy rows too."""
    return (*custom_stages(state.processors), *EDITS)


def rows_using_any(rows_by_stage: RowsByStage, names: Iterable[str]) -> Bool[Array, " B"]:
    """True for rows that use one of these stages."""
    return jnp.any(jnp.stack([rows_by_stage[name] for name in names]), axis=0)


def choose_tokens(
    logits: Float[Array, "B V"], rows: SamplingRows, rows_by_stage: RowsByStage
) -> Int[Array, " B"]:
    """Return the argmax of the edited logits, in rows with a temperature after narrowing and noise."""
    x = edit_logits(gather_vocab(logits), rows, rows_by_stage)

    def draw_logits(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
        """Narrow the logits and add noise; NaN where the largest is not finite."""
        is_finite = jnp.isfinite(max_or_nonfinite(x))[:, None]  # min_p, top_k and top_p would mask NaN
        return jnp.where(is_finite, add_gumbel_noise(narrow_logits(x, rows, rows_by_stage), rows), jnp.nan)

    return argmax_unsharded(change_rows(rows_by_stage["draw"], draw_logits, x, rows))


def edit_logits(
    x: Float[Array, "B V"], rows: SamplingRows, rows_by_stage: RowsByStage
) -> Float[Array, "B V"]:
    """Apply the stages that apply to greedy rows too."""

    def apply_edits(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
        """Apply users' functions, then offsets, then penalties."""
        x = apply_stages(x, rows, rows_by_stage, custom_stages(rows.state.processors))
        x = change_rows(
            rows_using_any(rows_by_stage, OFFSETS),
            partial(apply_offsets, rows_by_stage=rows_by_stage),
            x,
            rows,
        )
        return apply_stages(x, rows, rows_by_stage, stage_names("edit"))

    return change_if_any(rows_using_any(rows_by_stage, edit_stage_names(rows.state)), apply_edits, x, rows)


def apply_offsets(
    x: Float[Array, "B V"], rows: SamplingRows, rows_by_stage: RowsByStage
) -> Float[Array, "B V"]:
    """Add biases and masks. If the largest offset is large, it is subtracted from all: logits that are
    lowered alike keep their bits."""
    amount = apply_stages(jnp.zeros_like(x), rows, rows_by_stage, OFFSETS)
    largest_offset = jnp.max(amount, axis=-1, keepdims=True)
    return x + (amount - jnp.where(jnp.abs(largest_offset) > LARGE_OFFSET, largest_offset, 0.0))


def narrow_logits(
    x: Float[Array, "B V"], rows: SamplingRows, rows_by_stage: RowsByStage
) -> Float[Array, "B V"]:
    """Return log-weights to draw from: 0 for the most likely token, MASKED or less for tokens outside of
    min_p, top_k and top_p."""
    narrow = partial(apply_stages, rows_by_stage=rows_by_stage, names=NARROWINGS)
    return change_if_any(rows_using_any(rows_by_stage, NARROWINGS), narrow, apply_temperature(x, rows), rows)


def apply_stages(
    x: Float[Array, "B V"], rows: SamplingRows, rows_by_stage: RowsByStage, names: Iterable[str]
) -> Float[Array, "B V"]:
    """Apply stages one after the other, each to the rows that use it."""
    every = sampling_stages(rows.state)
    for name in names:
        x = change_rows(rows_by_stage[name], every[name][2], x, rows)
    return x


def change_rows(
    wanted: Bool[Array, " B"], change: LogitsChange, x: Float[Array, "B V"], rows: SamplingRows
) -> Float[Array, "B V"]:
    """Apply `change` to the wanted rows, and keep the exact bits of the others. Nothing runs if no row is
    wanted."""
    return change_if_any(wanted, lambda x, r: jnp.where(wanted[:, None], change(x, r), x), x, rows)


def change_if_any(
    wanted: Bool[Array, " B"], change: LogitsChange, x: Float[Array, "B V"], rows: SamplingRows
) -> Float[Array, "B V"]:
    """Apply `change` to all rows if any row is wanted. A `cond` branch that is not taken copies x, so one
    `cond` encloses several changes."""
    return jax.lax.cond(jnp.any(wanted), change, lambda x, _: x, x, rows)


# ---------------------------------------------------------------- scores


@jax.named_scope("score_sampled")
def score_sampled(
    logits: Float[Array, "B V"], token: Int[Array, " B"], rows: SamplingRows, rows_by_stage: RowsByStage
) -> Sampled:
    """Return tokens with their scores by the logits, or by the processed logits if the engine's
    `logprobs_mode` says so. Scores are only computed if some row wants them."""
    wanted, n_top = rows.live & (rows.knobs.logprobs != NO_LOGPROBS), rows.state.n_top

    def score(logits: Float[Array, "B V"], token: Int[Array, " B"]) -> Scores:
        if rows.state.logprobs_mode == PROCESSED_LOGPROBS:
            processed = wanted & (rows.knobs.logprobs != TRACE_LOGPROBS)
            by_stage = {name: stage & processed for name, stage in rows_by_stage.items()}
            return score_tokens_unsharded(process_logits(logits, rows, by_stage), token, n_top)
        return score_tokens(logits, token, n_top)

    x = jax.lax.cond(jnp.any(wanted), score, lambda x, _: empty_scores(x.shape[0], n_top), logits, token)
    return Sampled(token, x.logprob, x.rank, x.top_ids, x.top_logprobs)


def process_logits(
    logits: Float[Array, "B V"], rows: SamplingRows, rows_by_stage: RowsByStage
) -> Float[Array, "B V"]:
    """Return the logits that tokens are drawn from, as vLLM's `processed_logprobs` has them: edited, and in
    rows with a temperature scaled and narrowed; -inf where a token is masked."""
    x = edit_logits(gather_vocab(logits), rows, rows_by_stage)
    x = change_rows(rows_by_stage["draw"], partial(narrow_logits, rows_by_stage=rows_by_stage), x, rows)
    t = rows.knobs.temperature
    limit = MASKED_DISTANCE / jnp.where(t > 0, t, 1.0)
    return jnp.where(jnp.max(x, axis=-1, keepdims=True) - x < limit[:, None], x, -jnp.inf)


def score_tokens(logits: Float[Array, "B V"], targets: Int[Array, " B"], n_top: int = MAX_LOGPROBS) -> Scores:
    """Return the scores of the given tokens, and the `n_top` most likely tokens."""
    return score_tokens_unsharded(gather_vocab(logits.astype(jnp.float32)), targets, n_top)


def score_tokens_unsharded(
    logits: Float[Array, "B V"], targets: Int[Array, " B"], n_top: int = MAX_LOGPROBS
) -> Scores:
    """Return the scores of the given tokens, and the `n_top` most likely ones, of rows that are whole on each
    device."""
    top = jnp.max(logits, axis=-1, keepdims=True)
    log_total = jnp.log(pairwise_sum(jnp.exp(logits - top)))
    target_logits = jnp.take_along_axis(logits, targets[:, None], axis=1)
    values, ids = top_logits(logits, min(n_top, logits.shape[1]))
    missing = ((0, 0), (0, n_top - ids.shape[1]))
    return Scores(
        logprob=((target_logits - top) - log_total)[:, 0],
        rank=jnp.sum(logits >= target_logits, axis=-1, dtype=jnp.int32),
        top_ids=jnp.pad(ids, missing, constant_values=NO_TOKEN),
        top_logprobs=jnp.pad((values - top) - log_total, missing, constant_values=-jnp.inf),
    )


def empty_scores(B: int, n_top: int) -> Scores:
    """Return scores of zeros."""
    zero, top = jnp.zeros(B, jnp.float32), jnp.zeros((B, n_top), jnp.float32)
    return Scores(zero, zero.astype(jnp.int32), top.astype(jnp.int32), top)
