"""Scores of a prompt's positions: the same bits wherever they stand, and bounded logits."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suite.fixtures import random_model
from suite.marks import full_if

from duetto.kvcache.pages import POOLED, Batch
from duetto.model.pooling import pool_hidden_states
from duetto.model.transformer import decoder_spec
from duetto.sampling.params import NO_TOKEN
from duetto.serve.runtime.steps.scoring import (
    SCORE_BYTES,
    SCORE_TILES,
    pool_prompts,
    score_prompt,
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
    work = jax.jit(partial(score_prompt, params, config))
    all_of_them = jax.tree.leaves(work(hidden, following, jnp.ones((3, 40), bool)))
    wanted = draw.random((3, 40)) < 0.3
    few = jax.tree.leaves(work(hidden, following, jnp.array(wanted)))
    turned = jax.tree.leaves(work(hidden[::-1], following[::-1], jnp.array(wanted[::-1])))
    short = jax.tree.leaves(work(hidden[:1, :7], following[:1, :7], jnp.ones((1, 7), bool)))
    for x, y, z, w in zip(all_of_them, few, turned, short, strict=True):
        assert np.array_equal(np.asarray(x)[wanted], np.asarray(y)[wanted])
        assert np.array_equal(np.asarray(x)[wanted], np.asarray(z)[::-1][wanted])
        assert np.array_equal(np.asarray(x)[:1, :7], np.asarray(w))


@pytest.mark.parametrize("after, is_pooled", [([NO_TOKEN, 5], False), ([NO_TOKEN, POOLED], True)])
def test_hidden_states_are_pooled_where_a_prompt_is_embedded(after: list[int], is_pooled: bool):
    hidden = np.random.default_rng(0).standard_normal((2, 4, 8)).astype(np.float32)
    rows, count = np.zeros(2, np.int32), np.array([4, 3], np.int32)
    batch = Batch(np.zeros((2, 4), np.int32), rows, count, (), rows, np.array(after, np.int32))
    found = jax.tree.leaves(jax.jit(pool_prompts)(batch, hidden))
    expected = jax.tree.leaves(jax.jit(pool_hidden_states)(hidden, count))
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y if is_pooled else np.zeros_like(y))


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
    ints, wanted = (jax.ShapeDtypeStruct((16, 32), dtype) for dtype in (jnp.int32, bool))
    lowered = jax.jit(lambda *x: score_prompt(x[0], config, *x[1:])).lower(params, hidden, ints, wanted)
    analysis = lowered.compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes < 4 * (4 * score_tile_size(32768) * 32768) < 4 * 512 * 32768
