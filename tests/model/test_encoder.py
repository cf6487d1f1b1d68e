"""Embeddings in the place of tokens' own."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.models import RANDOM
from cases.weights import drawn

from duetto.model.attention import causal
from duetto.model.config import ModelConfig
from duetto.model.embeddings.encoder import NO_ROW, InputEmbeddings
from duetto.model.transformer import decoder_spec, forward

TOKENS = np.array([[5, 17, 200, 31, 8], [1, 2, 3, 4, 5]], np.int32)
PLACES = np.array([[False, True, True, False, False], [False, False, False, False, True]])
MODELS = {
    "positions": replace(RANDOM["tiny"], learned_positions=True, embedding_scale=3.0),
    "layer inputs": RANDOM["borrowed"],
}


@partial(jax.jit, static_argnums=0)
def hidden(config: ModelConfig, params: Any, tokens: Any, embeddings: Any) -> Any:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return forward(params, config, tokens, positions, causal, embeddings=embeddings)[0]


def embeddings_of(config: ModelConfig, params: Any) -> InputEmbeddings:
    """The tokens' own, with those of other tokens around them in the pool."""
    pool = np.asarray(params.embed) * np.float32(config.embedding_scale)
    return InputEmbeddings(np.where(PLACES, TOKENS, NO_ROW).astype(np.int32), pool)


def test_embeddings_of_tokens_are_as_the_tokens():
    config = MODELS["positions"]
    params = drawn(decoder_spec(config))
    found = hidden(config, params, np.where(PLACES, 9, TOKENS), embeddings_of(config, params))
    np.testing.assert_array_equal(found, hidden(config, params, TOKENS, None))


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_placeholders_change_nothing(config):
    """Inputs of layers look the padding token up in their place."""
    params = drawn(decoder_spec(config))
    embeddings = embeddings_of(config, params)
    one, two, pad = (hidden(config, params, np.where(PLACES, i, TOKENS), embeddings) for i in (9, 299, 0))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one, pad)
    assert (config.layer_input is not None) == (config is MODELS["layer inputs"])
