"""How products were configured is read from a module's text, and tells which shapes would have equal bits."""

import dataclasses
import re
from collections import Counter
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases.targets import LAYERS, found_target, job_for
from jax.sharding import SingleDeviceSharding

from duetto.model.layers import einsum, einsums
from duetto.model.weights.input_quantised import InputQuantised
from duetto.model.weights.quant import quantise_weight
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.engine_plan import abstract_arguments, analyze_shape_cost
from duetto.serve.planner.roofline.hlo import Module
from duetto.serve.planner.roofline.products import Product, find_products, group_by_products
from duetto.serve.runtime.compiled.shapes import Shape

FUSION = (
    '%{name} = {kind} fusion(%x, %w), kind=kCustom, calls=%inside, backend_config={{"fusion_backend_config":'
    '{{"kind":"__triton_nested_gemm_fusion","block_level_fusion_config":{{"num_warps":"{warps}"}}}}}}'
)
LIBRARY = (
    '%lt = bf16[8,512]{1,0} custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", '
    'backend_config={"gemm_backend_config":{"selected_algorithm":"3"}}'
)
KERNEL = (
    '%mpmd_map.1 = bf16[8,128]{1,0} custom-call(%x, %w), custom_call_target="mosaic_gpu_v2", '
    'metadata={op_name="jit(decode)/jit(in_rows)/tiles_64x32x32x16/anonymous/mpmd_map"}, '
    'backend_config={kernel_hash = "\\AD", module = "ML(\\EF"}'
)
OTHER = '%add = f32[8,64]{1,0} fusion(%x), kind=kLoop, calls=%inside, backend_config={"device_type":"X"}'


def module(*lines: str) -> Module:
    text = "\n".join(f"  {line}" for line in lines)
    return Module.parse(f"HloModule test\n\nENTRY %main (x: f32[8,64]) -> f32[8,64] {{\n{text}\n}}\n")


def fusion(kind: str, warps: int = 2) -> str:
    return FUSION.format(name="gemm", kind=kind, warps=warps)


def test_products_are_read_with_their_parts():
    found = find_products(module(OTHER, fusion("f32[4,8,256]{2,1,0}"), LIBRARY, KERNEL))
    assert [(p.columns, p.parts, p.kind) for p in found] == [
        (256, 4, "__triton_nested_gemm_fusion"),
        (512, 1, "__cublas$lt$matmul"),
        (128, 1, "mosaic_gpu_v2"),
    ]
    assert found[2].config == "tiles_64x32x32x16"
    assert '"num_warps": "2"' in found[0].config and '"selected_algorithm": "3"' in found[1].config


def test_shapes_are_alike_where_every_product_of_a_layer_is():
    def program(parts: int, warps: int, logits: int) -> tuple[Product, ...]:
        lines = fusion(f"f32[{parts},8,256]{{2,1,0}}", warps), fusion("f32[8,999]{1,0}", logits)
        return sum((find_products(module(line)) for line in lines), ())

    programs = {
        "a": program(4, 2, 1), "b": program(4, 2, 8), "split": program(2, 2, 1), "warps": program(4, 4, 1),
    }  # fmt: skip
    assert group_by_products(programs, vocabulary=999) == [["a", "b"], ["split"], ["warps"]]


@pytest.mark.extras
@pytest.mark.usefixtures("greedy_only")
def test_h200_products_are_alike_in_all_but_narrow_decodes():
    plan = job_for(found_target("h200"), "8b")
    shapes = Shape("prefill", 1, 512), Shape("prefill", 16, 32), Shape("decode", 8, 1), Shape("decode", 64, 1)
    rows = [analyze_shape_cost(plan, abstract_arguments(plan), shape) for shape in shapes]
    found = {str(row.shape): row.facts.products for row in rows if row.facts}
    assert all(len(p) >= 5 * len(plan.config.layers) for p in found.values())
    groups = group_by_products(found, plan.config.vocab_size)
    assert groups == [["prefill[1,512]", "prefill[16,32]", "decode[64,1]"], ["decode[8,1]"]]


