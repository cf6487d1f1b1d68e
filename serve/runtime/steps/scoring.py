"""Log-probabilities of a prompt's tokens and embeddings, from the hidden states of its prefill."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ....kvcache.pages import POOLED, Batch, positions
from ....model.config import ModelConfig
from ....model.pooling import Pooled, pool
from ....model.transformer import Decoder, unembed
from ....sampling.checks import MAX_LOGPROBS
from ....sampling.sample import Scores, no_scores, score

SCORE_TILES = (8, 16, 32, 64)  # positions whose logits exist at once: as many as take at most
SCORE_BYTES = 64 << 20  # bytes in float32
NEVER = 2**31 - 1  # the position from which on a prompt is scored that is not


def prompt_scores(
    params: Decoder,
    config: ModelConfig,
    batch: Batch,
    hidden: Float[Array, "B T D"],
    since: Int[Array, " B"],
    n_top: int = MAX_LOGPROBS,
) -> Scores:
    """Score the tokens behind those of a chunk, [B,T] (column i is token i+1), at the prompt's positions
    `since` or later; zeros if no row wants any."""
    at, count = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None], batch.count[:, None]
    following = jnp.where(at == count - 1, batch.after[:, None], jnp.roll(batch.tokens, -1, axis=1))
    wanted = (at < count) & (following >= 0) & (positions(batch) + 1 >= since[:, None])
    work = partial(score_prompt, params, config, hidden, following, wanted, n_top)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(work))
    return jax.lax.cond(jnp.any(wanted), work, lambda: zeros)


def prompt_pooled(batch: Batch, hidden: Float[Array, "B T D"]) -> Pooled:
    """Pool the hidden states of a chunk's rows; zeros if no prompt is embedded."""
    work = partial(pool, hidden, batch.count)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(work))
    return jax.lax.cond(jnp.any(batch.after == POOLED), work, lambda: zeros)


def score_prompt(
    params: Decoder,
    config: ModelConfig,
    hidden: Float[Array, "B T D"],
    following: Int[Array, "B T"],
    wanted: Bool[Array, "B T"],
    n_top: int = MAX_LOGPROBS,
) -> Scores:
    """Score the token after each wanted position, a tile of positions at a time; others have any score.

    All shapes of an engine have one tile: products of another number of rows have other bits.
    """
    B, T = hidden.shape[:2]
    rows, tile = B * T, score_tile(config.vocab_size)
    flat, targets = hidden.reshape(rows, -1), following.reshape(rows)
    all_turns = -(-rows // tile)
    beyond = jnp.arange(rows, all_turns * tile, dtype=jnp.int32)

    def one(i: Int[Array, ""], found: Scores, order: Int[Array, " padded"]) -> Scores:
        # gather and scatter: for a slice at a loop's counter a GPU would return to the host
        at = order[i * tile + jnp.arange(tile, dtype=jnp.int32)]
        own = jnp.minimum(at, rows - 1)
        new = score(unembed(params, config, flat[own]), targets[own], n_top)
        return jax.tree.map(lambda all, x: all.at[at].set(x, mode="drop", unique_indices=True), found, new)

    def looped(turns: Any, order: Int[Array, " rows"]) -> Scores:
        order = jnp.concatenate([order, beyond])
        return jax.lax.fori_loop(0, turns, partial(one, order=order), no_scores(rows, n_top))

    def those(wanted: Bool[Array, " rows"]) -> Scores:
        """Take wanted positions first, and no turn for tiles without any."""
        turns = -(-jnp.sum(wanted, dtype=jnp.int32) // tile)
        return looped(turns, jnp.argsort(~wanted, stable=True).astype(jnp.int32))

    def every(wanted: Bool[Array, " rows"]) -> Scores:
        """Take all tiles: the number of turns is known to an accelerator."""
        return looped(all_turns, jnp.arange(rows, dtype=jnp.int32))

    scored = jax.lax.platform_dependent(wanted.reshape(rows), cpu=those, default=every)
    return jax.tree.map(lambda x: x.reshape(B, T, *x.shape[1:]), scored)


def score_tile(V: int) -> int:
    """Return the positions of a prompt whose logits exist at once, for a vocabulary of V."""
    return max(tile for tile in SCORE_TILES if tile == SCORE_TILES[0] or 4 * tile * V <= SCORE_BYTES)
