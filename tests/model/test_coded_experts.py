"""Rows of experts in codes: every method multiplies the integers of one product, and scales them alike."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.gpus import traced_for
from cases.weights import random
from suite.marks import full, full_if

from duetto.cpu_kernels.library import ffi_target_name, load_library
from duetto.model.config import Experts
from duetto.model.experts import (
    has_expert_kernel,
    run_experts_ragged,
    run_experts_tiled,
)
from duetto.model.experts.mixture import has_cpu_expert_kernel, run_chosen_experts
from duetto.model.ffn import FFN
from duetto.model.gpus import disable_kernels
from duetto.model.layers import einsum, ragged_dot
from duetto.model.tree import map_instances
from duetto.model.weights import grouped_matmul
from duetto.model.weights.cpu.packed import can_pack, pack_weight
from duetto.model.weights.expert_tiles import (
    EXPERT_TILE_ROWS,
    EXPERT_TILES_KERNEL,
    ExpertMatrices,
    multiply_by_tiles,
)
from duetto.model.weights.input_quantised import InputQuantised, multiply_ragged_codes, quantise_rows
from duetto.model.weights.quant import Quantised, quantise_weight, ragged_dot_by_kernel
from duetto.model.weights.schemes import ACTIVATION_SCHEMES

D, F, E = 128, 192, 4
SIZES = [17, 0, 40, 5]  # rows of each expert; eight more are no expert's
HAS_KERNELS = pytest.mark.skipif(
    not load_library().isas, reason=load_library().refusal or "there are kernels"
)
EXPERTS = Experts(E, 2, F, "clamped_silu", bias=True, clamp=7.0)


def coded(shape: tuple[int, ...], scheme: str = "int8", seed: int = 1) -> InputQuantised:
    quantised = quantise_weight(random(*shape, seed=seed), (-2,), scheme)
    assert isinstance(quantised, Quantised)
    return InputQuantised(quantised, scheme)


def sizes_of() -> jax.Array:
    return jnp.asarray(SIZES, jnp.int32)


def owners() -> jax.Array:
    """The expert of each row: E for those of none."""
    found = np.repeat(np.arange(E), SIZES)
    return jnp.asarray(np.append(found, np.full(70 - len(found), E)), jnp.int32)


def numpy_product(rows: np.ndarray, w: Quantised, experts: np.ndarray) -> np.ndarray:
    """The definition: sums of int64, scales of outputs and then of rows."""
    f32 = np.float32
    x, (values, scales) = rows.astype(f32), (np.asarray(part)[experts] for part in (w.values, w.scales))
    largest = np.abs(x).max(1, keepdims=True)
    codes = np.round(x * (f32(127) / largest)).astype(np.int64)
    sums = np.einsum("md,mdf->mf", codes, values.astype(np.int64))
    return sums.astype(f32) * scales[:, 0] * (largest * f32(1 / 127))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_of_rows_equal_the_definition_bit_by_bit(dtype: Any):
    """Also beside an expert without rows."""
    w, rows, experts = coded((E, D, F)), random(70, D, dtype=dtype), owners()
    found = jax.jit(ragged_dot)(rows, w, sizes_of(), experts)
    expected = jnp.asarray(numpy_product(np.asarray(rows)[:62], w.weight, np.asarray(experts)[:62])).astype(
        dtype
    )
    assert found.dtype == dtype
    np.testing.assert_array_equal(found[:62], expected)


@pytest.mark.parametrize("scheme", ACTIVATION_SCHEMES)
@pytest.mark.parametrize("dtype", [jnp.float32, full(jnp.bfloat16)])
def test_products_of_rows_are_near_those_of_the_weight(scheme: str, dtype: Any):
    w, rows, sizes = coded((E, D, F), scheme), random(70, D, dtype=dtype), sizes_of()
    x, wide = rows[:62].astype(jnp.float32), w.original.dequantise(jnp.float32)
    exact = jax.jit(jax.lax.ragged_dot)(x, wide, sizes)
    found = ragged_dot(rows, w, sizes, owners())[:62].astype(jnp.float32)
    error = jnp.linalg.norm(found - exact)
    assert 0 < error / jnp.linalg.norm(exact) < {"int8": 0.02, "fp8": 0.06}[scheme]


@full_if(lambda height: height == 32)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, full(jnp.float16)])
@pytest.mark.parametrize("height", EXPERT_TILE_ROWS)
def test_tiles_of_a_gpu_have_the_bits_of_xla(height: int, dtype: Any):
    """Of every height; one scale for each output, or one for all."""
    w, rows, sizes = coded((E, D, F)).weight, random(70, D, dtype=dtype), sizes_of()
    codes = quantise_rows(rows, 1, ACTIVATION_SCHEMES["int8"])
    for own in (w, Quantised(w.values, w.scales[..., :1])):
        by_xla = jax.jit(multiply_ragged_codes, static_argnums=4)
        expected = by_xla(codes, own, sizes, owners(), jnp.dtype(dtype))
        matrices, x = ExpertMatrices(own.values, own.scales), codes.values.astype(dtype)
        found = multiply_by_tiles(x, matrices, sizes, None, height, True, codes.scales)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found[:62], expected[:62])


@pytest.mark.parametrize("inner", [4096, full(4160)])
def test_the_largest_sums_are_exact_in_tiles_of_a_gpu(inner: int):
    """Half of a row's products add up to an odd number that float32 does not hold, and the others to its
    negative, but for what 16 bits hold."""
    signs = jnp.where(jnp.arange(inner) < inner // 2, 127, -127).astype(jnp.int8)
    w = Quantised(jnp.broadcast_to(signs[None, :, None], (2, inner, 64)), jnp.ones((2, 1, 64)))
    rows = jnp.full((9, inner), 127, jnp.bfloat16).at[:, 0].add(-(jnp.arange(9, dtype=jnp.bfloat16) % 3))
    found = ragged_dot_by_kernel(rows, w, jnp.asarray([4, 5]), None, True, jnp.ones((9, 1)))
    assert inner // 2 * 127**2 > 1 << 24
    np.testing.assert_array_equal(found[:, 0].astype(jnp.float32), -127.0 * (np.arange(9) % 3))


@pytest.mark.parametrize("height", [16, full(64)])
def test_tiles_of_a_gpu_multiply_float8(height: int):
    w, rows, sizes = coded((E, D, F), "fp8").weight, random(70, D, dtype=jnp.bfloat16), sizes_of()
    codes = quantise_rows(rows, 1, ACTIVATION_SCHEMES["fp8"])
    expected = multiply_ragged_codes(codes, w, sizes, owners(), jnp.float32)[:62]
    matrices, x = ExpertMatrices(w.values, w.scales), codes.values.astype(rows.dtype)
    found = multiply_by_tiles(x, matrices, sizes, None, height, True, codes.scales)[:62]
    np.testing.assert_allclose(found.astype(jnp.float32), expected, rtol=2**-7, atol=1e-3)


# ---------------------------------------------------------------- layers


def ffn(scheme: str = "int8", dtype: Any = jnp.float32) -> FFN:
    gate, up = (coded((E, D, F), scheme, seed) for seed in (1, 2))
    gate_bias, up_bias, down_bias = (random(E, n, seed=n, dtype=dtype) for n in (F, F, D))
    return FFN(gate, up, coded((E, F, D), scheme, 3), gate_bias, up_bias, down_bias)


def packed(f: FFN) -> FFN:
    """The experts for the kernels of this CPU."""
    target = ffi_target_name("product", load_library().isa)
    assert all(can_pack("up", w, is_expert=True) for w in (f.gate, f.up, f.down))
    return map_instances(f, InputQuantised, lambda w: pack_weight("up", w, target, is_expert=True))


def choices(count: int) -> jax.Array:
    """Two of three experts for each token."""
    drawn = [np.random.default_rng(row).permutation(E - 1)[:2] for row in range(count)]
    return jnp.asarray(np.stack(drawn), jnp.int32)


def every_method(f: FFN, dtype: Any) -> dict[str, Any]:
    """The outputs of 40 tokens' experts by each method, in one order."""
    x, chosen, c = random(40, D, dtype=dtype), choices(40), EXPERTS
    run_tiles = jax.jit(run_experts_tiled, static_argnums=(1, 4))
    run_ragged = jax.jit(run_experts_ragged, static_argnums=1)
    found = {f"tiles of {n}": run_tiles(f, c, x, chosen, n) for n in (8, 32)}
    found |= {"ragged": run_ragged(f, c, x, chosen), "one alone": None}
    alone = [run_tiles(f, c, x[i : i + 1], chosen[i : i + 1], 8)[0] for i in (0, 39)]
    found["one alone"] = found["ragged"].at[jnp.asarray([0, 39])].set(jnp.stack(alone))
    if load_library().isas:
        own = packed(f)
        assert has_cpu_expert_kernel(own, dtype)
        found["kernels"] = jax.jit(run_chosen_experts, static_argnums=(1, 4))(own, c, x, chosen, 8)
        found["tiles of kernels"] = run_tiles(own, c, x, chosen, 8)
    return found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_token_has_its_bits_by_every_method(dtype: Any):
    found = every_method(ffn(dtype=dtype), dtype)
    expected = found.pop("ragged")
    assert expected.dtype == dtype and jnp.isfinite(expected.astype(jnp.float32)).all()
    for name, other in found.items():
        np.testing.assert_array_equal(other, expected, err_msg=name)


