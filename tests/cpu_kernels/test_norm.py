"""Norms by duetto's own CPU kernels: their numbers, and that a row's bits follow from the row alone."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suite.marks import full

from duetto.cpu_kernels.build import ISAS
from duetto.cpu_kernels.library import ffi_target_name, load_library
from duetto.model.config import NormKind
from duetto.model.layers import Norm, normalise
from duetto.model.weights.cpu.kernel_norm import KernelNorm

KINDS = NormKind(), NormKind(offset=1.0), NormKind("layer")
# Sizes that no vector divides, one number, those of a model; heads with a gain each, and all heads together.
CASES = full((576,), -1), full((37,), -1), full((1,), -1), ((6, 8), -1), ((6, 8), (-2, -1))


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in load_library().isas:
        pytest.skip(load_library().refusal or f"this processor has no {request.param}")
    return request.param


@partial(jax.jit, static_argnums=(2, 3))
def norm(x: jax.Array, w: Any, kind: NormKind, axes: Any) -> jax.Array:
    return normalise(x, w, kind, axes)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("gains, axes", CASES, ids=str)
def test_norms_are_right_and_row_bits_follow_from_the_row(isa, gains, axes, dtype):
    draw = np.random.default_rng(0).standard_normal
    x, gain, bias = (jnp.asarray(draw(shape), dtype) for shape in ((64, 3, *gains), gains, gains))
    for kind in KINDS:
        own = bias if kind.kind == "layer" else None
        kernel = KernelNorm(gain, own, ffi_target_name("norm", isa))
        found = np.asarray(norm(x, kernel, kind, axes))
        wanted = norm(x, Norm(gain, own), kind, axes)
        off = abs(found.astype(np.float64) - np.asarray(wanted, np.float64))
        assert off.max() <= jnp.finfo(dtype).eps * 4 * abs(np.asarray(wanted, np.float64)).max()
        for rows in (1, 2, 5, 8):
            np.testing.assert_array_equal(norm(x[:rows], kernel, kind, axes), found[:rows])
            np.testing.assert_array_equal(norm(x[-rows:], kernel, kind, axes), found[-rows:])


def test_other_dtypes_are_left_to_xla(isa):
    x, gain = jnp.ones((2, 1, 8), jnp.float16), jnp.arange(8, dtype=jnp.float16)
    kernel = KernelNorm(gain, None, ffi_target_name("norm", isa))
    found = norm(x, kernel, NormKind(), -1)
    np.testing.assert_array_equal(found, norm(x, Norm(gain), NormKind(), -1))
