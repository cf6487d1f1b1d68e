"""Products by duetto's own CPU kernels: their numbers, and that a row's bits follow from the row alone."""

import ctypes
import shutil
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.programs import StoredJit
from suite.marks import full

from duetto.cpu_kernels import build
from duetto.cpu_kernels.build import ISAS
from duetto.cpu_kernels.library import ffi_target_name, has_correct_products, load_library, register_handlers
from duetto.model.layers import einsums
from duetto.model.weights.cpu.panels import Packed, maybe_encode_bf12, pack_codes, pack_matrix, to_panels
from duetto.model.weights.quant import Quantised, quantise_weight

# No multiple of a panel, of a pair, of a tile or of a block of inputs; one number; and those of a model.
SIZES = full((1, 1)), full((7, 5)), (33, 63), full((640, 40)), full((1025, 100)), full((576, 576))
OTHERS = [0, 1, 3, 5, 7]  # rows without what is not finite
ROWS = 1, 2, 3, 6, 7, 8, 13, 32, 100, 250, 512


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """A library whose products are those of avx512_amx on a processor without tiles; no other kernels."""
    if "avx512_bf16" not in load_library().isas or shutil.which(build.compiler_command()[0]) is None:
        pytest.skip("no compiler of C++, or no processor of what is beside the tiles")
    folder, isa = tmp_path_factory.mktemp("emulated"), "avx512_amx"
    tiles = ["-include", str(Path(__file__).parent / "tiles.h")]
    handler = [
        "-isystem",
        str(build.jaxlib_headers()),
        str(build.SOURCE_FOLDER / "handlers" / "products_ffi.cc"),
    ]
    objects = {
        f"{folder}/products.o": build.kernel_compiler_arguments(folder, tiles, [isa])[
            f"{folder}/products.cc-{isa}.o"
        ],
        f"{folder}/handler.o": [f"-DFOR_EACH_ISA(X)=X({isa})", *handler],
    }
    path = folder / build.LIBRARY_NAME
    build.run_compiler(["-shared", "-s", "-pthread", *build.compile_objects(objects), "-o", str(path)])
    found = ctypes.CDLL(str(path))
    register_handlers(found, isa, path, ["product"])
    return found


@pytest.fixture(params=[*ISAS, full("emulated")])
def kernel(request: pytest.FixtureRequest) -> str:
    """The name of an instruction set's products for XLA."""
    if request.param == "emulated":
        return ffi_target_name("product", "avx512_amx", Path(request.getfixturevalue("emulated")._name))
    if request.param not in load_library().isas:
        pytest.skip(load_library().refusal or f"this processor has no {request.param}")
    return ffi_target_name("product", request.param)


