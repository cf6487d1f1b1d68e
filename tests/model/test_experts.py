"""Experts' products on GPUs: the order of rows, what the kernels are given, and, interpreted, what jax's
returns."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.gpus import traced_for
from cases.weights import random
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from suite.marks import full

from duetto.model.config import Experts
from duetto.model.experts import (
    MoE,
    experts_spec,
    has_expert_kernel,
    run_experts_ragged,
    run_experts_tiled,
    sort_by_expert,
)
from duetto.model.ffn import FFN
from duetto.model.gpus import JAX_KERNELS_PACKAGE, disable_kernels
from duetto.model.layers import Weight
from duetto.model.tree import init_params
from duetto.model.weights import grouped_matmul
from duetto.model.weights.compression.compress import compress_weight
from duetto.model.weights.expert_tiles import EXPERT_TILES_KERNEL, multiply_expert_arrays
from duetto.model.weights.grouped_matmul import choose_expert_kernel, grouped_product

PLAIN = Experts(5, 2, 64)
BIASED = Experts(5, 3, 128, "clamped_silu", bias=True, clamp=7.0)
UNGATED = Experts(5, 2, 64, "relu2", gated=False)
D = 64


@partial(jax.jit, static_argnums=0)
def weights(c: Experts) -> MoE:
    """Random ones of one layer, biases too."""
    made = init_params(jax.random.key(0), experts_spec(c, D, 1), jnp.bfloat16)
    leaves, structure = jax.tree.flatten(made)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [jax.random.normal(key, x.shape, x.dtype) / 8 for key, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def tokens(count: int, seed: int = 2) -> jax.Array:
    return random(count, D, seed=seed, dtype=jnp.bfloat16)


def choices(c: Experts, count: int, among: int) -> jax.Array:
    """Different experts for each token, the first `among` ones only."""
    drawn = [np.random.default_rng(row).permutation(among)[: c.active] for row in range(count)]
    return jax.device_put(np.stack(drawn).astype(np.int32))


@pytest.mark.parametrize("count, E, active", [(1, 1, 1), (1, 8, 3), (7, 4, 2), (64, 128, 8), (300, 5, 4)])
def test_choices_are_sorted_by_expert_then_by_token(count: int, E: int, active: int):
    chosen = choices(Experts(E, active, 64), count, E)
    order, sizes = jax.jit(sort_by_expert, static_argnums=1)(chosen, E)
    flat = np.asarray(chosen).reshape(-1)
    np.testing.assert_array_equal(order, np.argsort(flat, stable=True))
    np.testing.assert_array_equal(sizes, np.bincount(flat, minlength=E))


@partial(jax.jit, static_argnums=1)
def both_products(f: FFN, c: Experts, x: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    return run_experts_ragged(f, c, x, chosen), run_experts_tiled(f, c, x, chosen, 8)


@pytest.mark.parametrize(
    "c, count, among",
    [(PLAIN, 40, 4), full(PLAIN, 64, 5), (BIASED, 1, 5), (BIASED, 43, 3), (UNGATED, 33, 4)],
)
def test_products_of_sorted_rows_are_those_of_tiles(c: Experts, count: int, among: int):
    """Also where experts have no tokens."""
    w, x, chosen = weights(c), tokens(count), choices(c, count, among)
    found, expected = both_products(w.experts, c, x, chosen)
    assert found.shape == expected.shape == (count, c.active, D) and found.dtype == jnp.bfloat16
    a, b = (np.asarray(y, np.float32) for y in (found, expected))
    np.testing.assert_allclose(a, b, atol=0.02 * float(np.abs(b).max()))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs here, as two processors would run it; jax's interpreter for GPUs is not public in all
    versions."""
    pytest.importorskip("absl")
    module = import_module(f"{JAX_KERNELS_PACKAGE}.ragged_dot_mgpu")
    settings = import_module("jax._src.pallas.mosaic_gpu.interpret.params").InterpretGPUParams()
    real = module.plgpu.kernel

    def kernel(body: Any, **given: Any) -> Any:
        return real(body, **{**given, "grid": (2,), "interpret": settings})

    monkeypatch.setattr(module.plgpu, "kernel", kernel)
    monkeypatch.setattr(grouped_matmul, "ragged_dot_module", lambda: module)


