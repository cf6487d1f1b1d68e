"""Products of rows in 8-bit codes with codes of 8 and of 4 bits: those of numpy and of XLA, bit by bit."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.programs import StoredJit
from suite.marks import full

from duetto.cpu_kernels.build import ISAS
from duetto.cpu_kernels.library import ffi_target_name, load_library
from duetto.model.layers import einsums
from duetto.model.weights.cpu.panels import Packed, pack_codes
from duetto.model.weights.input_quantised import InputQuantised
from duetto.model.weights.quant import Quantised

# No multiple of four inputs, of a panel, of a tile or of a block of inputs; one number; and those of a model.
SIZES = (1, 1), full((7, 5)), (33, 63), full((640, 40)), (1025, 100), full((1030, 33)), full((576, 576))
# Inputs, outputs, those of a group and the scales' dtype: groups that kernels add up in parts too.
GROUPED = (
    (8, 1, 8, jnp.bfloat16),
    (64, 63, 32, jnp.bfloat16),
    full((144, 40, 72, np.float32)),
    (1280, 100, 128, np.float16),
    full((2048, 33, 1024, jnp.bfloat16)),
    full((576, 576, 32, jnp.bfloat16)),
)
LEAST = np.float32(127) / np.finfo(np.float32).max  # rows of no larger numbers have no codes
DTYPES = jnp.bfloat16, jnp.float32
ROWS = 1, 2, 3, 4, 7, 8, 13, 64, 65, 300


@pytest.fixture(params=ISAS)
def kernel(request: pytest.FixtureRequest) -> str:
    """The name of an instruction set's products for XLA."""
    if request.param not in load_library().isas:
        pytest.skip(load_library().refusal or f"this processor has no {request.param}")
    return ffi_target_name("product", request.param)


