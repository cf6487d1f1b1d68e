"""Projections that lie transposed: which they are, that their products are the array's, and the way back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.weights import MIXED, PRODUCTS, drawn, product, random
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from duetto.model.config import ModelConfig
from duetto.model.transformer import decoder_spec
from duetto.model.tree import has_instance, leaves_by_path, shapes_from_specs
from duetto.model.weights.device_forms import DeviceForms, convert_to_device_forms, restore_params
from duetto.model.weights.fixed_tiles import FixedTiled, with_fixed_tiles
from duetto.model.weights.transposed import (
    Transposed,
    transpose_params,
    transpose_weight,
)

LEADING = {"q": 1, "o": 2, "down": 1}


def narrow(*shape: int, seed: int = 0) -> jax.Array:
    return random(*shape, seed=seed, dtype=jnp.bfloat16)


@pytest.mark.parametrize("dtype", [None, jnp.float32])
@pytest.mark.parametrize("name", LEADING)
def test_a_product_is_the_arrays(name: str, dtype: Any):
    equation, left, right = PRODUCTS[name]
    x, w = narrow(*left), narrow(*right, seed=1)
    other = jax.jit(transpose_weight, static_argnums=1)(w, LEADING[name])
    one, two = (product(equation, x, w, dtype) for w in (w, other))
    assert one.dtype == two.dtype and one.shape == two.shape
    one, two = (np.asarray(y, np.float32) for y in (one, two))
    np.testing.assert_allclose(one, two, rtol=0.01, atol=0.02)
    assert other.original.tobytes() == w.tobytes() and other.ragged_dot_shapes == (w.shape,)


def test_only_dense_16_bit_projections_on_one_cpu_are_transposed():
    where = SingleDeviceSharding(jax.devices("cpu")[0])
    params = shapes_from_specs(decoder_spec(MIXED), jnp.bfloat16, where)
    found = {
        path.removesuffix(".array")
        for path in leaves_by_path(transpose_params(params))
        if path.endswith(".array")
    }
    assert {f"layers.0.attention.{name}" for name in "qkvo"} <= found
    assert {f"layers.0.ffn.{name}" for name in ("gate", "up", "down")} <= found
    assert "layers.1.ffn.shared.gate" in found
    assert not any(word in path for path in found for word in ("experts", "router", "embed", "head", "_up"))
    assert (
        transpose_params(transpose_params(params)) == transpose_params(params)
        and restore_params(transpose_params(params)) == params
    )
    mesh = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("tensor",)), PartitionSpec())
    on_mesh = transpose_params(shapes_from_specs(decoder_spec(MIXED), jnp.bfloat16, mesh))
    assert has_instance(on_mesh, Transposed)
    for unchanged in (
        shapes_from_specs(decoder_spec(MIXED), jnp.float32, where),
        shapes_from_specs(decoder_spec(MIXED), jnp.bfloat16),  # it is not known where
    ):
        assert transpose_params(unchanged) is unchanged


def test_transposing_frees_donated_weights_and_is_undone_exactly():
    params = drawn(decoder_spec(ModelConfig.uniform(32, 16, 32, 2, 2, 1, 8)), jnp.bfloat16)
    kept = jax.tree.map(np.asarray, params)
    there = transpose_params(params)
    assert not params.layers[0].attention.q.is_deleted()
    jax.tree.map(np.testing.assert_array_equal, restore_params(there), kept)
    jax.tree.map(np.testing.assert_array_equal, restore_params(transpose_params(params, donate=True)), kept)
    assert params.layers[0].attention.q.is_deleted() and not params.embed.is_deleted()


def test_new_weights_take_the_forms_of_those_before():
    params = drawn(decoder_spec(MIXED), jnp.bfloat16)
    served = with_fixed_tiles(transpose_params(params))
    found = convert_to_device_forms(params, DeviceForms.from_params(served))
    assert jax.tree.structure(found) == jax.tree.structure(served)
    assert isinstance(found.layers[0].attention.q, Transposed) and isinstance(found.head, FixedTiled)
    assert convert_to_device_forms(found, DeviceForms.from_params(served)) is found
