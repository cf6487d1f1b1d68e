"""From logits to tokens, by a pipeline of logits processors.

Order and meaning are vLLM's. A row's token is a function of its logits, knobs, history and position alone:
neighbours only decide what is computed for nothing. What no row wants is not computed, so a greedy batch pays
for an argmax.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..model.tree import pytree
from .checks import MAX_LOGPROBS
from .params import NO_LOGPROBS, NO_TOKEN
from .processors import PIPELINE, Change, SamplingRows, Stage, perturbed, stages, stages_of, tempered
from .search import argmax, argmax_here, largest, pairwise_sum, whole
from .state import SamplingState

OFFSETS, NARROWINGS = stages("offset"), stages("narrowing")
EDITS = (*OFFSETS, *stages("edit"))  # hold for greedy rows too
LARGE = 1024.0  # a number beside which float32 loses what distinguishes logits
Wanted = dict[str, Bool[Array, " B"]]  # of each change: the rows that use it


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


@partial(jax.jit, inline=True)  # programs of as many rows share one trace
@jax.named_scope("sample")
def sample(
    logits: Float[Array, "B V"],
    position: Int[Array, " B"],
    slot: Int[Array, " B"],
    live: Bool[Array, " B"],
    state: SamplingState,
) -> Sampled:
    """The token of each row for `position`, by the knobs and history of `slot`; of a dead row any."""
    logits, rows = logits.astype(jnp.float32), rows_of(position, slot, live, state)
    wanted = who_wants(rows)
    token = jax.lax.cond(
        jnp.any(either(wanted, (*edits(state), "draw"))),
        choose,
        lambda x, *_: argmax(x),
        logits,
        rows,
        wanted,
    )
    return scored(logits, token, live & (rows.knobs.logprobs != NO_LOGPROBS), state.n_top)


def rows_of(
    position: Int[Array, " B"], slot: Int[Array, " B"], live: Bool[Array, " B"], state: SamplingState
) -> SamplingRows:
    return SamplingRows(jax.tree.map(lambda x: x[slot], state.knobs), position, live, slot, state)


def who_wants(rows: SamplingRows) -> Wanted:
    """Decided once: each branch would compute it anew."""
    return {name: rows.live & wants(rows) for name, (_, wants, _) in pipeline(rows.state).items()}


def pipeline(state: SamplingState) -> dict[str, Stage]:
    """Users' functions see the model's logits; biases, bans, grammars and penalties hold for what they
    return."""
    return stages_of(state.processors) | PIPELINE


def edits(state: SamplingState) -> tuple[str, ...]:
    return (*stages_of(state.processors), *EDITS)


def either(wanted: Wanted, names: Iterable[str]) -> Bool[Array, " B"]:
    """Rows that use one of these changes."""
    return jnp.any(jnp.stack([wanted[name] for name in names]), axis=0)


def choose(logits: Float[Array, "B V"], rows: SamplingRows, wanted: Wanted) -> Int[Array, " B"]:
    """Argmax of the edited logits, of rows with a temperature after narrowing and noise."""
    x = edited(whole(logits), rows, wanted)

    def drawn(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
        return perturbed(narrowed(x, rows, wanted), rows)

    return argmax_here(only(wanted["draw"], drawn, x, rows))


def edited(x: Float[Array, "B V"], rows: SamplingRows, wanted: Wanted) -> Float[Array, "B V"]:
    """Logits after what holds for greedy rows too."""

    def edit(x: Float[Array, "B V"], rows: SamplingRows) -> Float[Array, "B V"]:
        x = in_turn(x, rows, wanted, stages_of(rows.state.processors))
        x = only(either(wanted, OFFSETS), partial(offset, wanted=wanted), x, rows)
        return in_turn(x, rows, wanted, stages("edit"))

    return where_any(either(wanted, edits(rows.state)), edit, x, rows)


def offset(x: Float[Array, "B V"], rows: SamplingRows, wanted: Wanted) -> Float[Array, "B V"]:
    """Biases and masks. Large ones count from the largest: logits lowered alike keep their bits."""
    amount = in_turn(jnp.zeros_like(x), rows, wanted, OFFSETS)
    most = jnp.max(amount, axis=-1, keepdims=True)
    return x + (amount - jnp.where(jnp.abs(most) > LARGE, most, 0.0))


def narrowed(x: Float[Array, "B V"], rows: SamplingRows, wanted: Wanted) -> Float[Array, "B V"]:
    """Log-weights to draw from: 0 for the likeliest, MASKED or less outside min_p, top_k, top_p."""
    narrow = partial(in_turn, wanted=wanted, names=NARROWINGS)
    return where_any(either(wanted, NARROWINGS), narrow, tempered(x, rows), rows)


def in_turn(
    x: Float[Array, "B V"], rows: SamplingRows, wanted: Wanted, names: Iterable[str]
) -> Float[Array, "B V"]:
    every = pipeline(rows.state)
    for name in names:
        x = only(wanted[name], every[name][2], x, rows)
    return x


def only(
    wanted: Bool[Array, " B"], change: Change, x: Float[Array, "B V"], rows: SamplingRows
) -> Float[Array, "B V"]:
    """`change(x)` on the wanted rows, the very bits of x on the others; nothing runs where none is wanted."""
    return where_any(wanted, lambda x, r: jnp.where(wanted[:, None], change(x, r), x), x, rows)


def where_any(
    wanted: Bool[Array, " B"], change: Change, x: Float[Array, "B V"], rows: SamplingRows
) -> Float[Array, "B V"]:
    """`change(x)` where a row is wanted. A branch not taken copies x: one is around several changes."""
    return jax.lax.cond(jnp.any(wanted), change, lambda x, _: x, x, rows)


# ---------------------------------------------------------------- scores


@jax.named_scope("scores")
def scored(
    logits: Float[Array, "B V"], token: Int[Array, " B"], wanted: Bool[Array, " B"], n_top: int
) -> Sampled:
    """Chosen tokens with their scores, which are only computed where a row wants its own."""
    some = partial(score, n_top=n_top)
    x = jax.lax.cond(jnp.any(wanted), some, lambda x, _: no_scores(x.shape[0], n_top), logits, token)
    return Sampled(token, x.logprob, x.rank, x.top_ids, x.top_logprobs)


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
