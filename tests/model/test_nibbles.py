"""Products with weights of four bits: the GPU's kernel, interpreted, against the widened weight, and what XLA
makes of it for GPUs that are absent."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.targets import found_target, job_for
from cases.weights import PRODUCTS, product, random
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from suite.marks import full_if

from duetto.model.layers import einsum
from duetto.model.sharding import fit_sharding
from duetto.model.weights import nibbles
from duetto.model.weights.compression.compress import dequantise_weight, encode_weight
from duetto.model.weights.nibbles import FLOAT16_LAYOUTS, NibbleTiles, choose_nibble_tiles
from duetto.model.weights.quant import Quantised, einsum_by_kernel
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.engine_plan import EnginePlan, abstract_arguments, analyze_shape_cost
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.program_facts import read_program_facts
from duetto.serve.planner.roofline.targets import target_lowering
from duetto.serve.runtime.compiled.shapes import Shape

# equation, inputs, x's last axes, the weight's, and its scales'
WEIGHTS = {
    "q": ("btd,dnh->btnh", 1, (256,), (256, 2, 64), (8, 2, 64)),
    "o": ("btnh,nhd->btd", 2, (4, 64), (4, 64, 64), (4, 2, 64)),
    "steps of 64": ("btd,df->btf", 1, (320,), (320, 64), (10, 64)),
    "groups of 128": ("btd,df->btf", 1, (512,), (512, 64), (4, 64)),
    "groups of 256": ("btd,df->btf", 1, (512,), (512, 64), (2, 64)),
    "one scale a column": ("btd,df->btf", 1, (256,), (256, 192), (1, 192)),
    "of two heads": ("btnh,nhd->btd", 2, (4, 64), (4, 64, 64), (2, 1, 64)),
    "of all inputs": ("btnh,nhd->btd", 2, (4, 64), (4, 64, 64), (1, 1, 64)),
}


def weight(shape: tuple[int, ...], scales: tuple[int, ...], inputs: int, zeros: bool) -> Quantised:
    rng = np.random.default_rng(1)
    values = list(shape)
    values[inputs - 1] //= 2
    own = jax.device_put(rng.integers(0, 16, scales, np.uint8)) if zeros else None
    return Quantised(
        jax.device_put(rng.integers(0, 256, values, np.uint8)),
        random(*scales, dtype=jnp.bfloat16),
        own,
        "int4",
        inputs - 1 - len(shape),
    )


kernel = jax.jit(einsum_by_kernel, static_argnums=(2, 3))


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nibbles, "multiply_nibbles", partial(nibbles.multiply_nibbles, interpret=True))


@full_if(
    lambda name, zeros: zeros != (name in ("q", "steps of 64", "of two heads")) or name == "groups of 256"
)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("name", WEIGHTS)
def test_the_kernel_multiplies_by_the_widened_weight(name: str, zeros: bool, interpreted: None):
    equation, inputs, last, shape, scales = WEIGHTS[name]
    w, x = weight(shape, scales, inputs, zeros), random(2, 3, *last, seed=2, dtype=jnp.bfloat16)
    assert w.shape == shape and w.has_nibble_kernel(x, inputs)
    expected = product(equation, x, dequantise_weight(w, x.dtype), jnp.float32)
    found = kernel(x, w, inputs, jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    half = kernel(x, w, inputs, jnp.bfloat16)
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, np.asarray(found).astype(jnp.bfloat16))


def test_row_bits_do_not_depend_on_the_number_of_rows(interpreted: None):
    w, x = weight((512, 128), (16, 128), 1, zeros=False), np.asarray(random(130, 512, dtype=jnp.bfloat16))
    whole = np.asarray(kernel(x, w, 1, jnp.float32))
    for rows in (1, 8, 64):
        assert np.asarray(kernel(x[:rows], w, 1, jnp.float32)).tobytes() == whole[:rows].tobytes()


@pytest.mark.parametrize(
    ("inner", "columns", "groups", "expected"),
    [(4096, 14336, 128, NibbleTiles(1, 16, 64)), (14336, 4096, 448, NibbleTiles(4, 16, 64)),
     (4096, 1024, 32, NibbleTiles(8, 64, 64)), (384, 64, 12, NibbleTiles(3, 16, 64)), (4096, 96, 128, None),
     (2880, 4096, 90, NibbleTiles(3, 16, 32)), (2880, 512, 90, NibbleTiles(5, 16, 32)), (96, 128, 3, None),
     (4096, 128, 4096, None)],
)  # fmt: skip
def test_cuts_follow_from_the_weight(inner: int, columns: int, groups: int, expected: NibbleTiles | None):
    assert choose_nibble_tiles(inner, columns, groups) == expected


@pytest.mark.parametrize("name", FLOAT16_LAYOUTS)
def test_layouts_hold_the_bits_of_their_dtypes_numbers(name: str):
    """GPUs alone run the instructions that take them."""
    layout, dtype = FLOAT16_LAYOUTS[name], jnp.dtype(name)

    def bits(number: float) -> int:
        return int(np.array(number, dtype).view(np.uint16))

    def number(bits: int) -> float:
        return float(np.array(bits, np.uint16).view(dtype))

    assert (layout.one, layout.half) == (bits(1), bits(0.5))
    assert [bits(layout.least + i) for i in range(16)] == [layout.large << 8 | i for i in range(16)]
    factor, sizes = number(layout.bias_factor), [size << layout.mantissa_bit for size in range(8)]
    assert [number(size) * factor for size in sizes] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_a_devices_part_without_a_cut_is_widened():
    w, x = weight((96, 40), (3, 40), 1, zeros=True), random(5, 96, dtype=jnp.bfloat16)
    found = nibbles.multiply_nibbles(x, nibbles.NibbleCodes(w.values, w.scales, w.zeros), jnp.float32)
    expected = product("td,df->tf", x, dequantise_weight(w, x.dtype), jnp.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_other_weights_and_products_have_no_kernel():
    w, x = weight((256, 128), (8, 128), 1, zeros=False), random(4, 256, dtype=jnp.bfloat16)
    assert w.has_nibble_kernel(x, 1)
    assert not w.has_nibble_kernel(random(4, 256), 1)
    assert not w.has_nibble_kernel(x, 0) and not w.has_nibble_kernel(x, 2)
    assert not replace(w, scheme="fp4").has_nibble_kernel(x, 1)
    assert not replace(w, packed=-1).has_nibble_kernel(x, 1)
    assert not replace(w, scales=random(8, 128, dtype=jnp.float8_e8m0fnu)).has_nibble_kernel(x, 1)
    wide = weight((4, 64, 64), (1, 2, 64), 2, zeros=False)
    assert not wide.has_nibble_kernel(random(2, 4, 64, dtype=jnp.bfloat16), 2)
    eight = encode_weight(random(*PRODUCTS["q"][2]), (-3,), "int8")
    assert not eight.has_nibble_kernel(random(2, 3, 64, dtype=jnp.bfloat16), 1)


# ------------------------------------------------------------ compiled for GPUs that are absent


def plan_of(form: str | None, layers: int) -> EnginePlan:
    plan, config = job_for(found_target("h200"), "8b"), PRESETS["8b"]
    return replace(
        plan,
        config=replace(config, layers=config.layers[:layers]),
        options=EngineOptions(quantization=form),
    )


@pytest.fixture(scope="module")
def touched() -> Any:
    """Bytes of a whole model's decode of 64 rows: its layers are equal, so that the second shows what each
    costs; the head counts once."""

    def of(form: str | None) -> int:
        plans = [plan_of(form, layers) for layers in (1, 2)]
        rows = [analyze_shape_cost(plan, abstract_arguments(plan), Shape("decode", 64, 1)) for plan in plans]
        one, two = (row.facts.bytes for row in rows if row.facts)
        return one + (len(PRESETS["8b"].layers) - 1) * (two - one)

    return of


@pytest.mark.extras
@pytest.mark.usefixtures("greedy_only")
def test_decode_touches_fewer_bytes_of_quantised_weights(touched: Any):
    whole = touched(None)
    for form, most in {"int8": 0.80, "fp8": 0.80, "int4": 0.66}.items():
        assert touched(form) <= most * whole, form


@pytest.mark.extras
@pytest.mark.parametrize("groups", [128, 1])
@pytest.mark.parametrize(
    ("split", "sums"), [((None, "tensor"), 0), (("tensor", None), 1)], ids=["columns", "inner"]
)
def test_devices_multiply_with_the_codes_that_they_hold(
    split: tuple[str | None, ...], sums: int, groups: int
):
    target = found_target("2xh200")
    mesh = Mesh(np.array(target.devices), ("tensor",))
    own, whole = NamedSharding(mesh, PartitionSpec(*split)), NamedSharding(mesh, PartitionSpec())
    w = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=fit_sharding(own, x.shape)),
        weight((4096, 1024), (groups, 1024), 1, zeros=True),
    )
    x = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16, sharding=whole)
    with target_lowering(target):
        compiled = jax.jit(lambda x, w: einsum("td,df->tf", x, w)).lower(x, w).compile()
    found = read_program_facts(compiled)
    assert {name: made.calls for name, made in found.collectives.items()} == (
        {"all-reduce": 1} if sums else {}
    )
    assert not found.moved