@HAS_KERNELS
@pytest.mark.parametrize("dtype", [jnp.float32, full(jnp.bfloat16)])
def test_kernels_of_a_cpu_multiply_the_coded_rows_of_experts(dtype: Any):
    """Rows that no expert has are zeros; a dtype that kernels do not take is XLA's; codes come back."""
    w, rows, sizes, experts = coded((E, D, 40)), random(70, D, dtype=dtype), sizes_of(), owners()
    made = pack_weight("up", w, ffi_target_name("product", load_library().isa), is_expert=True)
    assert made.activations == "int8" and made.expert_shape == (E,)
    jax.tree.map(np.testing.assert_array_equal, made.xla_weight, w)
    multiply = jax.jit(ragged_dot)
    found, expected = (multiply(rows, own, sizes, experts) for own in (made, w))
    np.testing.assert_array_equal(found[:62], expected[:62])
    assert not found[62:].any()
    for expert, (first, last) in {0: (0, 17), 2: (17, 57), 3: (57, 62)}.items():
        one = jax.tree.map(lambda x, e=expert: x[e], made)
        np.testing.assert_array_equal(found[first:last], einsum("md,df->mf", rows[first:last], one))
    half = rows.astype(jnp.float16)
    np.testing.assert_array_equal(
        multiply(half, made, sizes, experts)[:62], multiply(half, w, sizes, experts)[:62]
    )
    assert not multiply(rows, made, jnp.zeros(E, jnp.int32), experts).any()


def test_gpus_multiply_codes_in_tiles_or_leave_them_to_xla(monkeypatch: pytest.MonkeyPatch):
    """jax's kernel takes no codes."""
    monkeypatch.setattr(grouped_matmul, "ragged_dot_module", lambda: grouped_matmul)
    both = ffn(), ffn("fp8")
    expected = {"h200": (True, True), "a100": (True, False), "t4": (False, False)}
    for kind, possible in expected.items():
        with traced_for(kind):
            assert tuple(has_expert_kernel(f, jnp.bfloat16) for f in both) == possible
            assert not has_expert_kernel(both[0], jnp.float32)
            with disable_kernels([EXPERT_TILES_KERNEL.name]):
                assert not has_expert_kernel(both[0], jnp.bfloat16)
