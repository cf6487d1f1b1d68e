"""Products of codes with codes: exact sums, scales of each row by itself."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suite.marks import full

from duetto.cpu_kernels.library import load_library
from duetto.model.layers import einsum, einsums
from duetto.model.transformer import decoder_spec
from duetto.model.tree import has_instance, init_params, map_instances, paths_and_leaves
from duetto.model.weights.compression.compress import convert_weight_form, quantise_inputs, quantize_params
from duetto.model.weights.cpu.panels import Packed
from duetto.model.weights.device_forms import DeviceForms, convert_to_device_forms, restore_params
from duetto.model.weights.input_quantised import InputQuantised, quantise_rows
from duetto.model.weights.quant import Quantised, quantise_weight
from duetto.model.weights.schemes import ACTIVATION_SCHEMES
from tests.cases.models import RANDOM

EQUATIONS = {  # by name: shapes of x and of the weight, and the axes that a product sums over
    "...d,df->...f": ((5, 3, 40), (40, 24), (-2,)),
    "btd,dnh->btnh": ((2, 3, 40), (40, 3, 8), (-3,)),
    "btnh,nhd->btd": ((2, 3, 4, 10), (4, 10, 24), (-3, -2)),
}


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weight(equation: str, scheme: str = "int8") -> InputQuantised:
    _, shape, summed = EQUATIONS[equation]
    quantised = quantise_weight(jnp.asarray(random(*shape, seed=1)), summed, scheme)
    assert isinstance(quantised, Quantised)
    return InputQuantised(quantised, "fp8" if scheme == "fp8" else "int8")


def numpy_product(x: np.ndarray, w: InputQuantised, inputs: int) -> np.ndarray:
    """The definition: codes by one inverse a row, sums of int64, scales of outputs and then of rows. Groups
    of inputs are scaled, and added up one after the other."""
    K, f32 = int(np.prod(w.shape[:inputs])), np.float32
    rows = x.astype(f32).reshape(-1, K)
    largest = np.abs(rows).max(1, keepdims=True)
    inverse = np.where(largest > 0, f32(127) / np.where(largest > 0, largest, 1), f32(0))
    codes = np.asarray(w.weight.signed_codes(), np.int64).reshape(K, -1)
    scales = np.asarray(w.weight.scales).astype(f32).reshape(-1, codes.shape[1])
    total, group = f32(0), K // len(scales)
    for i, scale in enumerate(scales):
        part = slice(i * group, (i + 1) * group)
        total = total + (np.round(rows * inverse).astype(np.int64)[:, part] @ codes[part]).astype(f32) * scale
    product = total * (largest * f32(1 / 127))
    return product.reshape(*x.shape[: x.ndim - inputs], *w.shape[inputs:])


@pytest.mark.parametrize("equation", EQUATIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, full(jnp.bfloat16)])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_products_equal_the_definition_bit_by_bit(equation, dtype, scheme):
    shape, _, summed = EQUATIONS[equation]
    x, w = jnp.asarray(random(*shape), dtype), weight(equation, scheme)
    expected = jnp.asarray(numpy_product(np.asarray(x), w, len(summed))).astype(dtype)
    for multiply in (einsum, jax.jit(einsum, static_argnums=0)):
        product = multiply(equation, x, w)
        assert product.dtype == dtype
        np.testing.assert_array_equal(product, expected)
    assert einsum(equation, x, w, jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("equation", EQUATIONS)
def test_products_are_near_those_of_the_weight(equation):
    shape, _, _ = EQUATIONS[equation]
    x, bounds = jnp.asarray(random(*shape)), {"int8": 0.02, "fp8": 0.06, "int4": 0.02}
    for scheme, bound in bounds.items():
        w = weight(equation, scheme)
        exact = einsum(equation, x, w.original.dequantise(jnp.float32))
        error = jnp.linalg.norm(einsum(equation, x, w) - exact) / jnp.linalg.norm(exact)
        assert 0 < error < bound


@pytest.mark.parametrize("count", [1, 2, 8, 33, 64])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_row_has_its_bits_among_any_others(count, scheme):
    w, rows = weight("...d,df->...f", scheme), random(64, 40)
    together = jax.jit(einsum, static_argnums=0)("...d,df->...f", rows, w)
    for first in (0, 64 - count):
        some = jax.jit(einsum, static_argnums=0)("...d,df->...f", rows[first : first + count], w)
        np.testing.assert_array_equal(some, together[first : first + count])


def test_rows_of_zeros_of_the_smallest_and_of_no_numbers():
    rows = np.stack([random(40) * scale for scale in (0, 1e-42, 1e-37, 1e30, np.nan, np.inf, 1)])
    rows[4] = random(40)
    rows[4, 3] = np.nan
    w = weight("...d,df->...f")
    product = np.asarray(einsum("...d,df->...f", jnp.asarray(rows), w))
    assert not product[:3].any() and np.isfinite(product[3]).all() and product[3].any()
    assert not np.isfinite(product[4:6]).any()
    np.testing.assert_array_equal(product[6], einsum("...d,df->...f", jnp.asarray(rows[6:]), w)[0])


@pytest.mark.parametrize("scheme", ACTIVATION_SCHEMES)
def test_largest_magnitudes_become_the_largest_code(scheme):
    codes = quantise_rows(jnp.asarray(random(6, 4, 10)), 2, ACTIVATION_SCHEMES[scheme])
    assert codes.scales.shape == (6, 1, 1)
    largest = np.abs(np.asarray(codes.values, np.float32)).max((1, 2))
    np.testing.assert_array_equal(largest, np.full(6, ACTIVATION_SCHEMES[scheme].max_code))


def test_codes_are_of_rounded_inputs_in_any_program():
    """Of a program that multiplies in float32, and would code its products before they are rounded."""
    x, gain = (jnp.asarray(random(16, 96, seed=seed), jnp.bfloat16) for seed in (0, 1))

    def code_rows(x: jax.Array) -> Any:
        return quantise_rows(x, 1, ACTIVATION_SCHEMES["int8"])

    apart = jax.jit(code_rows)(jax.jit(jnp.multiply)(x, gain))
    together = jax.jit(lambda x, gain: code_rows(x * gain))(x, gain)
    jax.tree.map(np.testing.assert_array_equal, together, apart)


# ---------------------------------------------------------------- trees


def params(name: str, scheme: str | None = "int8") -> Any:
    drawn = init_params(jax.random.key(0), decoder_spec(RANDOM[name]))
    return convert_weight_form(drawn, scheme, jnp.float32)


def converted_paths(tree: Any) -> set[str]:
    found = paths_and_leaves(tree, InputQuantised)
    return {path.removeprefix("layers.") for path, x in found if isinstance(x, InputQuantised)}


def test_projections_of_attention_dense_layers_and_experts_are_converted():
    latent, windows = quantise_inputs(params("latent"), "int8"), quantise_inputs(params("windows"), "int8")
    attention = {f"attention.{name}" for name in ("q_down", "q_up", "kv_down", "o")}
    expected = {f"0.{name}" for name in (*attention, "ffn.gate", "ffn.up", "ffn.down")}
    inner = {f"ffn.{kind}.{name}" for kind in ("shared", "experts") for name in ("gate", "up", "down")}
    expected |= {f"1.{name}" for name in (*attention, *inner)}
    assert converted_paths(latent) == expected
    inner = {path for path in converted_paths(windows) if path[2:].startswith("ffn")}
    dense = {"0.ffn.gate", "0.ffn.up", "0.ffn.down", "1.ffn.up", "1.ffn.down"}
    assert inner == dense | {f"2.ffn.experts.{name}" for name in ("gate", "up", "down")}


def test_forms_are_read_from_parameters_and_taken_back():
    plain = params("tiny")
    served = convert_to_device_forms(plain, DeviceForms(activations="int8"))
    assert DeviceForms.from_params(served).activations == "int8"
    assert convert_to_device_forms(served, DeviceForms.from_params(served)) == served
    jax.tree.map(np.testing.assert_array_equal, restore_params(served), plain)
    assert not has_instance(restore_params(served), InputQuantised)
    assert convert_weight_form(served, "int8", jnp.float32) is served
    assert jax.tree.structure(served) != jax.tree.structure(plain)
    assert quantise_inputs(plain, None) is plain


@pytest.mark.parametrize(
    ("scheme", "activations", "reason"),
    [
        (None, "int8", "the model has no quantised projections; set quantization='int8'"),
        ("int4", "fp8", r"layers\.0\.attention\.q has int4 codes \[48, 6, 8\].*14 of 14 .*expected fp8"),
        ("int8", "fp8", r"layers\.0\.attention\.q has int8 codes .*expected fp8 codes with a scale for each"),
    ],
)
def test_codes_that_no_product_takes_are_refused_by_path(scheme, activations, reason):
    with pytest.raises(ValueError, match=rf"activations='{activations}' is not allowed: {reason}"):
        quantise_inputs(params("tiny", scheme), activations)


def test_experts_in_blocks_are_refused_by_path():
    """Beside projections that may. Inputs of experts of four bits stay as they are."""
    plain, four = params("windows"), params("windows", "int4").layers[2].ffn.experts
    blocks = map_instances(four, Quantised, lambda w: Quantised(jnp.zeros(w.shape, jnp.int8), w.scales))

    def with_experts(experts: Any) -> Any:
        layer = replace(plain.layers[2], ffn=replace(plain.layers[2].ffn, experts=experts))
        return quantise_inputs(replace(plain, layers=(*plain.layers[:2], layer)), "int8")

    reason = r"layers\.2\.ffn\.experts\.gate has int8 codes \[4, 48, 24\] .*3 of 20 weights"
    with pytest.raises(ValueError, match=reason):
        with_experts(blocks)
    coded = with_experts(four).layers[2]
    assert not has_instance(coded.ffn.experts, InputQuantised) and has_instance(coded, InputQuantised)


def test_scales_of_inputs_and_zeros_are_refused():
    def refused(change: Any, scheme: str = "int8") -> None:
        expected = "expected int8 codes with a scale for each output or int4 codes with scales for groups"
        with pytest.raises(ValueError, match=expected):
            quantise_inputs(map_instances(params("tiny", scheme), Quantised, change), "int8")

    refused(lambda w: Quantised(w.values, jnp.ones(w.shape), None, "int8"))
    refused(lambda w: Quantised(w.values, w.scales, jnp.zeros(w.scales.shape, jnp.int8), "int8"))
    refused(lambda w: replace(w, zeros=jnp.zeros(w.scales.shape, jnp.int8)), "int4")
    refused(lambda w: replace(w, scales=jnp.ones((1,) * w.scales.ndim)), "int4")


def test_abstract_parameters_are_checked_like_arrays():
    shapes = jax.eval_shape(lambda: params("tiny"))
    assert converted_paths(quantise_inputs(shapes, "int8")) == converted_paths(
        quantise_inputs(params("tiny"), "int8")
    )
    with pytest.raises(ValueError, match="no quantised projections"):
        quantise_inputs(jax.eval_shape(lambda: params("tiny", None)), "int8")


def test_several_products_of_one_input_equal_single_ones():
    x, w = jnp.asarray(random(2, 3, 40)), weight("btd,dnh->btnh")
    products = jax.jit(lambda x: einsums("btd,dnh->btnh", x, (w, None, w)))(x)
    assert products[1] is None
    for product in (products[0], products[2]):
        np.testing.assert_array_equal(product, einsum("btd,dnh->btnh", x, w))


def test_quantised_projections_alone_are_converted():
    tree = quantize_params(init_params(jax.random.key(0), decoder_spec(RANDOM["tiny"])), "int8")
    assert len(converted_paths(quantise_inputs(tree, "int8"))) == 14


@pytest.mark.skipif(not load_library().isas, reason=load_library().refusal or "there are kernels")
@pytest.mark.parametrize("dtype", [jnp.float32, full(jnp.bfloat16)])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_kernels_of_a_cpu_have_the_bits_of_xla(dtype, scheme):
    """Sums of integers are the same by both; so are the scales behind them."""
    given = jax.tree.map(lambda x: x.astype(dtype), params("tiny", None))
    forms = DeviceForms(cpu_kernels=True, activations="int8")
    plain = convert_weight_form(given, scheme, dtype)
    coded, served = quantise_inputs(plain, "int8"), convert_to_device_forms(plain, forms)
    packed, expected = served.layers[1].ffn.down, coded.layers[1].ffn.down
    assert isinstance(packed, Packed) and packed.activations == "int8"
    x = jnp.asarray(random(9, 96), dtype)
    for out in (dtype, jnp.float32):
        np.testing.assert_array_equal(
            jax.jit(einsum, static_argnums=(0, 3))("...f,fd->...d", x, packed, out),
            jax.jit(einsum, static_argnums=(0, 3))("...f,fd->...d", x, expected, out),
        )
    half = jnp.asarray(random(3, 96), jnp.float16)  # which kernels do not take
    np.testing.assert_array_equal(*(einsum("...f,fd->...d", half, w) for w in (packed, expected)))
    assert DeviceForms.from_params(served).activations == "int8"
    assert convert_to_device_forms(served, DeviceForms.from_params(served)) is served
    jax.tree.map(np.testing.assert_array_equal, restore_params(served), plain)
    assert jax.tree.structure(restore_params(served)) == jax.tree.structure(plain)
