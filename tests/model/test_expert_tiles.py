"""Products of experts in tiles of rows: our kernel for NVIDIA GPUs, interpreted, against the reference."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.gpus import traced_for
from cases.weights import random
from suite.marks import full, full_if

from duetto.model.weights import expert_tiles
from duetto.model.weights.compression.compress import encode_weight
from duetto.model.weights.expert_tiles import (
    EXPERT_TILE_ROWS,
    ExpertMatrices,
    ExpertTiles,
    can_dequantise_experts,
    can_tile_experts,
    cut_expert_tiles,
    expert_tile_rows,
)
from duetto.model.weights.quant import Quantised, ragged_dot_by_kernel
from duetto.model.weights.schemes import SCHEMES

D, F = 128, 192
SIZES = [17, 0, 40, 5]  # rows of each expert; eight more are no expert's
CODES = {
    "int8": ("int8", (4, 1, F), None),
    "int8 in blocks": ("int8", (4, 2, 3), None),
    "int8, one scale a group": ("int8", (4, 2, F), None),
    "fp8": ("fp8", (4, 1, F), None),
    "int4": ("int4", (4, 4, F), None),
    "int4 with zeros": ("int4", (4, 2, F), jnp.uint8),
    "int4, groups of 16": ("int4", (4, 8, F), None),
    "MXFP4": ("fp4", (4, 4, F), None),
}


LIKE_OTHERS = "int8", "int8, one scale a group", "int4", "int4, groups of 16"  # codes with more are tested


def codes(name: str, scales: Any = jnp.bfloat16) -> Quantised:
    """Random codes of four experts."""
    (scheme, shape, zeros), rng = CODES[name], np.random.default_rng(1)
    if name == "MXFP4":
        own = jax.device_put(rng.integers(120, 131, shape, np.uint8)).view(jnp.float8_e8m0fnu)
    else:
        own = (jnp.abs(random(*shape, seed=5)) + 0.5).astype(scales)
    if scheme in ("int4", "fp4"):
        values = jax.device_put(rng.integers(0, 256, (4, D // 2, F), np.uint8))
    else:
        values = (random(4, D, F, seed=3) * 30).astype(jnp.int8 if scheme == "int8" else jnp.float8_e4m3fn)
    offsets = None if zeros is None else jax.device_put(rng.integers(0, 16, shape, np.uint8)).astype(zeros)
    return Quantised(values, own, offsets, scheme, -2 if scheme in ("int4", "fp4") else -1)


def tiled(x: Any, w: ExpertMatrices, sizes: list[int], height: int, scheme: str | None = None) -> np.ndarray:
    nibble_format = None if scheme is None else SCHEMES[scheme].nibble_format
    found = expert_tiles.multiply_by_tiles(x, w, np.asarray(sizes, np.int32), nibble_format, height, True)
    assert found.shape == (len(x), w.values.shape[2]) and found.dtype == x.dtype
    return np.asarray(found)[: sum(sizes)]


def close(found: np.ndarray, expected: Any) -> bool:
    """Within the rounding of 16 bits, of the largest number."""
    a, b = (np.asarray(x, np.float32) for x in (found, expected))
    return bool(np.abs(a - b).max() <= 2**-8 * np.abs(b).max())


@jax.jit
def reference(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(x.astype(jnp.float32), w.astype(jnp.float32), sizes)


@full_if(lambda height: height == 32)
@full_if(lambda dtype, height: dtype == jnp.float16 and height > 16)
@pytest.mark.parametrize("height", EXPERT_TILE_ROWS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_each_row_meets_its_experts_matrix(dtype: Any, height: int):
    """Also where an expert has no rows, and some rows have no expert."""
    x, w = random(70, D, dtype=dtype), random(4, D, F, seed=1, dtype=dtype)
    found = tiled(x, ExpertMatrices(w), SIZES, height)
    assert close(found, reference(x, w, np.asarray(SIZES, np.int32))[:62])


@full_if(lambda name, dtype: name in LIKE_OTHERS or (dtype == jnp.float16 and name != "MXFP4"))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("name", CODES)
def test_codes_are_the_numbers_that_they_stand_for(name: str, dtype: Any):
    x, own = random(70, D, dtype=dtype), codes(name)
    found = ragged_dot_by_kernel(x, own, jax.device_put(np.asarray(SIZES, np.int32)), interpret=True)[:62]
    assert found.dtype == dtype
    assert close(
        np.asarray(found), reference(x, own.dequantise(jnp.float32), np.asarray(SIZES, np.int32))[:62]
    )


@full_if(lambda name, dtype: (dtype == jnp.float16) != (name == "MXFP4"))
@pytest.mark.parametrize("name", ["int4 with zeros", "MXFP4"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_all_sixteen_codes_are_widened_exactly(name: str, dtype: Any):
    """A row with a single one reads a row of the matrix."""
    own = codes(name)
    x = jnp.eye(D, dtype=dtype)
    found = tiled(x, ExpertMatrices(own.values, own.scales, own.zeros), [D, 0, 0, 0], 64, own.scheme)
    np.testing.assert_array_equal(found, np.asarray(own.dequantise(dtype))[0])


@pytest.mark.parametrize("scheme", [None, full("int8"), "int4"])
def test_bits_of_a_row_depend_on_its_expert_alone(scheme: str | None):
    """Neither on the rows beside it, nor on its place in a tile, nor on the rows of a tile."""
    x, w = random(70, D, dtype=jnp.bfloat16), random(4, D, F, seed=1, dtype=jnp.bfloat16)
    own = None if scheme is None else encode_weight(w, (-2,), scheme)
    matrices = ExpertMatrices(w) if own is None else ExpertMatrices(own.values, own.scales, own.zeros)
    whole = tiled(x, matrices, SIZES, 64, scheme)
    for height in EXPERT_TILE_ROWS:
        assert tiled(x, matrices, SIZES, height, scheme).tobytes() == whole.tobytes()
    few = tiled(x[20:23], matrices, [0, 0, 3, 0], 64, scheme)
    assert few.tobytes() == whole[20:23].tobytes()
    other = jnp.full_like(x, jnp.nan).at[20:23].set(x[20:23])
    assert tiled(other, matrices, SIZES, 64, scheme)[20:23].tobytes() == few.tobytes()


def test_tiles_are_of_one_expert_and_skip_those_without_rows():
    found = jax.jit(cut_expert_tiles, static_argnums=(1, 2))(np.asarray([17, 0, 33, 5, 0], np.int32), 60, 16)
    assert isinstance(found, ExpertTiles)
    real = [(int(e), int(a), int(b)) for e, a, b in zip(*found, strict=True) if a < b]
    assert real == [(0, 0, 16), (0, 16, 17), (2, 17, 33), (2, 33, 49), (2, 49, 50), (3, 50, 55)]
    assert len(found.expert) == 60 // 16 + 5


@pytest.mark.parametrize("kind", ["t4", "a100", "l4", "h200", "b200", "rtx5090"])
def test_every_gpu_since_ampere_has_the_kernel(kind: str):
    with traced_for(kind):
        assert can_tile_experts(jnp.bfloat16, (4, D, F)) == (kind != "t4")
        assert not can_tile_experts(jnp.float32, (4, D, F))
        assert not can_tile_experts(jnp.bfloat16, (4, D, F), (4, D, 96)) and not can_tile_experts(
            jnp.bfloat16, (4, 96, F)
        )


def test_codes_are_read_where_the_gpu_converts_them():
    def possible(w: Quantised, packed: int = -2) -> bool:
        own = ExpertMatrices(w.values, w.scales, w.zeros)
        return can_dequantise_experts(own, w.nibble_format, w.shape, packed, jnp.bfloat16)

    with traced_for("l4"):
        assert all(possible(codes(name)) for name in CODES)
        assert not possible(codes("int4"), packed=-1)
        one = codes("int8")
        assert not possible(Quantised(one.values, one.scales, one.scales.astype(jnp.int8)))
        assert not possible(Quantised(one.values, random(4, 4, F)))  # groups of 32 of 8 bits
        assert not possible(Quantised(one.values[0], one.scales[0]))
    with traced_for("a100"):
        assert {name for name in CODES if not possible(codes(name))} == {"fp8"}
    assert not possible(codes("int8"))  # no GPU


def test_tiles_have_as_many_rows_as_an_instruction():
    rows = {}
    for kind in ("a100", "l4", "h200", "b200", "rtx5090"):
        with traced_for(kind):
            rows[kind] = [expert_tile_rows(8 * tokens, 128) for tokens in (1, 64, 128, 256, 512, 4096)]
    assert rows["b200"] == [64] * 6
    assert rows["h200"] == rows["a100"] == rows["l4"] == rows["rtx5090"] == [16, 16, 16, 32, 64, 64]