# Arrays are numpy's: jax would compile a program for each number of rows that is cut from them.
def numbers(*shape: int, dtype: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def weight(matrix: Any, kernel: str) -> Packed:
    outputs, inputs = matrix.shape
    return pack_matrix(jnp.asarray(matrix), (inputs,), (outputs,), kernel)


@partial(StoredJit, static_argnames=["dtype"])
def product(x: jax.Array, w: Packed, dtype: Any = jnp.float32) -> jax.Array:
    return w.einsum("md,df->mf", x, dtype)


@StoredJit
def products(x: jax.Array, weights: list[Any]) -> list[Any]:
    return einsums("md,df->mf", x, weights)


@cache
def codes(inputs: int, outputs: int, scheme: str) -> Quantised:
    found = jax.jit(quantise_weight, static_argnums=(1, 2))(
        numbers(inputs, outputs, dtype=jnp.float32, seed=1), (-2,), scheme
    )
    assert found is not None
    return found


@partial(jax.jit, static_argnums=1)
def widened(w: Quantised, dtype: Any) -> jax.Array:
    """What the codes stand for, those of int8 without their scales."""
    return (w.signed_codes() if w.scheme == "int8" else w.dequantise(dtype)).astype(dtype)


def wide(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_are_right_and_row_bits_follow_from_the_row(kernel, size, dtype):
    inputs, outputs = size
    x, matrix = numbers(ROWS[-1], inputs, dtype=dtype), numbers(outputs, inputs, dtype=dtype, seed=1)
    w = weight(matrix, kernel)
    whole = np.asarray(product(x, w))
    limit = 1e-5 * np.abs(wide(x)) @ np.abs(wide(matrix)).T
    assert (np.abs(whole - wide(x) @ wide(matrix).T) <= limit).all()
    for rows in ROWS:
        np.testing.assert_array_equal(product(x[:rows], w), whole[:rows])
        np.testing.assert_array_equal(product(x[-rows:], w), whole[-rows:])
    rounded = product(x, w, jnp.bfloat16)
    np.testing.assert_array_equal(rounded, whole.astype(jnp.bfloat16))


def test_a_call_of_several_weights_equals_single_products(kernel):
    inputs = 64
    x = numbers(ROWS[-1], inputs, dtype=jnp.bfloat16)
    arrays = [weight(numbers(n, inputs, dtype=jnp.bfloat16, seed=n), kernel) for n in (640, 40, 1)]
    weights = [*arrays, *(pack_codes(codes(inputs, 100, s), 1, kernel) for s in ("int8", "int4"))]
    traced = jax.make_jaxpr(partial(einsums, "md,df->mf"))(x, weights)
    assert str(traced).count("ffi_call[") == 1
    for rows in (1, 7, 100):
        for found, w in zip(products(x[:rows], weights), weights, strict=True):
            np.testing.assert_array_equal(found, product(x[:rows], w, jnp.bfloat16))


def test_weights_of_other_kinds_are_multiplied_apart(kernel):
    x, matrix = (numbers(n, 8, dtype=jnp.bfloat16, seed=n) for n in (3, 40))
    of_kernel, nothing, of_xla = products(x, [weight(matrix, kernel), None, matrix.T])
    assert nothing is None
    np.testing.assert_array_equal(of_kernel, product(x, weight(matrix, kernel), jnp.bfloat16))
    np.testing.assert_allclose(wide(of_xla), wide(x) @ wide(matrix).T, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("outliers", [0, 1, 40, 1900])
@pytest.mark.parametrize("size", [(33, 63), full((1025, 100)), full((576, 576))], ids=str)
def test_weights_in_12_bits_have_the_products_of_16(size, outliers):
    """Zeros of both signs and denormals among them. With many outliers they have 16 bits."""
    if "avx512_bf16" not in load_library().isas:
        pytest.skip("no kernels of weights in 12 bits")
    made, (inputs, outputs) = ffi_target_name("product", "avx512_bf16"), size
    x, matrix = (numbers(n, inputs, dtype=jnp.bfloat16, seed=n) for n in (ROWS[-1], outputs))
    places = np.random.default_rng(2).permutation(matrix.size)[: 3 + outliers]
    matrix.flat[places] *= jnp.bfloat16(2.0**-40)
    matrix.flat[places[:3]] = 0.0, -0.0, 1e-39
    panels = to_panels(matrix)
    narrow = Packed(maybe_encode_bf12(panels, made), None, (inputs,), (outputs,), made)
    plain, body = replace(narrow, array=panels), np.asarray(narrow.array).reshape(-1)[: panels.size]
    assert (body.tobytes() == np.asarray(panels).tobytes()) == (outliers > panels.size / 512)
    for rows in ROWS:
        np.testing.assert_array_equal(product(x[:rows], narrow), product(x[:rows], plain))
    assert np.asarray(narrow.original).tobytes() == np.asarray(plain.original).tobytes()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_what_is_not_finite_stays_in_its_row(kernel, dtype):
    """The inputs are odd in number: a pair must not reach into the next row."""
    x, matrix = numbers(8, 7, dtype=dtype), numbers(40, 7, dtype=dtype, seed=1)
    broken = x.copy()
    broken[2, 0], broken[4, 3], broken[6, 0] = np.nan, np.inf, -np.inf
    w = weight(matrix, kernel)
    for out in (jnp.float32, jnp.bfloat16):
        found, plain = (np.asarray(product(x, w, out)) for x in (broken, x))
        np.testing.assert_array_equal(found[OTHERS], plain[OTHERS])
        assert np.isnan(found[2].astype(np.float32)).all()
        np.testing.assert_array_equal(found[4], np.sign(wide(matrix[:, 3])) * np.inf)
        np.testing.assert_array_equal(found[6], -np.sign(wide(matrix[:, 0])) * np.inf)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_denormals_are_zeros(kernel, dtype):
    w = weight(np.full((3, 2), 0.25, dtype), kernel)
    x = np.asarray([[1e-39, 0.0], [2e-38, 0.0], [1.0, 1e-39]], dtype)  # the second's product is one
    np.testing.assert_array_equal(product(x, w), [[0.0] * 3, [0.0] * 3, [0.25] * 3])


def test_no_rows_have_no_products(kernel):
    w = weight(numbers(40, 7, dtype=jnp.bfloat16), kernel)
    assert product(numbers(0, 7, dtype=jnp.bfloat16), w).shape == (0, 40)


def test_x_of_another_dtype_is_multiplied_by_xla(kernel):
    matrix = numbers(40, 8, dtype=jnp.bfloat16)
    x = numbers(3, 8, dtype=jnp.float32, seed=1)
    found = product(x, weight(matrix, kernel))
    np.testing.assert_allclose(found, wide(x) @ wide(matrix).T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_codes_are_multiplied_as_the_numbers_that_they_stand_for(kernel, scheme, size, dtype):
    """Those of int8 as they are, and the sum by its scale; those of int4 by their scales, rounded to x's
    dtype."""
    inputs, outputs = size[0] + size[0] % 2 * (scheme == "int4"), size[1]
    x, w = numbers(ROWS[-1], inputs, dtype=dtype), codes(inputs, outputs, scheme)
    expected = np.asarray(product(x, weight(np.asarray(widened(w, dtype)).T, kernel)))
    if scheme == "int8":
        expected = expected * np.asarray(w.scales)
    made = pack_codes(w, 1, kernel)
    for rows in ROWS:
        np.testing.assert_array_equal(product(x[:rows], made), expected[:rows])
        np.testing.assert_array_equal(product(x[-rows:], made), expected[-rows:])
    np.testing.assert_array_equal(product(x, made, jnp.bfloat16), expected.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("scheme", "inputs"), [("int8", 7), ("int4", 8)])
def test_what_is_not_finite_stays_in_its_row_of_codes(kernel, scheme, inputs, dtype):
    x, w = numbers(8, inputs, dtype=dtype), codes(inputs, 40, scheme)
    broken = x.copy()
    broken[2, 0], broken[4, 3], broken[6, 0] = np.nan, np.inf, 1e38
    made = pack_codes(w, 1, kernel)
    found, plain = (np.asarray(product(x, made)) for x in (broken, x))
    np.testing.assert_array_equal(found[OTHERS], plain[OTHERS])
    assert np.isnan(found[2]).all() and not np.isfinite(found[4]).any()
    np.testing.assert_array_equal(found[3:4], product(broken[3:4], made))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_scales_of_a_tensor_and_of_long_groups(kernel, dtype):
    """As checkpoints have them: one scale for all outputs, groups of 128, in float16."""
    x, made = numbers(9, 256, dtype=dtype), kernel
    one = Quantised(codes(256, 40, "int8").values, np.full((1, 1), 0.5, np.float16))
    plain = weight(np.asarray(widened(one, dtype)).T, kernel)
    half = np.asarray(product(x, plain)) * np.float32(0.5)
    np.testing.assert_array_equal(product(x, pack_codes(one, 1, made)), half)
    scales = 1 + np.abs(numbers(2, 40, dtype=np.float16))
    long = Quantised(codes(256, 40, "int4").values, scales, None, "int4", -2)
    plain = weight(np.asarray(widened(long, dtype)).T, kernel)
    np.testing.assert_array_equal(product(x, pack_codes(long, 1, made)), product(x, plain))


def test_instruction_sets_with_wrong_products_are_detected(emulated):
    assert has_correct_products(emulated, "avx512_amx")
    flaw = ctypes.c_int.in_dll(emulated, "tiles_are_wrong")
    flaw.value = 1
    assert not has_correct_products(emulated, "avx512_amx")
    flaw.value = 0
