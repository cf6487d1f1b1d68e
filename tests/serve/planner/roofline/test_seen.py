"""What a step reads of layers in chunks, of those that borrow keys, and of inputs of layers' own."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from cases.models import RANDOM

from duetto.kvcache.pages import layer_token_bytes
from duetto.model.transformer import decoder_spec
from duetto.model.tree import leaves_by_path
from duetto.serve.planner.roofline.floor import (
    active_param_count,
    attended_keys,
    first_attended_key,
    param_read_share,
)

CONFIG = RANDOM["borrowed"]
CHUNKED, WHOLE, BORROWED, _ = CONFIG.layers


def test_keys_that_a_query_sees_in_chunks():
    assert [attended_keys(CHUNKED.mixer, keys) for keys in (3, 24, 25, 500)] == [3, 24, 12.5, 12.5]
    assert attended_keys(WHOLE.mixer, 500) == 500
    assert first_attended_key(CHUNKED.mixer, np.array([0, 23, 24, 50])).tolist() == [0, 0, 24, 48]
    windowed = replace(CHUNKED.mixer, chunked=False)
    assert first_attended_key(windowed, np.array([50])).tolist() == [27]


def test_layers_that_borrow_keys_keep_none():
    assert (
        layer_token_bytes(CHUNKED, jnp.float32) == 2 * 2 * 8 * 4
        and layer_token_bytes(BORROWED, jnp.float32) == 0
    )


def test_of_the_inputs_of_layers_only_a_row_is_read():
    specs = leaves_by_path(decoder_spec(CONFIG))
    table = specs["inputs.embed"]
    assert (
        param_read_share(CONFIG, "inputs.embed", 1) == 0.0
        and param_read_share(CONFIG, "inputs.project", 1) == 1.0
    )
    other = replace(CONFIG, layer_input=replace(CONFIG.layer_input, vocab_size=10 * table.shape[0]))
    assert active_param_count(other) == active_param_count(CONFIG)
    assert CONFIG.layer_input_size == table.shape[1] * table.shape[2] == 48
