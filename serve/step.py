"""The one step. Prefill, chunked prefill, decode and verification are this pure function at different [B, T] shapes.

Programs donate the cache and the slots, so both are updated in place. Nothing here depends on which rows share a batch.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..kvcache.pages import Batch, KVCache, paged, positions
from ..model.config import ModelConfig
from ..model.transformer import Decoder, forward, unembed
from ..model.tree import pytree
from ..sampling.params import Knobs
from ..sampling.sample import Sampled, Scores, sample, score
from ..sampling.state import SamplingState, admit, commit, empty_state, stops

SCORE_TILE = 16  # prompt positions whose logits exist at once


@pytree
class Slots:
    """What the device remembers of each running request between steps; a slot is a request's seat, axis C of capacity."""

    last: Any  # int32 [C], the last token sampled
    live: Any  # bool [C], False once a stop token or the end was reached
    known: Any  # int32 [C], tokens that the host gave: samples for earlier positions are dropped
    end: Any  # int32 [C], tokens that the request may have at most
    scored: Any  # bool [C], whether log-probabilities of the prompt are wanted
    sampling: SamplingState


@pytree
class Seat:
    """One slot's first contents: the scalars of Slots and the request's sampling knobs."""

    known: Any
    end: Any
    scored: Any
    knobs: Knobs


@pytree
class Output:
    """What a step tells the host: samples [B,Q] (token -1 where none was emitted) and prompt scores [B,T] or None."""

    sampled: Sampled
    prompt: Scores | None


def empty_slots(capacity: int, V: int) -> Slots:
    def zeros(dtype):
        return jnp.zeros(capacity, dtype)

    return Slots(
        last=zeros(jnp.int32),
        live=zeros(bool),
        known=zeros(jnp.int32),
        end=zeros(jnp.int32),
        scored=zeros(bool),
        sampling=empty_state(capacity, V),
    )


def seat(slots: Slots, slot: Array, new: Seat) -> Slots:
    """Give a slot to a request."""
    return Slots(
        last=slots.last.at[slot].set(-1),
        live=slots.live.at[slot].set(True),
        known=slots.known.at[slot].set(new.known),
        end=slots.end.at[slot].set(new.end),
        scored=slots.scored.at[slot].set(new.scored),
        sampling=admit(slots.sampling, slot, new.knobs),
    )


def awake(slots: Slots, batch: Batch) -> Batch:
    """The batch as the device sees it: slots that have stopped are empty rows, and unknown tokens are the slot's last."""
    last, live = slots.last[batch.slot], slots.live[batch.slot]
    tokens = jnp.where(batch.tokens < 0, last[:, None], batch.tokens)
    return replace(batch, tokens=tokens, count=jnp.where(live, batch.count, 0))


def emit(
    slots: Slots, batch: Batch, token: Array, position: Array, wanted: Bool[Array, " B"]
) -> tuple[Slots, Array]:
    """Record a sampled token [B] for each row that wants one; gives the slots and the token, -1 where not wanted."""
    wanted = wanted & (position >= slots.known[batch.slot])
    ended = stops(slots.sampling, batch.slot, token) | (position + 1 >= slots.end[batch.slot])
    where = jnp.where(wanted, batch.slot, slots.live.shape[0])
    slots = replace(
        slots,
        last=slots.last.at[where].set(token, mode="drop"),
        live=slots.live.at[where].set(~ended, mode="drop"),
        sampling=commit(slots.sampling, batch.slot, token, wanted),
    )
    return slots, jnp.where(wanted, token, -1)


def sample_rows(
    params: Decoder, slots: Slots, batch: Batch, hidden: Float[Array, "B T D"], queries: int
) -> tuple[Slots, Sampled]:
    """Sample after each of a row's last `queries` tokens, as long as the samples agree with the tokens that follow.

    With one query this is plain sampling. With more, a row's tokens after its first are guesses, and each sample is the one
    that decoding alone would have drawn (drafter-invariant verification, Daliri et al., arXiv 2408.07978).
    """
    rows = jnp.arange(hidden.shape[0], dtype=jnp.int32)
    wanted, outputs = batch.count > 0, []
    for query in range(queries):
        index = jnp.maximum(batch.count - queries, 0) + query
        wanted = wanted & (index < batch.count)
        logits = unembed(params, hidden[rows, index])
        position = batch.start + index + 1
        drawn = sample(logits, position, batch.slot, wanted, slots.sampling)
        slots, token = emit(slots, batch, drawn.token, position, wanted)
        outputs.append(replace(drawn, token=token))
        following = batch.tokens[rows, jnp.minimum(index + 1, batch.tokens.shape[1] - 1)]
        wanted = wanted & (token == following) & slots.live[batch.slot]
    return slots, jax.tree.map(lambda *x: jnp.stack(x, axis=1), *outputs)


