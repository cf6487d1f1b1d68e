"""jax's kernel behind products of one configuration, run by the interpreter of Mosaic GPU on a CPU: both of
its forms, and bits that do not depend on the number of rows."""

from importlib import import_module
from types import ModuleType
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.weights import random

from duetto.model.gpus import JAX_KERNELS_PACKAGE
from duetto.model.weights import fixed_tiles
from duetto.model.weights.fixed_tiles import HOPPER_MODULE, LOGITS_TILES, NARROW_TILES, WIDE_TILES, FixedTiles

pytestmark = pytest.mark.full

INTERPRETER = "jax._src.pallas.mosaic_gpu.interpret.params"  # not public in all versions


def snake(index: Any, shape: tuple[int, int], minor: Any, width: int) -> tuple[Any, Any]:
    """`planar_snake` of width 1 without its remainder by zero, of which XLA dies while it folds constants."""
    assert width == 1
    is_row, across = int(minor) == 1, jnp.int32(shape[int(minor)])
    major, at = jax.lax.div(index, across), jax.lax.rem(index, across)
    return (major, at) if is_row else (at, major)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """jax's module, interpreted as two multiprocessors would run it, and its settings."""
    pytest.importorskip("absl")
    module = import_module(f"{JAX_KERNELS_PACKAGE}.{HOPPER_MODULE}")
    monkeypatch.setattr(module, "get_num_sms", lambda: 2)
    monkeypatch.setattr(module.plgpu, "planar_snake", snake)
    monkeypatch.setattr(fixed_tiles, "import_jax_kernel", lambda _: module)
    params = import_module(INTERPRETER)
    with params.force_gpu_interpret_mode(params.InterpretGPUParams()):
        yield module


def rows(x: jax.Array, w: jax.Array, tiles: FixedTiles) -> np.ndarray:
    uncached = cast(Any, fixed_tiles.multiply_fixed_rows).__wrapped__
    return np.asarray(uncached(x, w, 1, tiles), np.float32)


@pytest.mark.parametrize("tiles", [WIDE_TILES, NARROW_TILES], ids=lambda tiles: tiles.label)
def test_products_are_those_of_the_arrays(kernel: ModuleType, tiles: FixedTiles):
    x, w = random(70, 128, dtype=jnp.bfloat16), random(128, 128, seed=1, dtype=jnp.bfloat16)
    expected = np.asarray(jnp.dot(x, w, preferred_element_type=jnp.float32))
    np.testing.assert_allclose(rows(x, w, tiles), expected, atol=2**-8 * np.abs(expected).max())


def test_logits_are_those_of_the_arrays_in_float32(kernel: ModuleType):
    x, w = random(5, 128, dtype=jnp.bfloat16), random(256, 128, seed=1, dtype=jnp.bfloat16)
    found = cast(Any, fixed_tiles.multiply_fixed_head).__wrapped__(x, w)
    assert found.dtype == jnp.float32
    expected = jnp.einsum("td,vd->tv", x, w, preferred_element_type=jnp.float32)
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("tiles", [NARROW_TILES, LOGITS_TILES], ids=lambda tiles: tiles.label)
def test_row_bits_are_equal_among_64_and_128_rows(
    kernel: ModuleType, tiles: FixedTiles, monkeypatch: pytest.MonkeyPatch
):
    """Of one and of three multiprocessors."""
    x, w = random(128, 192, dtype=jnp.bfloat16), random(192, 128, seed=1, dtype=jnp.bfloat16)
    found = []
    for count, processors in ((64, 1), (128, 1), (128, 3)):
        monkeypatch.setattr(kernel, "get_num_sms", lambda processors=processors: processors)
        if tiles == LOGITS_TILES:
            own = cast(Any, fixed_tiles.multiply_fixed_head).__wrapped__(x[:count], w.T)
        else:
            own = rows(x[:count], w, tiles)
        found.append(np.asarray(own)[:64].tobytes())
    assert len(set(found)) == 1
