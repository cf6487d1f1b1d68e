"""Products of one configuration: which weights have them, their tiles, and that they are the array's products
elsewhere."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.weights import MIXED, PRODUCTS, product, random
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from duetto.model.transformer import decoder_spec
from duetto.model.tree import leaves_by_path, shapes_from_specs
from duetto.model.weights import fixed_tiles as module
from duetto.model.weights.compression.compress import quantize_params
from duetto.model.weights.device_forms import restore_params
from duetto.model.weights.fixed_tiles import (
    FIXED_TILE_ROWS,
    LOGITS_TILES,
    NARROW_TILES,
    WIDE_TILES,
    FixedTiled,
    FixedTiles,
    choose_fixed_tiles,
    multiply_fixed_head,
    multiply_fixed_rows,
    with_fixed_tiles,
)
from duetto.model.weights.quant import count_contracted_axes

LEADING = {"q": 1, "o": 2, "down": 1, "head": 0, "v_up": 1, "k_up": 0}


def narrow(*shape: int, seed: int = 0) -> jax.Array:
    return random(*shape, seed=seed, dtype=jnp.bfloat16)


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_axes_that_a_product_sums_over_are_found(name: str):
    assert count_contracted_axes(PRODUCTS[name][0]) == LEADING[name]


@pytest.mark.parametrize(
    ("inner", "columns", "expected"),
    [(4096, 14336, WIDE_TILES), (14336, 4096, NARROW_TILES), (4096, 1024, NARROW_TILES),
     (96, 8192, NARROW_TILES), (1024, 192, NARROW_TILES), (4096, 8192, WIDE_TILES),
     (4096, 8000, NARROW_TILES), (48, 128, None), (64, 96, None)],
)  # fmt: skip
def test_tiles_follow_from_the_weight(inner: int, columns: int, expected: FixedTiles | None):
    assert choose_fixed_tiles(inner, columns) == expected


@pytest.mark.parametrize("name", [name for name, inputs in LEADING.items() if inputs])
def test_rows_are_padded_to_whole_tiles_and_cut_again(name: str, monkeypatch: pytest.MonkeyPatch):
    equation, left, right = PRODUCTS[name]
    seen = []

    def multiply(rows: jax.Array, w: jax.Array, tiles: FixedTiles) -> jax.Array:
        seen.append((rows.shape, w.shape))
        return jnp.dot(rows, w, preferred_element_type=jnp.float32).astype(rows.dtype)

    monkeypatch.setattr(module, "hopper_matmul", multiply)
    cast(Any, multiply_fixed_rows).clear_cache()
    x, w = narrow(*left), narrow(*right, seed=1)
    found = multiply_fixed_rows(x, w, LEADING[name], WIDE_TILES)
    inner = int(np.prod(right[: LEADING[name]]))
    assert seen == [((FIXED_TILE_ROWS, inner), (inner, w.size // inner))]
    expected = product(equation, x, w)
    assert found.shape == expected.shape and found.dtype == jnp.bfloat16
    found, expected = (np.asarray(y, np.float32) for y in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.05)


def test_logits_are_an_output_matrix_by_rows_as_columns(monkeypatch: pytest.MonkeyPatch):
    equation, left, right = PRODUCTS["head"]
    seen = []

    def multiply(a: jax.Array, b: jax.Array, tiles: FixedTiles, out: jax.Array) -> jax.Array:
        seen.append((a.shape, b.shape, out.shape))
        return out + jnp.dot(a, b, preferred_element_type=jnp.float32)

    monkeypatch.setattr(module, "hopper_matmul", multiply)
    cast(Any, multiply_fixed_head).clear_cache()
    x, w = narrow(*left), narrow(*right, seed=1)
    found = multiply_fixed_head(x, w)
    assert seen == [(w.shape, (w.shape[1], LOGITS_TILES.columns), (w.shape[0], LOGITS_TILES.columns))]
    np.testing.assert_allclose(found, product(equation, x, w, jnp.float32), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [None, jnp.float32])
@pytest.mark.parametrize("name", PRODUCTS)
def test_elsewhere_a_product_has_the_bits_of_the_arrays(name: str, dtype):
    equation, left, right = PRODUCTS[name]
    x, w = narrow(*left), narrow(*right, seed=1)
    one, other = (product(equation, x, w, dtype) for w in (w, FixedTiled(w)))
    assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


def test_projections_of_16_bits_are_fixed_and_nothing_else():
    params = shapes_from_specs(decoder_spec(MIXED), jnp.bfloat16)
    found = {
        path.removesuffix(".array")
        for path in leaves_by_path(with_fixed_tiles(params))
        if path.endswith(".array")
    }
    first = {f"layers.0.{name}" for name in ("attention.q", "attention.k", "attention.v", "attention.o")}
    assert first | {"layers.0.ffn.gate", "layers.0.ffn.up", "layers.0.ffn.down"} <= found
    assert {"layers.1.attention.k_up", "layers.1.ffn.shared.gate", "head"} <= found
    assert not any(word in path for path in found for word in ("experts", "router", "norm", "embed", "bias"))
    assert (
        leaves_by_path(with_fixed_tiles(with_fixed_tiles(params))).keys()
        == leaves_by_path(with_fixed_tiles(params)).keys()
    )
    assert restore_params(with_fixed_tiles(params)) == params and restore_params(params) is params
    wide = shapes_from_specs(decoder_spec(MIXED), jnp.float32)
    assert with_fixed_tiles(wide) is wide


def test_quantised_weights_and_those_of_several_devices_stay():
    params = shapes_from_specs(decoder_spec(MIXED), jnp.bfloat16)
    left = [
        path
        for path in leaves_by_path(with_fixed_tiles(quantize_params(params, "int8")))
        if path.endswith(".array")
    ]
    assert left == ["head.array"]
    mesh = NamedSharding(AbstractMesh((2,), ("tensor",)), PartitionSpec())
    split = shapes_from_specs(decoder_spec(MIXED), jnp.bfloat16, mesh)
    assert with_fixed_tiles(split) is split
