"""Log-probabilities of a prompt's tokens and embeddings, from the hidden states of its prefill."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ....kvcache.pages import POOLED, Batch, token_positions
from ....model.config import ModelConfig
from ....model.pooling import Pooled, pool_hidden_states
from ....model.transformer import Decoder, compute_logits
from ....sampling.checks import MAX_LOGPROBS
from ....sampling.sample import Scores, empty_scores, score_tokens

SCORE_TILES = (8, 16, 32, 64)  # numbers of positions whose logits may exist at once
SCORE_BYTES = 64 << 20  # bytes of these logits in float32, at most
NEVER_SCORED = 2**31 - 1  # first scored position of a prompt that is not scored


def prompt_scores(
    params: Decoder,
    config: ModelConfig,
    batch: Batch,
    hidden: Float[Array, "B T D"],
    first_scored: Int[Array, " B"],
    n_top: int = MAX_LOGPROBS,
) -> Scores:
    """Score the token after each token of a chunk, [B,T]: column i has the score of token i+1.

    Only positions of the prompt from `first_scored` on are scored. Returns zeros if no row wants scores.
    """
    columns, count = jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None], batch.count[:, None]
    following = jnp.where(
        columns == count - 1, batch.next_prompt_token[:, None], jnp.roll(batch.tokens, -1, axis=1)
    )
    wanted = (columns < count) & (following >= 0) & (token_positions(batch) + 1 >= first_scored[:, None])
    work = partial(score_prompt, params, config, hidden, following, wanted, n_top)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(work))
    return jax.lax.cond(jnp.any(wanted), work, lambda: zeros)


def pool_prompts(batch: Batch, hidden: Float[Array, "B T D"]) -> Pooled:
    """Pool the hidden states of a chunk's rows. Returns zeros if no row is pooled."""
    work = partial(pool_hidden_states, hidden, batch.count)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(work))
    return jax.lax.cond(jnp.any(batch.next_prompt_token == POOLED), work, lambda: zeros)


def score_prompt(
    params: Decoder,
    config: ModelConfig,
    hidden: Float[Array, "B T D"],
    following: Int[Array, "B T"],
    wanted: Bool[Array, "B T"],
    n_top: int = MAX_LOGPROBS,
) -> Scores:
    """Score the token after each wanted position, one tile of positions at a time. Other positions have
    arbitrary scores.

    All shapes of an engine have the same tile, because products of another number of rows have other bits.
    """
    B, T = hidden.shape[:2]
    rows, tile = B * T, score_tile_size(config.vocab_size)
    flat, targets = hidden.reshape(rows, -1), following.reshape(rows)
    num_tiles = -(-rows // tile)
    padding = jnp.arange(rows, num_tiles * tile, dtype=jnp.int32)

    def score_one_tile(i: Int[Array, ""], scores: Scores, order: Int[Array, " padded"]) -> Scores:
        # gather and scatter: for a slice at the loop's counter, XLA on a GPU would synchronise with the host
        tile_rows = order[i * tile + jnp.arange(tile, dtype=jnp.int32)]
        existing_rows = jnp.minimum(tile_rows, rows - 1)
        tile_scores = score_tokens(
            compute_logits(params, config, flat[existing_rows]), targets[existing_rows], n_top
        )
        return jax.tree.map(
            lambda all, x: all.at[tile_rows].set(x, mode="drop", unique_indices=True), scores, tile_scores
        )

    def score_tiles(count: Any, order: Int[Array, " rows"]) -> Scores:
        order = jnp.concatenate([order, padding])
        return jax.lax.fori_loop(0, count, partial(score_one_tile, order=order), empty_scores(rows, n_top))

    def score_wanted(wanted: Bool[Array, " rows"]) -> Scores:
        """Score wanted positions first, and skip tiles without any (on a CPU)."""
        count = -(-jnp.sum(wanted, dtype=jnp.int32) // tile)
        return score_tiles(count, jnp.argsort(~wanted, stable=True).astype(jnp.int32))

    def score_all(wanted: Bool[Array, " rows"]) -> Scores:
        """Score all tiles: the loop has a static length, which an accelerator needs."""
        return score_tiles(num_tiles, jnp.arange(rows, dtype=jnp.int32))

    scored = jax.lax.platform_dependent(wanted.reshape(rows), cpu=score_wanted, default=score_all)
    return jax.tree.map(lambda x: x.reshape(B, T, *x.shape[1:]), scored)


def score_tile_size(V: int) -> int:
    """Return the number of positions whose logits exist at once, for a vocabulary of V tokens."""
    return max(tile for tile in SCORE_TILES if tile == SCORE_TILES[0] or 4 * tile * V <= SCORE_BYTES)
