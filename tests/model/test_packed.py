"""Weights packed for duetto's CPU kernels: which they are, that their products are the array's, and the way
back."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.weights import MIXED, PRODUCTS, random
from jax.sharding import SingleDeviceSharding

from duetto.cpu_kernels.library import library, target
from duetto.model.layers import einsum
from duetto.model.transformer import decoder_spec
from duetto.model.tree import abstract, init, paths
from duetto.model.weights.packed import Packed, is_packed, kernels_in, pack, packed, unpacked
from duetto.model.weights.prepared import laid_out, prepared_as, unprepared
from duetto.model.weights.transposed import Transposed, transpose, transposed

pytestmark = pytest.mark.skipif(not library().isas, reason=library().refusal or "there are kernels")
LEADING = {"q": 1, "o": 2, "down": 1}
ISA = next(iter(library().isas), "")


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("name", LEADING)
def test_a_product_is_the_arrays(name: str, dtype: Any):
    equation, left, right = PRODUCTS[name]
    x, w = random(*left).astype(dtype), random(*right, seed=1).astype(dtype)
    other = pack(transpose(w, LEADING[name]), target("product", ISA))
    one, two = (jax.jit(lambda x, w: einsum(equation, x, w))(x, w) for w in (w, other))
    assert one.dtype == two.dtype and one.shape == two.shape
    np.testing.assert_allclose(one.astype(jnp.float32), two.astype(jnp.float32), rtol=0.01, atol=0.02)
    assert other.whole.tobytes() == w.tobytes() and other.factors == (w.shape,)


def test_dense_projections_and_the_head_are_packed_and_nothing_else():
    where = SingleDeviceSharding(jax.devices("cpu")[0])
    params = abstract(decoder_spec(MIXED), jnp.float32, where)
    found = {path.removesuffix(".array") for path in paths(packed(params, ISA)) if path.endswith(".array")}
    assert {f"layers.0.attention.{name}" for name in "qkvo"} <= found
    assert {f"layers.0.ffn.{name}" for name in ("gate", "up", "down")} | {"head"} <= found
    assert "layers.1.ffn.shared.gate" in found
    assert not any(word in path for path in found for word in ("experts", "router", "embed", "_up"))
    assert packed(packed(params, ISA), ISA) == packed(params, ISA)
    assert not is_packed(packed(abstract(decoder_spec(MIXED), jnp.float16, where), ISA))
    assert not is_packed(packed(abstract(decoder_spec(MIXED), jnp.bfloat16), ISA))  # it is not known where


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_way_back_has_the_weights_bits(dtype: Any, tied: bool):
    params = init(jax.random.key(0), decoder_spec(replace(MIXED, tied_embeddings=tied)), dtype)
    kept = jax.tree.map(np.asarray, params)
    jax.tree.map(np.testing.assert_array_equal, unpacked(packed(transposed(params), ISA)), kept)
    assert not params.layers[0].attention.q.is_deleted()
    jax.tree.map(np.testing.assert_array_equal, unpacked(packed(params, ISA, donate=True)), kept)
    assert params.layers[0].attention.q.is_deleted() and not params.embed.is_deleted()


def test_other_weights_take_the_form_of_those_that_are_served():
    params = init(jax.random.key(0), decoder_spec(MIXED), jnp.bfloat16)
    served = laid_out(params, cpu_kernels=True)
    assert kernels_in(served) == ISA and kernels_in(params) is None
    assert isinstance(served.layers[0].attention.q, Packed) and isinstance(served.head, Packed)
    assert jax.tree.structure(prepared_as(served, params)) == jax.tree.structure(served)
    assert jax.tree.structure(unprepared(served)) == jax.tree.structure(params)
    assert isinstance(laid_out(params, cpu_kernels=False).layers[0].attention.q, Transposed)
