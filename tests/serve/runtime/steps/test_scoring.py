"""Scores of a prompt's positions: the same bits wherever they stand, and bounded logits."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suite.fixtures import random_model
from suite.marks import full_if

from duetto.model.transformer import decoder_spec
from duetto.sampling.params import NO_TOKEN
from duetto.serve.runtime.steps.scoring import (
    SCORE_BYTES,
    SCORE_TILES,
    score_prompts,
    score_tile_size,
)

pytestmark = pytest.mark.as_served


@pytest.mark.full
@full_if(lambda model: model != "tiny")
def test_wanted_scores_alone_are_those_of_all(model):
    """Of a position that is wanted, whatever else is; and a row's own, wherever it stands."""
    config, params = model.config, model.params
    draw = np.random.default_rng(0)
    hidden = jnp.array(draw.standard_normal((3, 40, config.hidden_size)), params.embed.dtype)
    following = jnp.array(draw.integers(0, config.vocab_size, (3, 40)), jnp.int32)
    work = jax.jit(partial(score_prompts, params, config))
    all_of_them = jax.tree.leaves(work(hidden, following))
    wanted = draw.random((3, 40)) < 0.3
    wanted_tokens = jnp.where(wanted, following, NO_TOKEN)
    few = jax.tree.leaves(work(hidden, wanted_tokens))
    turned = jax.tree.leaves(work(hidden[::-1], wanted_tokens[::-1]))
    short = jax.tree.leaves(work(hidden[:1, :7], following[:1, :7]))
    for x, y, z, w in zip(all_of_them, few, turned, short, strict=True):
        assert np.array_equal(np.asarray(x)[wanted], np.asarray(y)[wanted])
        assert np.array_equal(np.asarray(x)[wanted], np.asarray(z)[::-1][wanted])
        assert np.array_equal(np.asarray(x)[:1, :7], np.asarray(w))


@pytest.mark.parametrize("V", [1000, 49152, 262144, 1 << 20])
def test_logits_of_scored_positions_are_bounded(V):
    tile = score_tile_size(V)
    assert tile in SCORE_TILES and (4 * tile * V <= SCORE_BYTES or tile == min(SCORE_TILES))


def test_a_scored_prefill_holds_the_logits_of_a_tile():
    """As compiled: a few copies of a tile's, not of all 512 positions."""
    config = replace(random_model("tiny").config, vocab_size=32768)
    spec = decoder_spec(config)
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), spec, is_leaf=lambda x: hasattr(x, "axes")
    )
    hidden = jax.ShapeDtypeStruct((16, 32, config.hidden_size), jnp.float32)
    following = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    lowered = jax.jit(lambda *x: score_prompts(x[0], config, *x[1:])).lower(params, hidden, following)
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 4 * (4 * score_tile_size(32768) * 32768) < 4 * 512 * 32768
