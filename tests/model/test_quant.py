"""Weights in few bits: their products, how far they are from the weights, and what specs say of them."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases.weights import EXPERTS, MIXED, PRODUCTS, SCHEMES, SINKING, dense, is_record, logits, random
from jax.sharding import AbstractMesh, PartitionSpec

from duetto.model.config import ModelConfig
from duetto.model.experts import MoE, by_ragged_products, by_tiles
from duetto.model.layers import einsum
from duetto.model.sharding import shardings
from duetto.model.transformer import Decoder, decoder_spec
from duetto.model.tree import Spec, abstract, init, nbytes, paths
from duetto.model.weights.compress import CONTRACTED, compress, compressed, projections
from duetto.model.weights.quant import Quantised, e2m1, quantised, unpack


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_is_that_of_the_widened_weight(name: str, scheme: str):
    equation, left, right = PRODUCTS[name]
    x, record = random(*left), quantised(random(*right, seed=1), CONTRACTED[name], scheme)
    assert record.shape == right
    expected = einsum(equation, x, record.widened(jnp.float32))
    np.testing.assert_allclose(einsum(equation, x, record), expected, rtol=1e-5, atol=1e-4)
    wide = einsum(equation, x.astype(jnp.bfloat16), record, jnp.float32)
    assert wide.dtype == jnp.float32
    half = einsum(equation, x.astype(jnp.bfloat16), record)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), expected, atol=0.02 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("blocks", [(1, 5, 4), (4, 1, 1), (64, 1, 1), (2, 5, 1)], ids=str)
def test_scales_may_cover_blocks_of_any_axes(blocks: tuple[int, ...]):
    equation, left, right = PRODUCTS["q"]
    codes = jax.random.randint(jax.random.key(3), right, -127, 128, jnp.int8)
    zeros = jax.random.randint(jax.random.key(4), blocks, -127, 128, jnp.int8)
    for record in (Quantised(codes, random(*blocks)), Quantised(codes, random(*blocks), zeros)):
        whole = np.asarray(codes, np.float32)
        for array, less in ((record.zeros, np.subtract), (record.scales, np.multiply)):
            if array is not None:
                wide = np.asarray(array, np.float32)
                for axis, (size, n) in enumerate(zip(right, blocks, strict=True)):
                    wide = np.repeat(wide, size // n, axis)
                whole = less(whole, wide)
        np.testing.assert_array_equal(record.widened(jnp.float32), whole)
        x = random(*left)
        expected = einsum(equation, x, jnp.asarray(whole))
        np.testing.assert_allclose(einsum(equation, x, record), expected, rtol=1e-4, atol=0.02)


@pytest.mark.parametrize("name", PRODUCTS)
def test_codes_are_as_near_as_they_can_be(name: str):
    w = np.asarray(random(*PRODUCTS[name][2], seed=1))
    axes = CONTRACTED[name]
    record = quantised(jnp.asarray(w), axes, "int8")
    scale = np.abs(w).max(axis=axes, keepdims=True) / 127
    np.testing.assert_allclose(record.scales, scale, rtol=1e-6)
    assert np.abs(record.widened(jnp.float32) - w).max() <= 0.5001 * scale.max()
    record = quantised(jnp.asarray(w), axes, "fp8")
    assert np.all(
        np.abs(record.widened(jnp.float32) - w) <= np.abs(w) / 15 + np.asarray(record.scales) * 2.0**-9
    )
    assert np.isfinite(np.asarray(record.values, np.float32)).all()


def test_four_bits_by_hand():
    """A group's largest number becomes -8; neighbours along the summed axis share a byte, the even is low."""
    column = np.array([8.0, -4.0, 1.0, 0.4, 7.6, -8.0, 3.0, 0.0], np.float32)
    record = quantised(jnp.asarray(np.stack([column, 0 * column], 1)), (-2,), "int4")
    assert record.scales.dtype == jnp.bfloat16 and record.scales.shape == (1, 2)
    assert record.values.shape == (4, 2) and record.values.dtype == jnp.uint8
    scale = float(record.scales[0, 0])
    codes = np.clip(np.round(column / scale) + 8, 0, 15).astype(np.uint8)
    np.testing.assert_array_equal(record.values[:, 0], codes[0::2] | codes[1::2] << 4)
    np.testing.assert_array_equal(record.widened(jnp.float32)[:, 0], (codes.astype(np.float32) - 8) * scale)
    np.testing.assert_array_equal(record.widened(jnp.float32)[:, 1], 0)


@pytest.mark.parametrize("axis", [-3, -2, -1])
def test_four_bits_are_within_a_step_of_the_weight(axis: int):
    w = random(64, 32, 96)
    record = quantised(w, (axis,), "int4")
    assert record.values.size * 2 == w.size and record.scales.size * 32 == w.size
    step = jnp.repeat(jnp.abs(record.scales.astype(jnp.float32)), 32, axis=axis)
    error = jnp.abs(record.widened(jnp.float32) - w)
    # the number opposite to the largest may lie beyond 7 steps
    assert bool((error <= 1.03 * step).all()) and float((error <= 0.501 * step).mean()) > 0.98


