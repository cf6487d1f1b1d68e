"""Log-probabilities of prompts' tokens, from the hidden states of a prefill."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ....model.config import ModelConfig
from ....model.transformer import Decoder, compute_logits
from ....sampling.checks import MAX_LOGPROBS
from ....sampling.params import NO_TOKEN
from ....sampling.sample import Scores, empty_scores, score_tokens

SCORE_TILES = (8, 16, 32, 64)  # numbers of positions whose logits may exist at once
SCORE_BYTES = 64 << 20  # bytes of these logits in float32, at most


def score_prompts(
    params: Decoder,
    config: ModelConfig,
    hidden: Float[Array, "B T D"],
    following: Int[Array, "B T"],
    n_top: int = MAX_LOGPROBS,
) -> Scores:
    """Score the token `following` each position, one tile of positions at a time. Positions that NO_TOKEN
    follows have arbitrary scores.

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

    scored = jax.lax.platform_dependent(targets != NO_TOKEN, cpu=score_wanted, default=score_all)
    return jax.tree.map(lambda x: x.reshape(B, T, *x.shape[1:]), scored)


def score_tile_size(V: int) -> int:
    """Return the number of positions whose logits exist at once, for a vocabulary of V tokens."""
    return max(tile for tile in SCORE_TILES if tile == SCORE_TILES[0] or 4 * tile * V <= SCORE_BYTES)
