"""Weights in few bits: their products, how far they are from the weights, and what specs say of them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases.weights import (
    EXPERTS,
    MIXED,
    PRODUCTS,
    SINKING,
    dense,
    is_record,
    logits,
    product,
    random,
)
from jax.sharding import AbstractMesh, PartitionSpec
from suite.marks import full, full_if

from duetto.model.config import ModelConfig
from duetto.model.experts import MoE, run_experts_ragged, run_experts_tiled
from duetto.model.ffn import FFN
from duetto.model.sharding import make_shardings
from duetto.model.transformer import Decoder, decoder_spec
from duetto.model.tree import Spec, init_params, leaves_by_path, shapes_from_specs, tree_bytes
from duetto.model.weights.compression.compress import (
    CONTRACTED_AXES,
    CompressionPlan,
    compress,
    compress_weight,
    dequantise_weight,
    encode_weight,
    projection_plan,
)
from duetto.model.weights.nibbles import unpack_nibbles
from duetto.model.weights.quant import Quantised, quantise_weight
from duetto.model.weights.schemes import (
    ENCODED_SCHEMES,
    SCHEMES,
    WeightScheme,
    decode_e2m1,
    encode_by_channel,
    widen_bytes,
)


@full_if(lambda name, scheme: scheme != "int4" and name != "q")
@pytest.mark.parametrize("scheme", ENCODED_SCHEMES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_the_widened_weight(name: str, scheme: str):
    equation, left, right = PRODUCTS[name]
    x, record = random(*left), encode_weight(random(*right, seed=1), CONTRACTED_AXES[name], scheme)
    assert record.shape == right
    expected = np.einsum(equation, x, dequantise_weight(record, jnp.float32))
    np.testing.assert_allclose(product(equation, x, record), expected, rtol=1e-5, atol=1e-4)
    narrow = random(*left, dtype=jnp.bfloat16)
    wide, half = (product(equation, narrow, record, dtype) for dtype in (jnp.float32, None))
    assert wide.dtype == jnp.float32 and half.dtype == jnp.bfloat16
    np.testing.assert_allclose(
        np.asarray(half, np.float32), expected, atol=0.02 * float(np.abs(expected).max())
    )


@pytest.mark.parametrize("blocks", [(1, 5, 4), (4, 1, 1), (64, 1, 1), (2, 5, 1)], ids=str)
def test_scales_may_cover_blocks_of_any_axes(blocks: tuple[int, ...]):
    equation, left, right = PRODUCTS["q"]
    draw = np.random.default_rng(3)
    codes, zeros = (jax.device_put(draw.integers(-127, 128, shape, np.int8)) for shape in (right, blocks))
    for record in (Quantised(codes, random(*blocks)), Quantised(codes, random(*blocks), zeros)):
        whole = np.asarray(codes, np.float32)
        for array, less in ((record.zeros, np.subtract), (record.scales, np.multiply)):
            if array is not None:
                wide = np.asarray(array, np.float32)
                for axis, (size, n) in enumerate(zip(right, blocks, strict=True)):
                    wide = np.repeat(wide, size // n, axis)
                whole = less(whole, wide)
        np.testing.assert_array_equal(dequantise_weight(record, jnp.float32), whole)
        x = random(*left)
        np.testing.assert_allclose(
            product(equation, x, record), np.einsum(equation, x, whole), rtol=1e-4, atol=0.02
        )


@pytest.mark.parametrize("name", PRODUCTS)
def test_codes_are_as_near_as_they_can_be(name: str):
    w = np.asarray(random(*PRODUCTS[name][2], seed=1))
    axes = CONTRACTED_AXES[name]
    record = encode_weight(w, axes, "int8")
    scale = np.abs(w).max(axis=axes, keepdims=True) / 127
    np.testing.assert_allclose(record.scales, scale, rtol=1e-6)
    assert np.abs(np.asarray(dequantise_weight(record, jnp.float32)) - w).max() <= 0.5001 * scale.max()
    record = encode_weight(w, axes, "fp8")
    error = np.abs(np.asarray(dequantise_weight(record, jnp.float32)) - w)
    assert np.all(error <= np.abs(w) / 15 + np.asarray(record.scales) * 2.0**-9)
    assert np.isfinite(np.asarray(record.values, np.float32)).all()


def test_four_bits_by_hand():
    """A group's largest number becomes -8; neighbours along the summed axis share a byte, the even is low."""
    column = np.array([8.0, -4.0, 1.0, 0.4, 7.6, -8.0, 3.0, 0.0], np.float32)
    record = encode_weight(np.stack([column, 0 * column], 1), (-2,), "int4")
    assert record.scales.dtype == jnp.bfloat16 and record.scales.shape == (1, 2)
    assert record.values.shape == (4, 2) and record.values.dtype == jnp.uint8
    values, whole = np.asarray(record.values), np.asarray(dequantise_weight(record, jnp.float32))
    scale = float(np.asarray(record.scales)[0, 0])
    codes = np.clip(np.round(column / scale) + 8, 0, 15).astype(np.uint8)
    np.testing.assert_array_equal(values[:, 0], codes[0::2] | codes[1::2] << 4)
    np.testing.assert_array_equal(whole[:, 0], (codes.astype(np.float32) - 8) * scale)
    np.testing.assert_array_equal(whole[:, 1], 0)