def score_prompt(params: Decoder, hidden: Float[Array, "B T D"], following: Int[Array, "B T"]) -> Scores:
    """Log-probabilities of the token after each position, a tile of positions at a time."""
    B, T = hidden.shape[:2]
    tile = SCORE_TILE if T % SCORE_TILE == 0 else T

    def tiles(x: Array) -> Array:
        return (
            x.reshape(B, T // tile, tile, *x.shape[2:])
            .swapaxes(0, 1)
            .reshape(T // tile, B * tile, *x.shape[2:])
        )

    scored = jax.lax.map(lambda x: score(unembed(params, x[0]), x[1]), (tiles(hidden), tiles(following)))

    def rows(x: Array) -> Array:
        return x.reshape(T // tile, B, tile, *x.shape[2:]).swapaxes(0, 1).reshape(B, T, *x.shape[2:])

    return jax.tree.map(rows, scored)


def prompt_scores(params: Decoder, slots: Slots, batch: Batch, hidden: Float[Array, "B T D"]) -> Scores:
    """Scores of the tokens of a chunk after its first, [B,T] (column i is token i+1); zeros unless a row wants them."""
    following = jnp.roll(batch.tokens, -1, axis=1)
    work = partial(score_prompt, params, hidden, following)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(work))
    return jax.lax.cond(jnp.any(slots.scored[batch.slot] & (batch.count > 0)), work, lambda: zeros)


def step(
    params: Decoder, cache: KVCache, slots: Slots, batch: Batch, *, config: ModelConfig, queries: int = 1
) -> tuple[KVCache, Slots, Output]:
    """Run the tokens of every row, write their keys, and sample after the last `queries` of them."""
    batch = awake(slots, batch)
    hidden, cache = forward(params, config, batch.tokens, positions(batch), paged(batch), cache)
    several = batch.tokens.shape[1] > queries
    prompt = prompt_scores(params, slots, batch, hidden) if several else None
    slots, sampled = sample_rows(params, slots, batch, hidden, queries)
    return cache, slots, Output(sampled, prompt)


def prefill(params: Decoder, cache: KVCache, slots: Slots, batch: Batch, *, config: ModelConfig):
    """A chunk of one prompt or several; samples where a chunk ends its prompt."""
    return step(params, cache, slots, batch, config=config)


def verify(params: Decoder, cache: KVCache, slots: Slots, batch: Batch, *, config: ModelConfig):
    """A row's last token and T-1 guesses of what follows; emits the samples up to the first wrong guess."""
    return step(params, cache, slots, batch, config=config, queries=batch.tokens.shape[1])


def decode(params: Decoder, cache: KVCache, slots: Slots, batch: Batch, *, config: ModelConfig):
    """T steps of one token a row, each fed with the token before it; `count` of a row says how many it takes.

    Tokens of the batch that are not negative are fed as given: that replays what a preempted request had generated.
    """
    B, T = batch.tokens.shape
    if T == 1:
        return step(params, cache, slots, batch, config=config)

    def column(i: Array) -> Batch:
        tokens = jax.lax.dynamic_slice_in_dim(batch.tokens, i, 1, axis=1)
        count = (i < batch.count).astype(jnp.int32)
        return replace(batch, tokens=tokens, start=batch.start + i, count=count)

    def more(carry: Any) -> Array:
        i, _, slots, _ = carry
        return (i < T) & jnp.any((i < batch.count) & slots.live[batch.slot])

    def one(carry: Any) -> Any:
        i, cache, slots, sampled = carry
        cache, slots, out = step(params, cache, slots, column(i), config=config)
        sampled = jax.tree.map(lambda all, new: all.at[:, i].set(new[:, 0]), sampled, out.sampled)
        return i + 1, cache, slots, sampled

    _, _, out = jax.eval_shape(partial(step, config=config), params, cache, slots, column(jnp.int32(0)))
    nothing = jax.tree.map(lambda s: jnp.full((B, T, *s.shape[2:]), -1, s.dtype), out.sampled)
    _, cache, slots, sampled = jax.lax.while_loop(more, one, (jnp.int32(0), cache, slots, nothing))
    return cache, slots, Output(sampled, None)