@pytest.mark.extras
@pytest.mark.usefixtures("greedy_only")
def test_fixed_products_are_alike_at_every_number_of_rows():
    plan = job_for(found_target("h200"), "8b")
    plan = dataclasses.replace(plan, options=EngineOptions(batch_invariant_matmul=True))
    shapes = Shape("decode", 64, 1), Shape("decode", 128, 1), Shape("prefill", 1, 512)
    rows = [analyze_shape_cost(plan, abstract_arguments(plan), shape) for shape in shapes]
    found = {str(row.shape): row.facts.products for row in rows if row.facts}
    assert group_by_products(found, plan.config.vocab_size) == [[str(shape) for shape in shapes]]
    narrow, wide = "tiles_64x32x32x16", "tiles_64x64x64x8"
    expected = {(1024, narrow): 2, (4096, narrow): 3, (14336, wide): 2}
    for own in found.values():
        head = [p.config for p in own if p.columns == plan.config.vocab_size]
        layers = [p for p in own if p.columns != plan.config.vocab_size]
        assert set(head) == {"tiles_64x64x64x6"}
        assert all(p.kind.startswith("mosaic_gpu") for p in own)
        assert Counter((p.columns, p.config) for p in layers) == {k: LAYERS * n for k, n in expected.items()}


@pytest.mark.extras
@pytest.mark.usefixtures("greedy_only")
def test_products_of_codes_read_less_than_three_quarters():
    """A layer of 8B in decode, by the difference of two layers and one: no weight is copied, sums are scaled
    where they are made, and four kernels more quantise inputs. One product makes gate and up."""

    def layer_cost(**options: Any) -> tuple[float, int]:
        costs = []
        for count in (2, 1):
            plan = job_for(found_target("h200"), "8b")
            config = dataclasses.replace(plan.config, layers=plan.config.layers[:count])
            plan = dataclasses.replace(plan, config=config, options=EngineOptions(**options))
            facts = analyze_shape_cost(plan, abstract_arguments(plan), Shape("decode", 64, 1)).facts
            assert facts is not None and facts.thunks is not None
            costs.append((facts.bytes, facts.thunks.kernels))
        (two, kernels), (one, others) = costs
        return two - one, kernels - others

    (plain, kernels), (coded, more) = layer_cost(), layer_cost(quantization="int8", activations="int8")
    assert coded < 0.72 * plain and (kernels, more) == (11, 14)


def abstract_operands(target: str, rows: int, scheme: str) -> tuple[Any, Any, InputQuantised]:
    """Shapes on a target's first device: rows, a weight, and the weight in codes whose products code rows."""
    sharding = SingleDeviceSharding(found_target(target).devices[0])
    shape = partial(jax.ShapeDtypeStruct, sharding=sharding)
    plain = shape((4096, 14336), jnp.bfloat16)
    weight = jax.eval_shape(partial(quantise_weight, contracted=(-2,), scheme=scheme), plain)
    coded = InputQuantised(jax.tree.map(lambda x: shape(x.shape, x.dtype), weight), scheme)
    return shape((rows, 4096), jnp.bfloat16), plain, coded


@pytest.mark.extras
def test_products_of_codes_take_fewer_cycles_of_a_tpu():
    """By XLA's own estimate for a v5e: two products of one input, which is coded once."""
    rows, plain, coded = abstract_operands("v5e:1x1", 512, "int8")

    def cycles(weight: Any) -> int:
        multiply = jax.jit(lambda x, w, v: einsums("td,df->tf", x, (w, v)))
        program = multiply.lower(rows, weight, weight).compile()
        return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', program.as_text() or "")))

    assert 0 < cycles(coded) < 0.6 * cycles(plain)


@pytest.mark.extras
@pytest.mark.parametrize(("triton", "product"), [(True, " dot("), (False, "__cublas$lt$matmul$f8")])
def test_sums_of_float8_codes_have_the_highest_precision(triton: bool, product: str):
    """On an H200, in the kernels of Triton and of cuBLASLt: cuBLASLt else keeps fewer bits of a sum."""
    rows, _, coded = abstract_operands("h200", 64, "fp8")
    lowered = jax.jit(partial(einsum, "td,df->tf")).lower(rows, coded)
    text = lowered.compile({"xla_gpu_enable_triton_gemm": triton}).as_text() or ""
    (line,) = (line for line in text.splitlines() if product in line)
    assert re.search(r"operand_precision\W+highest\W+highest\b", line, re.IGNORECASE)
