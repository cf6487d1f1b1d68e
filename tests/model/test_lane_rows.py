"""An embedding with whole lanes looks up the same rows, and goes back as it came."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.models import RANDOM
from cases.targets import found_target
from cases.weights import drawn
from jax.sharding import SingleDeviceSharding

from duetto import LLM, SamplingParams
from duetto.model.config import ModelConfig
from duetto.model.transformer import Decoder, decoder_spec
from duetto.model.weights import device_forms as forms
from duetto.model.weights.device_forms import (
    DeviceForms,
    PaddedEmbedding,
    convert_to_device_forms,
    pad_embedding_rows,
    restore_params,
)
from duetto.serve.planner.roofline.program_facts import read_program_facts

CONFIG = replace(RANDOM["tiny"], vocab_size=384, layers=RANDOM["tiny"].layers[:1])  # of width 48
SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 64, "max_prefill_tokens": 32}


def params_of(config: ModelConfig = CONFIG) -> Decoder:
    return drawn(decoder_spec(config))


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """This CPU is taken for a TPU."""
    monkeypatch.setattr(forms, "is_tpu", lambda _: True)


def test_rows_are_those_of_the_embedding(tpu: None):
    params = params_of()
    found = convert_to_device_forms(params).embed
    tokens = jnp.array([[3, 0], [383, 3]])
    assert isinstance(found, PaddedEmbedding) and found.array.shape == (384, 128)
    assert (found.shape, found.dtype, found.sharding) == (
        params.embed.shape,
        params.embed.dtype,
        params.embed.sharding,
    )
    assert np.array_equal(found[tokens], params.embed[tokens])
    assert np.array_equal(restore_params(replace(params, embed=found)).embed, params.embed)


def test_shapes_are_those_of_arrays(tpu: None):
    params = params_of()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    found, real = pad_embedding_rows(shapes).embed, pad_embedding_rows(params).embed
    assert jax.tree.structure(found) == jax.tree.structure(real)
    assert (found.array.shape, found.array.sharding) == (real.array.shape, real.array.sharding)
    assert found.original == shapes.embed


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, vocab_size=40),  # a TPU lays it out by rows
        replace(CONFIG, tied_embeddings=True),
    ],
)
def test_other_embeddings_are_unchanged(tpu: None, config: ModelConfig):
    params = params_of(config)
    assert convert_to_device_forms(params).embed is params.embed


def test_lane_rows_are_for_tpus_only():
    params = params_of()
    assert convert_to_device_forms(params).embed is params.embed


@pytest.mark.full
def test_an_engine_serves_the_same_tokens_and_takes_other_weights(
    tpu: None, few_shapes: None, monkeypatch: pytest.MonkeyPatch
):
    params, asked = params_of(), SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
    other = jax.tree.map(lambda x: x * 2, params)

    def answers(llm: LLM) -> list[Any]:
        found = llm.generate([[5, 383, 7], list(range(40))], asked, use_tqdm=False)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in found]

    with LLM.from_params(CONFIG, params, **SIZES) as llm:
        assert isinstance(llm.engine.params.embed, PaddedEmbedding)
        assert isinstance(
            convert_to_device_forms(other, DeviceForms.from_params(llm.engine.params)).embed, PaddedEmbedding
        )
        assert jax.tree.structure(llm.params) == jax.tree.structure(params)
        found = [answers(llm)]
        llm.update_params(other)
        found.append(answers(llm))
    monkeypatch.setattr(forms, "is_column_major", lambda _: False)  # rows of the cache still have zeros
    with LLM.from_params(CONFIG, params, **SIZES) as llm:
        expected = [answers(llm)]
        llm.update_params(other)
        expected.append(answers(llm))
    assert found == expected


@pytest.mark.extras
@pytest.mark.parametrize("padded", [True, False])
def test_a_tpu_copies_the_embedding_without_them(padded: bool):
    """gpt-oss-20b's: a step looks up 64 rows of 201088."""
    (device,) = found_target("v6e:1x1").devices
    where = SingleDeviceSharding(device)
    own = jax.ShapeDtypeStruct((201_088, 2880), jnp.bfloat16, sharding=where)
    tokens = jax.ShapeDtypeStruct((64,), jnp.int32, sharding=where)
    embed = pad_embedding_rows(replace(Decoder(own, (), None), head=own)).embed if padded else own
    found = read_program_facts(
        jax.jit(lambda embed, tokens: embed[tokens] * 2).lower(embed, tokens).compile()
    )
    assert (found.bytes < 4e6) == padded == (found.moved == ())
