"""Products of codes on an NVIDIA GPU: the kernels, interpreted, and the weights' layout."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.gpus import traced_for

from duetto.model.config import Dense
from duetto.model.ffn import activation
from duetto.model.layers import einsum, einsums, mapped_einsum
from duetto.model.tree import has_instance
from duetto.model.weights import device_forms as rules
from duetto.model.weights.device_forms import DeviceForms, convert_to_device_forms, restore_params
from duetto.model.weights.gpu import code_tiles, transposed_codes
from duetto.model.weights.gpu.code_tiles import CodeMatrix, CodeTiles, choose_code_tiles
from duetto.model.weights.gpu.transposed_codes import TransposedCodes, return_row, transpose_codes
from duetto.model.weights.input_quantised import InputQuantised, RowCodes, quantise_rows
from duetto.model.weights.quant import Quantised, quantise_weight
from duetto.model.weights.schemes import ACTIVATION_SCHEMES

INT8 = ACTIVATION_SCHEMES["int8"]


def random(*shape: int, seed: int = 0, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def weight(shape: tuple[int, ...], summed: tuple[int, ...], seed: int = 1) -> InputQuantised:
    quantised = quantise_weight(random(*shape, seed=seed, dtype=jnp.float32), summed, "int8")
    assert isinstance(quantised, Quantised)
    return InputQuantised(quantised)


def matrix(inner: int, columns: int, seed: int = 1) -> CodeMatrix:
    return transpose_codes(weight((inner, columns), (-2,), seed), 1).weight


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are used as on an H200, and interpreted."""
    for name in ("quantise_rows_by_kernel", "multiply_by_kernel"):
        interpret = partial(getattr(code_tiles, name), interpret=True)
        monkeypatch.setattr(transposed_codes, name, interpret)
    monkeypatch.setattr(transposed_codes, "may_use_kernel", lambda kernel: True)
    choose = jax.lax.platform_dependent

    def choose_cuda(*args: Any, cuda: Any = None, **others: Any) -> Any:
        return choose(*args, **others) if cuda is None else cuda(*args)

    monkeypatch.setattr(jax.lax, "platform_dependent", choose_cuda)


@pytest.mark.parametrize("rows, inner", [(1, 96), (3, 256), (5, 384)])
def test_a_kernel_quantises_rows_as_xla_does(rows: int, inner: int):
    x = random(rows, inner) * 3
    x = x.at[0, 5].set(jnp.nan) if rows == 5 else x.at[-1].set(0 if rows == 3 else 1e-38)
    found = code_tiles.quantise_rows_by_kernel((x,), return_row, interpret=True)
    expected = jax.jit(partial(quantise_rows, inputs=1, scheme=INT8))(x)
    np.testing.assert_array_equal(found.values[rows == 5 :], expected.values[rows == 5 :])
    np.testing.assert_array_equal(found.scales, expected.scales)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_a_kernel_quantises_the_activation(kind: str):
    function, inputs = activation(Dense(192, activation=kind)), (random(3, 192), random(3, 192, seed=2))
    found = code_tiles.quantise_rows_by_kernel(inputs, function, interpret=True)
    expected = jax.jit(lambda *x: quantise_rows(function(*x), 1, INT8))(*inputs)
    np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-2)
    np.testing.assert_allclose(found.values, np.asarray(expected.values, np.int32), atol=1)


