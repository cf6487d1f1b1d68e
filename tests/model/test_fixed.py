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
from duetto.model.tree import abstract, paths
from duetto.model.weights import fixed as module
from duetto.model.weights.compress import quantize_params
from duetto.model.weights.fixed import (
    NARROW,
    ROWS,
    TALL,
    WIDE,
    Fixed,
    Tiles,
    fixed,
    in_columns,
    in_rows,
    is_fixed,
    tiles_of,
    unfixed,
)
from duetto.model.weights.quant import leading

LEADING = {"q": 1, "o": 2, "down": 1, "head": 0, "v_up": 1, "k_up": 0}


def narrow(*shape: int, seed: int = 0) -> jax.Array:
    return random(*shape, seed=seed, dtype=jnp.bfloat16)


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_axes_that_a_product_sums_over_are_found(name: str):
    assert leading(PRODUCTS[name][0]) == LEADING[name]


@pytest.mark.parametrize(
    ("inner", "columns", "expected"),
    [(4096, 14336, WIDE), (14336, 4096, NARROW), (4096, 1024, NARROW), (96, 8192, NARROW),
     (1024, 192, NARROW), (4096, 8192, WIDE), (4096, 8000, NARROW), (48, 128, None), (64, 96, None)],
)  # fmt: skip
def test_tiles_follow_from_the_weight(inner: int, columns: int, expected: Tiles | None):
    assert tiles_of(inner, columns) == expected


@pytest.mark.parametrize("name", [name for name, inputs in LEADING.items() if inputs])
def test_rows_are_padded_to_whole_tiles_and_only_theirs_come_back(name: str, monkeypatch: pytest.MonkeyPatch):
    equation, left, right = PRODUCTS[name]
    seen = []

    def multiply(rows: jax.Array, w: jax.Array, tiles: Tiles) -> jax.Array:
        seen.append((rows.shape, w.shape))
        return jnp.dot(rows, w, preferred_element_type=jnp.float32).astype(rows.dtype)

    monkeypatch.setattr(module, "multiply", multiply)
    cast(Any, in_rows).clear_cache()
    x, w = narrow(*left), narrow(*right, seed=1)
    found = in_rows(x, w, LEADING[name], WIDE)
    inner = int(np.prod(right[: LEADING[name]]))
    assert seen == [((ROWS, inner), (inner, w.size // inner))]
    expected = product(equation, x, w)
    assert found.shape == expected.shape and found.dtype == jnp.bfloat16
    found, expected = (np.asarray(y, np.float32) for y in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0.02, atol=0.05)


def test_logits_are_an_output_matrix_by_rows_as_columns(monkeypatch: pytest.MonkeyPatch):
    equation, left, right = PRODUCTS["head"]
    seen = []

    def multiply(a: jax.Array, b: jax.Array, tiles: Tiles, out: jax.Array) -> jax.Array:
        seen.append((a.shape, b.shape, out.shape))
        return out + jnp.dot(a, b, preferred_element_type=jnp.float32)

    monkeypatch.setattr(module, "multiply", multiply)
    cast(Any, in_columns).clear_cache()
    x, w = narrow(*left), narrow(*right, seed=1)
    found = in_columns(x, w)
    assert seen == [(w.shape, (w.shape[1], TALL.columns), (w.shape[0], TALL.columns))]
    np.testing.assert_allclose(found, product(equation, x, w, jnp.float32), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [None, jnp.float32])
@pytest.mark.parametrize("name", PRODUCTS)
def test_elsewhere_a_product_has_the_bits_of_the_arrays(name: str, dtype):
    equation, left, right = PRODUCTS[name]
    x, w = narrow(*left), narrow(*right, seed=1)
    one, other = (product(equation, x, w, dtype) for w in (w, Fixed(w)))
    assert one.dtype == other.dtype and one.tobytes() == other.tobytes()


def test_projections_of_16_bits_are_fixed_and_nothing_else():
    params = abstract(decoder_spec(MIXED), jnp.bfloat16)
    found = {path.removesuffix(".array") for path in paths(fixed(params)) if path.endswith(".array")}
    first = {f"layers.0.{name}" for name in ("attention.q", "attention.k", "attention.v", "attention.o")}
    assert first | {"layers.0.ffn.gate", "layers.0.ffn.up", "layers.0.ffn.down"} <= found
    assert {"layers.1.attention.k_up", "layers.1.ffn.shared.gate", "head"} <= found
    assert not any(word in path for path in found for word in ("experts", "router", "norm", "embed", "bias"))
    assert paths(fixed(fixed(params))).keys() == paths(fixed(params)).keys()
    assert is_fixed(fixed(params)) and not is_fixed(params)
    assert unfixed(fixed(params)) == params == unfixed(params)
    assert not is_fixed(fixed(abstract(decoder_spec(MIXED), jnp.float32)))


def test_quantised_weights_and_those_of_several_devices_stay():
    params = abstract(decoder_spec(MIXED), jnp.bfloat16)
    left = [path for path in paths(fixed(quantize_params(params, "int8"))) if path.endswith(".array")]
    assert left == ["head.array"]
    mesh = NamedSharding(AbstractMesh((2,), ("tensor",)), PartitionSpec())
    assert not is_fixed(fixed(abstract(decoder_spec(MIXED), jnp.bfloat16, mesh)))