def test_an_odd_axis_keeps_its_weight():
    assert quantised(random(7, 4), (-2,), "int4") is None
    specs = decoder_spec(ModelConfig.uniform(8, 7, 12, 1, 2, 1, 4))
    ffn: Any = compress(specs, projections("int4")).layers[0].ffn
    assert not is_record(ffn.up) and is_record(ffn.down)


def test_zeros_and_floats_of_four_bits():
    values = jnp.asarray(np.arange(16, dtype=np.uint8).reshape(4, 4) * 16 + 3)
    scales, zeros = jnp.full((2, 4), 0.5), jnp.asarray([[0, 1, 2, 16], [3, 4, 5, 6]], jnp.uint8)
    record = Quantised(values, scales, zeros, "int4", -2)
    codes = np.stack([np.asarray(values) % 16, np.asarray(values) // 16], 1).reshape(8, 4).astype(np.float32)
    expected = (codes - np.repeat(np.asarray(zeros, np.float32), 4, axis=0)) * 0.5
    np.testing.assert_array_equal(record.widened(jnp.float32), expected)
    every = np.arange(16, dtype=np.uint8)
    np.testing.assert_array_equal(
        e2m1(jnp.asarray(every)), every.view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    )
    np.testing.assert_array_equal(unpack(jnp.asarray([0x21, 0x43], jnp.uint8), 0), [1, 2, 3, 4])


@pytest.mark.parametrize(("how", "length"), [("int8", 9), ("int4", 40)], ids=["absorbed", "expanded"])
def test_a_model_computes_with_the_widened_weights(mixed: Decoder, how: Any, length: int):
    tokens = jax.random.randint(jax.random.key(1), (2, length), 0, MIXED.vocab_size)
    found = compress(mixed, projections(how))
    assert sum(map(is_record, jax.tree.leaves(found, is_leaf=is_record))) == 7 + 12 + 7
    np.testing.assert_allclose(logits(found, MIXED, tokens), logits(dense(found), MIXED, tokens), atol=3e-5)


@pytest.mark.parametrize("how", [*SCHEMES, 0.5])
@pytest.mark.parametrize("layer", [1, 2])
def test_both_ways_through_experts_agree(mixed: Decoder, how: Any, layer: int):
    kind = EXPERTS if layer == 1 else SINKING
    found = compress(mixed, projections(how)).layers[layer].ffn
    plain = mixed.layers[layer].ffn
    assert isinstance(found, MoE) and isinstance(plain, MoE)
    f = found.experts
    x = random(11, 64)
    chosen = jax.random.randint(jax.random.key(2), (11, 2), 0, kind.count, jnp.int32)
    tiles = by_tiles(f, kind, x, chosen, 8)
    np.testing.assert_allclose(tiles, by_ragged_products(f, kind, x, chosen), atol=1e-5)
    moved = tiles - by_tiles(plain.experts, kind, x, chosen, 8)
    assert float(jnp.abs(moved).max()) > 1e-5


@pytest.mark.parametrize("how", [*SCHEMES, 0.5])
def test_specs_shapes_and_arrays_are_one_tree(mixed: Decoder, how: Any):
    """The structure and the memory plan exist before the weights do."""
    plan = projections(how)
    arrays = jax.eval_shape(partial(compress, plan=plan), mixed)
    specs = compress(decoder_spec(MIXED), plan)

    def form(tree: Any) -> Any:
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    shapes = abstract(specs, jnp.float32)
    assert form(arrays) == form(shapes)
    assert form(arrays) == form(jax.eval_shape(partial(init, specs=specs), jax.random.key(0)))
    assert form(arrays) == form(compress(abstract(decoder_spec(MIXED), jnp.float32), plan))
    assert list(paths(arrays)) == list(paths(specs)) and nbytes(arrays) == nbytes(shapes)
    ends = ("a", "b") if how == 0.5 else ("values", "scales")
    assert {f"layers.0.attention.q.{end}" for end in ends} <= set(paths(specs))


def test_random_weights_of_a_scheme_are_as_large_as_their_specs_say():
    for how in (*SCHEMES, 0.5):
        record = compressed(Spec((256, 192), ("model", "ffn"), scale=0.02), (-2,), how)
        assert 0.5 < float(jnp.std(dense(init(jax.random.key(0), record)))) / 0.02 < 2, how


@pytest.mark.parametrize("how", [*SCHEMES, 0.5])
def test_records_are_split_like_their_weights(how: Any):
    config = ModelConfig.uniform(32, 64, 128, 1, 4, 2, 32)
    mesh = AbstractMesh((2,), ("tensor",))
    layer = shardings(compress(decoder_spec(config), projections(how)), mesh).layers[0]
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
        ours = quantised(w, (-2,), scheme).widened(jnp.float32)
        assert error(ours) <= 1.001 * error(theirs), scheme
