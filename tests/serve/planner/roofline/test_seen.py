"""What a step reads of layers in chunks, of those that borrow keys, and of inputs of layers' own."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from cases.models import RANDOM

from duetto.kvcache.pages import row_bytes
from duetto.model.transformer import decoder_spec
from duetto.model.tree import paths
from duetto.serve.planner.roofline.floor import first_seen, inner_numbers, seen, share

CONFIG = RANDOM["borrowed"]
CHUNKED, WHOLE, BORROWED, _ = CONFIG.layers


def test_keys_that_a_query_sees_in_chunks():
    assert [seen(CHUNKED.mixer, keys) for keys in (3, 24, 25, 500)] == [3, 24, 12.5, 12.5]
    assert seen(WHOLE.mixer, 500) == 500
    assert first_seen(CHUNKED.mixer, np.array([0, 23, 24, 50])).tolist() == [0, 0, 24, 48]
    windowed = replace(CHUNKED.mixer, chunked=False)
    assert first_seen(windowed, np.array([50])).tolist() == [27]


def test_layers_that_borrow_keys_keep_none():
    assert row_bytes(CHUNKED, jnp.float32) == 2 * 2 * 8 * 4 and row_bytes(BORROWED, jnp.float32) == 0


def test_of_the_inputs_of_layers_only_a_row_is_read():
    specs = paths(decoder_spec(CONFIG))
    table = specs["inputs.embed"]
    assert share(CONFIG, "inputs.embed", 1) == 0.0 and share(CONFIG, "inputs.project", 1) == 1.0
    other = replace(CONFIG, layer_input=replace(CONFIG.layer_input, vocab_size=10 * table.shape[0]))
    assert inner_numbers(other) == inner_numbers(CONFIG)
    assert CONFIG.input_size == table.shape[1] * table.shape[2] == 48
