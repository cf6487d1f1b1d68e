"""What a step must compute and move where an indexer chooses the keys that are read."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from duetto.kvcache.pages import layer_token_bytes
from duetto.model.config import Dense, Latent, LayerKind, ModelConfig
from duetto.model.draft_pair import PairConfig
from duetto.model.kinds import Indexer
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline.floor import Demand, program_demand, weight_read_bytes
from duetto.serve.runtime.compiled.shapes import Shape
from duetto.serve.runtime.compiled.sizing import max_scratch_bytes

PLAIN = Latent(4, rank=32, nope_size=12, rope_size=8, value_size=10, query_rank=24)
KEYS, ROWS = 100, 8


def model(indexer: Indexer | None) -> ModelConfig:
    layer = LayerKind(replace(PLAIN, indexer=indexer), Dense(96))
    return ModelConfig(300, 48, (layer,), max_position=4096)


CHOOSES, ALL, NONE = model(Indexer(3, 16, KEYS)), model(Indexer(3, 16, None)), model(None)


def decode(config: ModelConfig, context: int) -> Demand:
    return program_demand(Shape("decode", ROWS, 1), config, "float32", context)


def test_beyond_the_chosen_keys_a_context_costs_their_scores_only():
    short, long = decode(CHOOSES, 200), decode(CHOOSES, 300)
    scoring = 2 * 3 * 17
    assert long.flops - short.flops == ROWS * 100 * scoring
    assert long.bytes - short.bytes == ROWS * 100 * 16 * 4
    within = decode(CHOOSES, 60).flops - decode(CHOOSES, 50).flops
    assert within == ROWS * 10 * (scoring + PLAIN.pair_flops)


def test_an_indexer_without_a_choice_costs_nothing_but_room():
    assert decode(ALL, 200) == decode(NONE, 200)
    assert CHOOSES.drop_unreached_limits(KEYS).layers == ALL.layers


def test_a_chunk_reads_what_its_queries_may_choose():
    """Many queries may choose all keys between them."""
    one, many = (program_demand(Shape("prefill", 1, T), CHOOSES, "float32", 4000).bytes for T in (1, 64))
    assert many - one > (4000 - KEYS) * 40 * 4


@pytest.mark.parametrize("kept, size", [("bfloat16", 2), ("float32", 4)])
def test_an_indexers_keys_count_in_the_bytes_per_token(kept, size):
    assert layer_token_bytes(CHOOSES.layers[0], kept) == (40 + 16) * size
    assert layer_token_bytes(ALL.layers[0], kept) == 40 * size


def test_scores_have_room_among_the_temporaries():
    options = EngineOptions(max_model_len=2048, max_prefill_tokens=128)
    whole, plain = (max_scratch_bytes(PairConfig(config), options, "float32") for config in (CHOOSES, ALL))
    assert whole - plain >= 4 * 128 * 2048


def test_weights_in_12_bits_are_read_as_such():
    plain, narrow = (jax.ShapeDtypeStruct((8, 32), dtype) for dtype in (jnp.bfloat16, jnp.uint16))
    assert weight_read_bytes([plain, narrow]) == 8 * 32 * (2 + 1.5)
