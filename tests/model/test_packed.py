"""Weights packed for duetto's CPU kernels: which they are, that their products are the array's, and the way
back."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.trained import MODELS
from cases.weights import EXPERTS, MIXED, PRODUCTS, drawn, random
from jax.sharding import SingleDeviceSharding
from suite.marks import full

from duetto.cpu_kernels.library import ffi_target_name, load_library
from duetto.model.config import Experts
from duetto.model.experts import MoE, run_moe
from duetto.model.experts.mixture import has_cpu_expert_kernel
from duetto.model.ffn import score_output
from duetto.model.layers import einsum
from duetto.model.transformer import decoder_spec
from duetto.model.tree import leaves_by_path, shapes_from_specs
from duetto.model.weights.compression.compress import convert_weight_form, quantize_params
from duetto.model.weights.cpu.packed import (
    can_pack,
    kernel_isa,
    pack_params,
    pack_weight,
)
from duetto.model.weights.cpu.panels import Packed
from duetto.model.weights.device_forms import (
    DeviceForms,
    convert_to_device_forms,
    lay_out_params,
    restore_params,
)
from duetto.model.weights.quant import quantise_weight
from duetto.model.weights.transposed import Transposed, transpose_params, transpose_weight

pytestmark = pytest.mark.skipif(not load_library().isas, reason=load_library().refusal or "there are kernels")
LEADING = {"q": 1, "o": 2, "down": 1}
UNGATED = replace(EXPERTS, activation="relu2", gated=False)
ISA = next(iter(load_library().isas), "")


@pytest.mark.parametrize("dtype", [full(jnp.bfloat16), jnp.float32])
@pytest.mark.parametrize("name", LEADING)
def test_a_product_is_the_arrays(name: str, dtype: Any):
    equation, left, right = PRODUCTS[name]
    x, w = random(*left).astype(dtype), random(*right, seed=1).astype(dtype)
    other = pack_weight(name, transpose_weight(w, LEADING[name]), ffi_target_name("product", ISA))
    one, two = (jax.jit(lambda x, w: einsum(equation, x, w))(x, w) for w in (w, other))
    assert one.dtype == two.dtype and one.shape == two.shape
    np.testing.assert_allclose(one.astype(jnp.float32), two.astype(jnp.float32), rtol=0.01, atol=0.02)
    assert other.original.tobytes() == w.tobytes() and other.ragged_dot_shapes == (w.shape,)


def test_projections_experts_and_the_head_are_packed_and_nothing_else():
    where = SingleDeviceSharding(jax.devices("cpu")[0])
    params = shapes_from_specs(decoder_spec(MIXED), jnp.float32, where)
    found = {
        path.removesuffix(".array")
        for path in leaves_by_path(pack_params(params, ISA))
        if path.endswith(".array")
    }
    assert {f"layers.0.attention.{name}" for name in "qkvo"} <= found
    assert {f"layers.0.ffn.{name}" for name in ("gate", "up", "down")} | {"head"} <= found
    assert "layers.1.ffn.shared.gate" in found
    assert {f"layers.{i}.ffn.experts.{name}" for i in (1, 2) for name in ("gate", "up", "down")} <= found
    assert not any(word in path for path in found for word in ("router", "embed", "_up", "bias"))
    assert pack_params(pack_params(params, ISA), ISA) == pack_params(params, ISA)
    for unchanged in (
        shapes_from_specs(decoder_spec(MIXED), jnp.float16, where),
        shapes_from_specs(decoder_spec(MIXED), jnp.bfloat16),  # it is not known where
    ):
        assert pack_params(unchanged, ISA) is unchanged


def test_gates_and_inputs_of_layers_are_packed_and_come_back():
    for name, expected in {
        "gated": {"layers.0.attention.gate", "layers.0.ffn.output_gate", "layers.1.ffn.shared.output_gate"},
        "inputs": {"inputs.project", "layers.0.input.gate", "layers.0.input.down"},
    }.items():
        params = drawn(decoder_spec(MODELS[name]), jnp.float32)
        served = pack_params(params, ISA)
        assert {f"{path}.array" for path in expected} <= leaves_by_path(served).keys()
        jax.tree.map(np.testing.assert_array_equal, restore_params(served), params)
        assert jax.tree.structure(restore_params(served)) == jax.tree.structure(params)


@pytest.mark.parametrize("dtype", [full(jnp.bfloat16), jnp.float32])
def test_an_output_gate_has_the_score_of_its_array(dtype: Any):
    x, gate = random(3, 5, 64).astype(dtype), random(64, seed=1).astype(dtype)
    packed = pack_weight("output_gate", gate, ffi_target_name("product", ISA))
    found, expected = (jax.jit(score_output)(w, x) for w in (packed, gate))
    assert found.shape == expected.shape == (3, 5, 1) and found.dtype == expected.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [full(jnp.bfloat16), jnp.float32])
def test_unpacking_gives_the_bits_of_the_weights(dtype: Any, tied: bool):
    params = drawn(decoder_spec(replace(MIXED, tied_embeddings=tied)), dtype)
    kept = jax.tree.map(np.asarray, params)
    jax.tree.map(
        np.testing.assert_array_equal, restore_params(pack_params(transpose_params(params), ISA)), kept
    )
    assert not params.layers[0].attention.q.is_deleted()
    jax.tree.map(np.testing.assert_array_equal, restore_params(pack_params(params, ISA, donate=True)), kept)
    assert params.layers[0].attention.q.is_deleted() and not params.embed.is_deleted()


@pytest.mark.parametrize("scheme", ["int8", full("int4")])
def test_codes_are_packed_and_come_back(scheme: Any):
    """Also as shapes alone. Where 4-bit codes are not paired along the inputs, they stay as they are."""
    params = quantize_params(drawn(decoder_spec(MIXED), jnp.bfloat16), scheme)
    done = pack_params(params, ISA)
    found = {path.removesuffix(".array") for path in leaves_by_path(done) if path.endswith(".array")}
    assert {*(f"layers.0.attention.{name}" for name in "qkvo"), "layers.0.ffn.down"} <= found
    assert "layers.1.ffn.experts.down" in found
    jax.tree.map(np.testing.assert_array_equal, restore_params(done), params)
    where = SingleDeviceSharding(jax.devices("cpu")[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), params)
    alone = pack_params(shapes, ISA)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), alone) == jax.tree.map(
        lambda x: (x.shape, x.dtype), done
    )
    assert jax.tree.structure(restore_params(alone)) == jax.tree.structure(params)


@pytest.mark.parametrize("dtype", [full(jnp.bfloat16), jnp.float32])
@pytest.mark.parametrize("scheme", [None, "int8", full("int4")])
def test_rows_of_experts_have_the_bits_of_a_product_alone(scheme: Any, dtype: Any):
    """Also beside an expert without rows, and one with small weights; rows that no expert has are zeros."""
    w = random(4, 64, 40).at[2, ::2].multiply(2.0**-40).astype(dtype)
    w = w if scheme is None else jax.jit(quantise_weight, static_argnums=(1, 2))(w, (-2,), scheme)
    assert can_pack("up", w, is_expert=True)
    made = pack_weight("up", w, ffi_target_name("product", ISA), is_expert=True)
    assert jax.tree.map(lambda x: x.shape, made.original) == jax.tree.map(lambda x: x.shape, w)
    jax.tree.map(np.testing.assert_array_equal, made.original, w)
    rows, sizes = random(50, 64, seed=2).astype(dtype), jnp.asarray([3, 0, 30, 14], jnp.int32)
    owner = jnp.repeat(jnp.arange(4), sizes, total_repeat_length=50)
    found = jax.jit(lambda w, x: w.ragged_dot(x, sizes, owner))(made, rows)
    for expert, (first, last) in {0: (0, 3), 2: (3, 33), 3: (33, 47)}.items():
        one = jax.tree.map(lambda x, e=expert: x[e], made)
        np.testing.assert_array_equal(found[first:last], einsum("md,df->mf", rows[first:last], one))
    assert not found[47:].any()


@pytest.mark.parametrize("dtype", [full(jnp.bfloat16), jnp.float32])
def test_a_mixture_with_packed_experts_is_that_of_the_arrays(dtype: Any):
    config = replace(MIXED, layers=(*MIXED.layers, replace(MIXED.layers[0], ffn=UNGATED)))
    params = drawn(decoder_spec(config), dtype)
    served = pack_params(params, ISA)
    x = random(2, 5, 64).astype(dtype)
    for i in (1, 2, 3):
        kind, plain, own = config.layers[i].ffn, params.layers[i].ffn, served.layers[i].ffn
        assert isinstance(kind, Experts) and isinstance(plain, MoE) and isinstance(own, MoE)
        assert has_cpu_expert_kernel(own.experts, dtype) and not has_cpu_expert_kernel(plain.experts, dtype)
        run = jax.jit(partial(run_moe, c=kind))
        one, two = run(plain, x=x), run(own, x=x)
        np.testing.assert_allclose(one.astype(jnp.float32), two.astype(jnp.float32), rtol=0.02, atol=0.02)
        alone = run(own, x=x[1:, 3:4])
        np.testing.assert_allclose(
            two[1:, 3:4].astype(jnp.float32), alone.astype(jnp.float32), rtol=1e-6, atol=1e-6
        )


def test_other_weights_take_the_form_of_those_that_are_served():
    params = drawn(decoder_spec(MIXED), jnp.bfloat16)
    served = lay_out_params(params, DeviceForms(cpu_kernels=True))
    assert kernel_isa(served) == ISA and kernel_isa(params) is None
    assert isinstance(served.layers[0].attention.q, Packed) and isinstance(served.head, Packed)
    found = convert_to_device_forms(params, DeviceForms.from_params(served))
    assert jax.tree.structure(found) == jax.tree.structure(served)
    assert jax.tree.structure(restore_params(served)) == jax.tree.structure(params)
    assert isinstance(lay_out_params(params, DeviceForms()).layers[0].attention.q, Transposed)


@pytest.mark.parametrize("form", ["int8", full("int4"), "dequantize"])
def test_packed_weights_keep_the_form_that_they_were_read_in(form: Any):
    """A folder's weights are quantised, then packed; its engine is asked for the same form."""
    params = drawn(decoder_spec(MIXED), jnp.bfloat16)
    read = lay_out_params(convert_weight_form(params, form, jnp.bfloat16), DeviceForms(cpu_kernels=True))
    assert convert_weight_form(read, form, jnp.bfloat16) is read


@pytest.mark.parametrize("dtype", [full(jnp.bfloat16), jnp.float32])
def test_a_tied_output_matrix_may_be_copied_in_codes(dtype: Any):
    """Its logits are those of the codes; weights served later get codes too, and the way back has none."""
    params = drawn(decoder_spec(replace(MIXED, tied_embeddings=True)), dtype)
    assert params.head is None
    served = pack_params(params, ISA, tied_head="int8")
    head = served.head
    assert isinstance(head, Packed) and head.array.dtype == jnp.int8 and head.is_tied
    x = random(5, 64).astype(dtype)
    found = jax.jit(lambda x, w: einsum("...d,vd->...v", x, w, jnp.float32))(x, head)
    exact = x.astype(jnp.float32) @ quantise_weight(params.embed.T, (-2,), "int8").dequantise(jnp.float32)
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-4)
    found = convert_to_device_forms(params, DeviceForms.from_params(served))
    assert jax.tree.structure(found) == jax.tree.structure(served)
    assert restore_params(served).head is None