def product_of(rows: np.ndarray, w: jax.Array, sizes: list[int]) -> np.ndarray:
    uncached: Any = grouped_matmul.grouped_product
    found = jax.jit(uncached.__wrapped__)(rows, w, np.array(sizes, np.int32))
    assert found.shape == (rows.shape[0], w.shape[2])
    return np.asarray(found, np.float32)[: sum(sizes)]


def test_bits_of_a_row_depend_on_its_expert_alone(interpreted: None):
    """Neither on the rows beside it, nor on its place in a block or in two, nor on how many its expert has;
    and they are those of the product."""
    rows, w = np.asarray(tokens(101)), random(4, D, 64, seed=3, dtype=jnp.bfloat16)
    found = product_of(rows, w, [0, 60, 9, 31])
    expected = jax.jit(jax.lax.ragged_dot)(rows[:100], w, np.array([0, 60, 9, 31], np.int32))
    np.testing.assert_allclose(found, np.asarray(expected, np.float32), atol=0.1)
    assert np.abs(found).max() > 10
    few = product_of(rows[66:69], w, [0, 0, 3, 0])
    np.testing.assert_array_equal(few, found[66:69])


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """jax is taken to have its kernel, and a GPU for it, which may not use ours."""
    monkeypatch.setattr(grouped_matmul, "ragged_dot_module", lambda: grouped_matmul)
    with traced_for("h200"), disable_kernels([EXPERT_TILES_KERNEL.name]):
        yield


def matrices(D: int, F: int, dtype: Any = jnp.bfloat16) -> FFN:
    """Two experts'."""
    wide, tall, bias = (random(*shape, dtype=dtype) for shape in ((2, D, F), (2, F, D), (2, F)))
    return FFN(wide, wide, tall, bias)


def test_the_kernel_takes_types_and_sizes_that_blocks_divide(there: None):
    assert has_expert_kernel(matrices(64, 192), jnp.bfloat16)
    assert has_expert_kernel(matrices(64, 192, jnp.float16), jnp.float16)
    assert has_expert_kernel(replace(matrices(64, 192), gate=None), jnp.bfloat16)
    assert not has_expert_kernel(matrices(64, 96), jnp.bfloat16)
    assert not has_expert_kernel(matrices(96, 64), jnp.bfloat16)
    assert not has_expert_kernel(matrices(64, 64), jnp.float32)
    assert not has_expert_kernel(matrices(64, 64, jnp.float32), jnp.float32)


@pytest.mark.parametrize("how, possible", [("int8", True), ("int4", True), (1.0, False)])
def test_the_kernel_takes_the_arrays_that_records_stand_for(there: None, how: Any, possible: bool):
    """Two factors of a size that is no multiple of a block's are none of them."""
    f = matrices(128, 192)
    down = compress_weight(f.down, (-2,), how)
    assert isinstance(down, Weight)
    assert has_expert_kernel(replace(f, down=down), jnp.bfloat16) == possible


def test_the_kernel_takes_weights_on_one_device(there: None):
    def possible(devices: int) -> bool:
        mesh = AbstractMesh((devices,), ("tensor",))
        where = NamedSharding(mesh, PartitionSpec())
        f = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), matrices(64, 128))
        found = []
        jax.eval_shape(lambda f: found.append(has_expert_kernel(f, jnp.bfloat16)), f)
        return found[0]

    assert possible(1) and not possible(2)


@pytest.mark.parametrize(
    "kind, possible",
    [
        ("NVIDIA H100 80GB HBM3", True),
        ("NVIDIA H200", True),
        ("NVIDIA GH200 480GB", True),
        ("NVIDIA A100-SXM4-80GB", False),
        ("NVIDIA B200", False),
        ("NVIDIA GeForce RTX 4090", False),
    ],
)
def test_jaxs_kernel_is_for_hoppers(there: None, kind: str, possible: bool):
    with traced_for(kind):
        assert has_expert_kernel(matrices(64, 64), jnp.bfloat16) == possible


def test_jaxs_kernel_replaces_a_refused_kernel(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grouped_matmul, "ragged_dot_module", lambda: grouped_matmul)
    for kind, other in (("h200", grouped_product), ("a100", None)):
        with traced_for(kind):
            assert choose_expert_kernel(jnp.bfloat16, (2, 64, 64)) is multiply_expert_arrays
            with disable_kernels([EXPERT_TILES_KERNEL.name]):
                assert choose_expert_kernel(jnp.bfloat16, (2, 64, 64)) is other
    assert choose_expert_kernel(jnp.bfloat16, (2, 64, 64)) is None  # no GPU