def numbers(*shape: int, dtype: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def codes(inputs: int, outputs: int, seed: int = 1) -> Quantised:
    """All codes, -128 too, which checkpoints may have."""
    draw = np.random.default_rng(seed)
    values = draw.integers(-128, 128, (inputs, outputs)).astype(np.int8)
    return Quantised(values, draw.uniform(0.001, 0.1, (1, outputs)).astype(np.float32))


def nibbles(inputs: int, outputs: int, group: int = 8, dtype: Any = jnp.bfloat16) -> Quantised:
    """All codes of four bits, with scales of both signs for groups of inputs."""
    draw = np.random.default_rng(1)
    values = draw.integers(0, 256, (inputs // 2, outputs)).astype(np.uint8)
    scales = draw.standard_normal((inputs // group, outputs)).astype(dtype)
    return Quantised(values, scales, None, "int4", -2)


def packed(w: Quantised, kernel: str) -> Packed:
    return pack_codes(w, 1, kernel, "int8")


@partial(StoredJit, static_argnames=["dtype"])
def product(x: jax.Array, w: Packed | InputQuantised, dtype: Any = jnp.float32) -> jax.Array:
    return w.einsum("md,df->mf", x, dtype)


@StoredJit
def products(x: jax.Array, weights: list[Any]) -> list[Any]:
    return einsums("md,df->mf", x, weights)


def by_numpy(x: np.ndarray, w: Quantised) -> np.ndarray:
    wide = x.astype(np.float32)
    largest = np.abs(wide).max(-1, keepdims=True)
    inverse = np.where(largest > LEAST, np.float32(127) / np.maximum(largest, LEAST), np.float32(0))
    coded, scales = np.rint(wide * inverse).astype(np.int32), largest * np.float32(1 / 127)
    total, weights = np.float32(0), np.asarray(w.signed_codes(), np.int32)
    group = w.group_size(1)
    for i, scale in enumerate(w.scales.astype(np.float32)):  # in order, in float32
        part = slice(i * group, (i + 1) * group)
        total = total + (coded[:, part] @ weights[part]).astype(np.float32) * scale
    return total * scales


@StoredJit
def by_xla(x: jax.Array, values: jax.Array, scales: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), -1, keepdims=True)
    inverse = jnp.where(largest > LEAST, 127 / largest, 0)
    coded = jnp.round(wide * inverse).astype(jnp.int8)
    sums = jnp.dot(coded, values, preferred_element_type=jnp.int32)
    return (sums.astype(jnp.float32) * scales) * (largest * jnp.float32(1 / 127))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_have_the_bits_of_plain_sums(kernel, size, dtype):
    x, w = numbers(ROWS[-1], size[0], dtype=dtype), codes(*size)
    expected, made = by_numpy(x, w), packed(w, kernel)
    for rows in ROWS:
        np.testing.assert_array_equal(product(x[-rows:], made), expected[-rows:])
    np.testing.assert_array_equal(product(x, made, jnp.bfloat16), expected.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", GROUPED, ids=str)
def test_groups_have_the_bits_of_sums_in_order(kernel, size, dtype):
    x, w = numbers(ROWS[-1], size[0], dtype=dtype), nibbles(*size)
    expected, made = by_numpy(x, w), packed(w, kernel)
    for rows in ROWS:
        np.testing.assert_array_equal(product(x[-rows:], made), expected[-rows:])
    np.testing.assert_array_equal(product(x, made, jnp.bfloat16), expected.astype(jnp.bfloat16))
    np.testing.assert_array_equal(product(x[:3], InputQuantised(w)), expected[:3])


@pytest.mark.full
def test_every_number_of_rows_has_the_bits_of_plain_sums(kernel):
    x, w = numbers(65, 34, dtype=jnp.bfloat16), codes(34, 70)
    expected, made = by_numpy(x, w), packed(w, kernel)
    for rows in range(1, 66):
        np.testing.assert_array_equal(product(x[:rows], made), expected[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_every_magnitude_have_the_bits_of_xla(kernel, dtype):
    """From zeros and denormals to the largest; halves between codes too."""
    scales = np.asarray([0, 1e-45, 1e-39, 1e-37, 3.7e-37, 3.8e-37, 1e-36, 1e-30, 1, 1e30, 8e37], np.float32)
    x = (numbers(len(scales), 70, dtype=np.float32).clip(-4, 4) * scales[:, None]).astype(dtype)
    x[8] = np.arange(70) / 2
    x[8, :2] = 127, -127
    w = codes(70, 40)
    found, expected = product(x, packed(w, kernel)), by_xla(x, w.values, w.scales)
    np.testing.assert_array_equal(np.asarray(found).view(np.int32), np.asarray(expected).view(np.int32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("w", [codes(7, 40), nibbles(8, 40)], ids=["8 bits", "4 bits"])
def test_what_is_not_finite_stays_in_its_coded_row(kernel, w, dtype):
    x = numbers(20, w.shape[0], dtype=dtype)
    broken = x.copy()
    broken[2, 0], broken[4, 6], broken[5, 3], broken[19, 1] = np.nan, np.inf, -np.inf, -np.nan
    made, bad = packed(w, kernel), [2, 4, 5, 19]
    for out in DTYPES:
        found, plain = (np.asarray(product(x, made, out)) for x in (broken, x))
        np.testing.assert_array_equal(np.delete(found, bad, 0), np.delete(plain, bad, 0))
        assert np.isnan(found[bad].astype(np.float32)).all()


@pytest.mark.parametrize("rows", [1, 7, 100])
def test_weights_of_a_call_share_the_coded_rows(kernel, rows):
    """Beside weights that rows in their own dtype are multiplied by."""
    x = numbers(rows, 72, dtype=jnp.bfloat16)
    each = [*(codes(72, n, seed=n) for n in (640, 40, 1)), *(nibbles(72, 40, n) for n in (8, 72, 24, 8))]
    weights = [*(packed(w, kernel) for w in each), pack_codes(each[1], 1, kernel)]
    traced = jax.make_jaxpr(partial(einsums, "md,df->mf"))(x, weights)
    assert str(traced).count("ffi_call[") == 1
    *found, other = products(x, weights)
    for y, w in zip(found, each, strict=True):
        np.testing.assert_array_equal(y, by_numpy(x, w).astype(jnp.bfloat16))
    np.testing.assert_array_equal(other, product(x, weights[-1], jnp.bfloat16))


def test_calls_may_overlap(kernel):
    w, each = nibbles(576, 600), [numbers(n, 576, dtype=jnp.bfloat16, seed=n) for n in (1, 8, 65, 200)]
    made, expected = packed(w, kernel), [by_numpy(x, w) for x in each]
    for x in each:
        product(x, made)
    with ThreadPoolExecutor(4) as pool:
        for found, right in zip(pool.map(lambda x: product(x, made), each * 8), expected * 8, strict=True):
            np.testing.assert_array_equal(found, right)


def test_no_rows_have_no_coded_products(kernel):
    assert product(numbers(0, 7, dtype=jnp.bfloat16), packed(codes(7, 40), kernel)).shape == (0, 40)


def test_codes_come_back_from_their_panels(kernel):
    """Also those with several axes of inputs and outputs, and one scale in float16 for all."""
    values = codes(6 * 5, 3 * 25).values.reshape(6, 5, 3, 25)
    w = Quantised(values, np.full((1, 1, 1, 1), 0.5, np.float16))
    made = pack_codes(w, 2, kernel, "int8")
    assert made.array.shape == (3, 8, 32, 4) and made.expert_shape == ()
    assert made.codes is not None and made.codes.activations == "int8"
    found = made.original
    np.testing.assert_array_equal(found.values, w.values)
    np.testing.assert_array_equal(found.scales, w.scales)
    assert found.scales.dtype == np.float16 and found == replace(w, values=found.values, scales=found.scales)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), w)
    assert jax.tree.map(jnp.shape, pack_codes(shapes, 2, kernel, "int8")) == jax.tree.map(jnp.shape, made)
    x = numbers(3, 6, 5, dtype=jnp.float32)
    flat = Quantised(w.values.reshape(30, 75), np.full((1, 1), 0.5, np.float32))
    y = np.asarray(made.einsum("mde,defg->mfg", x)).reshape(3, 75)
    np.testing.assert_array_equal(y, by_numpy(x.reshape(3, 30), flat))


def test_nibbles_come_back_from_their_panels(kernel):
    flat = nibbles(6 * 16, 3 * 25)
    w = Quantised(flat.values.reshape(6, 8, 3, 25), flat.scales.reshape(6, 2, 3, 25), None, "int4", -3)
    made = pack_codes(w, 2, kernel, "int8")
    assert made.array.shape == (3, 12, 32, 4) and made.scales.shape == (3, 12, 32)
    jax.tree.map(np.testing.assert_array_equal, made.original, w)
    assert made.expert_shape == () and made.xla_weight.activations == "int8"
    x = numbers(3, 6, 16, dtype=jnp.float32)
    for form in (made, InputQuantised(w)):
        y = np.asarray(form.einsum("mde,defg->mfg", x)).reshape(3, 75)
        np.testing.assert_array_equal(y, by_numpy(x.reshape(3, 96), flat))
