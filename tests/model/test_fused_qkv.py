"""Projections to queries, keys and values in one array: which are fused, their heads, and the way back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.models import RANDOM
from cases.weights import drawn
from suite.marks import full

from duetto.model.attention import Attention, FusedQKV, causal
from duetto.model.transformer import Decoder, decoder_spec, forward
from duetto.model.tree import has_instance, shapes_from_specs
from duetto.model.weights import device_forms as rules
from duetto.model.weights.device_forms import (
    DeviceForms,
    convert_to_device_forms,
    fuse_qkv,
    restore_params,
    split_qkv,
)


@pytest.fixture
def one_gpu(monkeypatch):
    monkeypatch.setattr(rules, "is_on_one_gpu", lambda params: True)


@pytest.fixture
def params() -> Decoder:
    return drawn(decoder_spec(RANDOM["tiny"]))


def projections(params: Decoder) -> Attention:
    """Of the first layer."""
    found = params.layers[0].attention
    assert isinstance(found, Attention)
    return found


@pytest.mark.parametrize("name", [full("tiny"), "windows"])  # the second with biases, norms and sinks
def test_hidden_states_are_the_same(name: str, one_gpu):
    config = RANDOM[name]
    params = drawn(decoder_spec(config))
    tokens = jnp.arange(2 * 9, dtype=jnp.int32).reshape(2, 9)
    places, lengths = jnp.broadcast_to(jnp.arange(9, dtype=jnp.int32), (2, 9)), jnp.full(2, 9, jnp.int32)
    run = jax.jit(lambda params: forward(params, config, tokens, places, causal, None, lengths)[0])
    assert has_instance(fuse_qkv(params), FusedQKV)
    # a CPU adds up in an order that follows from the number of outputs
    np.testing.assert_allclose(run(fuse_qkv(params)), run(params), rtol=2e-5, atol=2e-5)


def test_unfusing_gives_the_same_arrays(params, one_gpu):
    kept, shapes = (
        jax.tree.map(np.asarray, params),
        shapes_from_specs(decoder_spec(RANDOM["tiny"]), jnp.bfloat16),
    )
    jax.tree.map(np.testing.assert_array_equal, restore_params(fuse_qkv(params)), kept)
    assert projections(fuse_qkv(fuse_qkv(params))).q.heads == (6, 2, 2)
    assert projections(fuse_qkv(shapes)).q.array.shape == (48, 10, 8)
    assert split_qkv(fuse_qkv(shapes)) == shapes
    found, given = fuse_qkv(params, donate=True), projections(params)
    assert given.q.is_deleted() and given.v.is_deleted() and not given.o.is_deleted()
    jax.tree.map(np.testing.assert_array_equal, split_qkv(found), kept)


def test_new_weights_take_the_form_of_those_before(params, one_gpu):
    assert jax.tree.structure(
        convert_to_device_forms(params, DeviceForms.from_params(fuse_qkv(params)))
    ) == jax.tree.structure(fuse_qkv(params))
    assert convert_to_device_forms(params, DeviceForms.from_params(params)) is params


def test_layers_without_their_own_keys_are_not_fused(one_gpu):
    one = jnp.ones((4, 2, 2))
    for k, v in ((None, None), (one, None), (one, one.astype(jnp.bfloat16))):
        layer = Attention(one, k, v, one)
        assert fuse_qkv(layer) is layer and layer.has_keys == (k is not None)
    assert fuse_qkv(Attention(one, one, one, one)).has_keys


def test_projections_are_fused_on_one_gpu_only(params):
    assert fuse_qkv(params) is params
    shapes = shapes_from_specs(decoder_spec(RANDOM["tiny"]), jnp.bfloat16)
    assert fuse_qkv(shapes) is shapes