@pytest.mark.parametrize(
    "rows, inner, columns",
    [(1, 96, (192, 64)), (16, 256, (64,)), (70, 256, (128, 64)), (130, 128, (64, 64)), (2, 8192, (64,))],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_kernel_multiplies_codes_as_xla_does(rows: int, inner: int, columns: tuple[int, ...], dtype: Any):
    matrices = tuple(matrix(inner, size, seed) for seed, size in enumerate(columns))
    codes = quantise_rows(random(rows, inner), 1, INT8)
    found = code_tiles.multiply_by_kernel(codes, matrices, dtype, interpret=True)
    expected = jax.jit(partial(transposed_codes.multiply_codes_by_xla, dtype=dtype))(codes, matrices)
    for product, other in zip(found, expected, strict=True):
        assert product.dtype == dtype
        np.testing.assert_array_equal(product, other)


@pytest.mark.parametrize(
    "rows, inner, columns, expected",
    [
        (64, 4096, (4096, 1024, 1024), CodeTiles(64, 64, 128, 1)),
        (8, 4096, (4096,), CodeTiles(16, 64, 128, 1)),
        (64, 4096, (14336, 14336), CodeTiles(64, 128, 128, 1)),
        (64, 14336, (4096,), CodeTiles(64, 64, 128, 2)),
        (256, 14336, (4096,), CodeTiles(128, 64, 128, 1)),
        (4096, 14336, (4096,), CodeTiles(128, 128, 128, 1)),
        (64, 2880, (4096,), CodeTiles(64, 64, 64, 1)),
        (64, 4096, (96,), None),
        (64, 100, (64,), None),
    ],
)
def test_tiles_follow_from_the_sizes(rows: int, inner: int, columns: Any, expected: CodeTiles | None):
    assert choose_code_tiles(rows, inner, columns) == expected


@pytest.mark.parametrize("scale", [False, True])
def test_products_are_those_of_the_weight(interpreted: None, scale: bool):
    """Of one weight, of several with one input, and of an activation, with a scale for each output or one."""

    def both(shape: tuple[int, ...], summed: tuple[int, ...], seed: int) -> tuple[Any, Any]:
        plain = weight(shape, summed, seed)
        if scale:
            one = jnp.full((1,) * len(shape), 0.01)
            plain = InputQuantised(Quantised(plain.weight.values, one))
        return plain, transpose_codes(plain, len(summed))

    def check(run: Any, plain: Any, other: Any) -> None:
        found = jax.jit(run)(other)
        jax.tree.map(np.testing.assert_array_equal, found, jax.jit(run)(plain))

    x, heads = random(2, 3, 128), random(2, 3, 4, 64)
    q, other_q = both((128, 3, 64), (-3,), 1)
    k, other_k = both((128, 1, 64), (-3,), 2)
    o, other_o = both((4, 64, 128), (-3, -2), 3)
    down, other_down = both((128, 64), (-2,), 4)
    check(lambda ws: einsums("btd,dnh->btnh", x, (*ws, None)), (q, k), (other_q, other_k))
    check(lambda w: einsum("btnh,nhd->btd", heads, w), o, other_o)
    check(lambda w: einsum("btnh,nhd->btd", heads, w, jnp.float32), o, other_o)
    check(lambda w: mapped_einsum("...f,fd->...d", jnp.abs, [x], w), down, other_down)
    # rows that are not quantised together
    check(lambda ws: einsums("btd,dnh->btnh", x, (*ws, random(128, 2, 4))), (q,), (other_q,))


def test_one_gpu_has_weights_by_outputs(monkeypatch: pytest.MonkeyPatch):
    tree = {"layers": [{"attention": {"o": weight((4, 8, 64), (-3, -2)).weight}, "x": jnp.ones(3)}]}
    plain = jax.tree.map(jnp.copy, tree)
    forms = DeviceForms(activations="int8")
    assert not has_instance(convert_to_device_forms(tree, forms), TransposedCodes)
    monkeypatch.setattr(rules, "is_on_one_gpu", lambda params: True)
    served = convert_to_device_forms(tree, forms, donate=True)
    o = served["layers"][0]["attention"]["o"]
    assert isinstance(o, TransposedCodes) and o.weight.values.shape == (64, 32) and o.shape == (4, 8, 64)
    assert DeviceForms.from_params(served) == forms and convert_to_device_forms(served, forms) == served
    shapes = jax.eval_shape(lambda: plain)
    assert jax.tree.structure(convert_to_device_forms(shapes, forms)) == jax.tree.structure(served)
    jax.tree.map(np.testing.assert_array_equal, restore_params(served), plain)
    assert restore_params(convert_to_device_forms(shapes, forms)) == shapes


def test_wide_products_and_other_rows_have_no_kernel():
    codes = RowCodes(jnp.zeros((256, 128), jnp.int8), jnp.zeros((256, 1)))
    matrices = (matrix(128, 64),)
    assert transposed_codes.has_code_kernel(codes, matrices)
    assert not transposed_codes.has_code_kernel(
        RowCodes(jnp.zeros((257, 128), jnp.int8), codes.scales), matrices
    )
    assert not transposed_codes.has_row_codes_kernel(random(1, 64, dtype=jnp.float32))


def test_programs_for_a_gpu_have_both_kernels():
    w = transpose_codes(weight((128, 64), (-2,)), 1)
    with traced_for("h200"):
        text = str(jax.make_jaxpr(partial(einsum, "...d,df->...f"))(random(4, 128), w))
    assert "quantise_rows" in text and "multiply_codes" in text