@pytest.mark.parametrize("axis", [-3, -2, -1])
def test_four_bits_are_within_a_step_of_the_weight(axis: int):
    w = random(64, 32, 96)
    record = encode_weight(w, (axis,), "int4")
    assert record.values.size * 2 == w.size and record.scales.size * 32 == w.size
    step = np.repeat(np.abs(np.asarray(record.scales, np.float32)), 32, axis=axis)
    error = np.abs(np.asarray(dequantise_weight(record, jnp.float32)) - np.asarray(w))
    # the number opposite to the largest may lie beyond 7 steps
    assert (error <= 1.03 * step).all() and (error <= 0.501 * step).mean() > 0.98


def test_an_odd_axis_keeps_its_weight():
    assert quantise_weight(random(7, 4), (-2,), "int4") is None
    specs = decoder_spec(ModelConfig.uniform(8, 7, 12, 1, 2, 1, 4))
    ffn: Any = compress(specs, projection_plan("int4")).layers[0].ffn
    assert not is_record(ffn.up) and is_record(ffn.down)


def test_zeros_and_floats_of_four_bits():
    values = jax.device_put(np.arange(16, dtype=np.uint8).reshape(4, 4) * 16 + 3)
    scales = jax.device_put(np.full((2, 4), 0.5, np.float32))
    zeros = jax.device_put(np.array([[0, 1, 2, 16], [3, 4, 5, 6]], np.uint8))
    record = Quantised(values, scales, zeros, "int4", -2)
    codes = np.stack([np.asarray(values) % 16, np.asarray(values) // 16], 1).reshape(8, 4).astype(np.float32)
    expected = (codes - np.repeat(np.asarray(zeros, np.float32), 4, axis=0)) * 0.5
    np.testing.assert_array_equal(dequantise_weight(record, jnp.float32), expected)
    every = np.arange(16, dtype=np.uint8)
    np.testing.assert_array_equal(
        jax.jit(decode_e2m1)(every), every.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    )
    pairs = jax.jit(unpack_nibbles, static_argnums=1)(np.array([0x21, 0x43], np.uint8), 0)
    np.testing.assert_array_equal(pairs, [1, 2, 3, 4])


def test_a_new_scheme_is_one_record(monkeypatch: pytest.MonkeyPatch):
    encode = partial(encode_by_channel, dtype=jnp.int8, max_code=7.0)
    scheme = WeightScheme("few", widen_bytes, encode, random_values=(0.0, 2.0), code_deviation=2.0)
    monkeypatch.setitem(SCHEMES, scheme.name, scheme)
    w, x = random(16, 24, seed=1), random(3, 16)
    record = encode_weight(w, (-2,), scheme.name)
    assert jnp.abs(record.values).max() == 7
    np.testing.assert_allclose(
        product("td,df->tf", x, record), x @ dequantise_weight(record, jnp.float32), rtol=1e-5, atol=1e-5
    )
    specs = compress_weight(Spec(w.shape, ("model", "ffn")), (-2,), scheme.name)
    drawn = dequantise_weight(init_params(jax.random.key(0), specs), jnp.float32)
    assert drawn.shape == w.shape and 0.01 < drawn.std() < 0.04


@pytest.mark.parametrize(("how", "length"), [full("int8", 9), ("int4", 40)], ids=["absorbed", "expanded"])
def test_a_model_computes_with_the_widened_weights(mixed: Decoder, how: Any, length: int):
    tokens = np.random.default_rng(1).integers(0, MIXED.vocab_size, (2, length), np.int32)
    found = compress(mixed, projection_plan(how))
    assert sum(map(is_record, jax.tree.leaves(found, is_leaf=is_record))) == 7 + 12 + 7
    np.testing.assert_allclose(logits(found, MIXED, tokens), logits(dense(found), MIXED, tokens), atol=3e-5)


@full_if(lambda layer, how: layer == 2 or how == "int8")
@pytest.mark.parametrize("how", [*ENCODED_SCHEMES, 0.5])
@pytest.mark.parametrize("layer", [1, 2])
def test_both_ways_through_experts_agree(mixed: Decoder, how: Any, layer: int):
    kind = EXPERTS if layer == 1 else SINKING
    plain = mixed.layers[layer].ffn
    assert isinstance(plain, MoE)
    rule = CompressionPlan((("*", how),))
    x, chosen = random(11, 64), np.random.default_rng(2).integers(0, kind.count, (11, 2), np.int32)

    @jax.jit
    def outputs(plain: FFN, x: jax.Array, chosen: jax.Array) -> tuple[jax.Array, ...]:
        f = compress(plain, rule)
        either = run_experts_tiled(f, kind, x, chosen, 8), run_experts_ragged(f, kind, x, chosen)
        return *either, run_experts_tiled(plain, kind, x, chosen, 8)

    tiles, ragged, exact = map(np.asarray, outputs(plain.experts, x, chosen))
    np.testing.assert_allclose(tiles, ragged, atol=1e-5)
    assert np.abs(tiles - exact).max() > 1e-5


@full_if(lambda how: how in ("int8", "fp8"))
@pytest.mark.parametrize("how", [*ENCODED_SCHEMES, 0.5])
def test_specs_shapes_and_arrays_are_one_tree(mixed: Decoder, how: Any):
    """The structure and the memory plan exist before the weights do."""
    plan = projection_plan(how)
    arrays = jax.eval_shape(partial(compress, plan=plan), mixed)
    specs = compress(decoder_spec(MIXED), plan)

    def form(tree: Any) -> Any:
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    shapes = shapes_from_specs(specs, jnp.float32)
    assert form(arrays) == form(shapes)
    assert form(arrays) == form(jax.eval_shape(partial(init_params, specs=specs), jax.random.key(0)))
    assert form(arrays) == form(compress(shapes_from_specs(decoder_spec(MIXED), jnp.float32), plan))
    assert list(leaves_by_path(arrays)) == list(leaves_by_path(specs)) and tree_bytes(arrays) == tree_bytes(
        shapes
    )
    ends = ("a", "b") if how == 0.5 else ("values", "scales")
    assert {f"layers.0.attention.q.{end}" for end in ends} <= set(leaves_by_path(specs))


def test_random_quantised_weights_have_the_scale_of_their_specs():
    for how in (*ENCODED_SCHEMES, 0.5):
        record = compress_weight(Spec((256, 192), ("model", "ffn"), scale=0.02), (-2,), how)
        drawn = jax.jit(lambda key, record=record: dense(init_params(key, record)))(jax.random.key(0))
        assert 0.5 < np.std(np.asarray(drawn)) / 0.02 < 2, how


@pytest.mark.parametrize("how", [*ENCODED_SCHEMES, 0.5])
def test_records_are_split_like_their_weights(how: Any):
    config = ModelConfig.uniform(32, 64, 128, 1, 4, 2, 32)
    mesh = AbstractMesh((2,), ("tensor",))
    layer = make_shardings(compress(decoder_spec(config), projection_plan(how)), mesh).layers[0]
    attention, ffn = layer.attention, layer.ffn
    if how == 0.5:
        assert attention.q.b.spec == PartitionSpec(None, "tensor", None)
        assert ffn.down.a.spec == PartitionSpec("tensor", None)
        return
    assert attention.q.values.spec == attention.q.scales.spec == PartitionSpec(None, "tensor", None)
    assert attention.o.values.spec == PartitionSpec("tensor", None, None)
    # a scale of all heads together belongs to every device
    split = "tensor" if how == "int4" else None
    assert attention.o.scales.spec == PartitionSpec(split, None, None)
    assert ffn.down.scales.spec == PartitionSpec(split, None)


@pytest.mark.extras
def test_no_farther_from_the_weight_than_qwix():
    qwix = pytest.importorskip("qwix")
    w = random(64, 48)

    def error(wide: jax.Array) -> float:
        return float(jnp.sqrt(jnp.mean((wide - w) ** 2)))

    kinds = {"int8": (jnp.int8, {}), "fp8": (jnp.float8_e4m3fn, {}), "int4": (jnp.int4, {0: 32})}
    for scheme, (dtype, tiles) in kinds.items():
        theirs = qwix.dequantize(qwix.quantize(w, dtype, channelwise_axes=[1], tiled_axes=tiles))
        ours = quantise_weight(w, (-2,), scheme).dequantise(jnp.float32)
        assert error(ours) <= 1.001 * error(theirs), scheme
