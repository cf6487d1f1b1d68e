"""What mixtures of experts touch on accelerators that are not there: each expert's weights once, where they
lie."""

from dataclasses import replace
from typing import Any

import pytest
from cases.targets import LAYERS, compile_for, found_target, job_for

from duetto.model.config import Experts
from duetto.model.gpus import disable_kernels
from duetto.model.weights import grouped_matmul
from duetto.model.weights.expert_tiles import EXPERT_TILES_KERNEL
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.engine_plan import EnginePlan, abstract_arguments, analyze_shape_cost
from duetto.serve.planner.roofline.hlo import (
    FREE_OPERATIONS,
    Computation,
    Instruction,
    Module,
    buffer_types,
    type_shape,
)
from duetto.serve.runtime.compiled.shapes import Shape

pytestmark = [pytest.mark.as_served, pytest.mark.usefixtures("greedy_only")]

PRODUCTS = 3  # gate, up and down
WIDE, NARROW = Shape("decode", 64, 1), Shape("decode", 8, 1)
# Bytes touched over the least, and MiB of temporaries: what was reached, rounded up. 1.15 is the most that we
# accept of a decode on a GPU. Eight rows go to 40 % of 128 experts.
MOST = {
    ("h200", "30b-a3b", WIDE): (1.05, 38),
    ("h200", "30b-a3b", NARROW): (1.02, 5),
    ("h200", "30b-a3b", Shape("prefill", 1, 512)): (1.08, 39),
    ("a100", "30b-a3b", WIDE): (1.05, 38),
    ("a100", "30b-a3b", NARROW): (1.02, 5),
    ("l4", "30b-a3b", WIDE): (1.05, 38),
    ("l4", "30b-a3b", NARROW): (1.02, 5),
    ("h200", "gpt-oss-20b", WIDE): (1.06, 50),
    ("v6e:1x1", "30b-a3b", WIDE): (1.03, 6),
    ("v6e:2x2", "30b-a3b", WIDE): (1.05, 3),
    ("v6e:2x2", "gpt-oss-20b", WIDE): (1.06, 4),
    ("v6e:2x4", "gpt-oss-20b", WIDE): (1.8, 7),  # a device's one head of 64 has zeros behind it
}
# The same of experts in eight and in four bits, the first with rows in codes too.
MOST_OF_CODES = {
    ("h200", "30b-a3b", "int8"): 1.07,
    ("h200", "30b-a3b", "int8 x int8"): 1.07,
    ("h200", "30b-a3b", "int4"): 1.12,
    ("a100", "gpt-oss-20b", "int4"): 1.12,
}
# Kernels of a layer, counted from its experts' first product to the next layer's.
KERNELS = {"30b-a3b": 29, "gpt-oss-20b": 31}


def compiled(plan: EnginePlan, shape: Shape) -> Module:
    forward = compile_for(plan, shape, abstract_arguments(plan)).programs[0]
    return Module.parse(forward.as_text() or "")


def layers(module: Module) -> Computation:
    """The computation that all layers are in."""
    return module.computations[module.entry]


def is_product(x: Instruction) -> bool:
    """Whether an instruction is the kernel of experts' products."""
    return "multiply_experts" in x.attribute_text


def is_jaxs(x: Instruction) -> bool:
    """Whether it is the one that jax ships."""
    return "mosaic_gpu" in x.attribute_text


def copied(module: Module, plan: EnginePlan) -> list[str]:
    """Instructions that write an expert's matrix, or more of them."""
    kind, D = plan.config.layers[0].ffn, plan.config.hidden_size
    assert isinstance(kind, Experts)
    matrices = [D, kind.size], [kind.size, D]
    written = (
        x
        for x in module.buffer_instructions()
        if x.operation not in (*FREE_OPERATIONS, "while", "conditional")
    )
    return [
        x.name
        for x in written
        if any(type_shape(kind)[-2:] in matrices for kind in buffer_types(x.type_text))
    ]


@pytest.mark.parametrize("target, model, shape", MOST, ids=str)
@pytest.mark.extras
def test_a_step_reads_each_expert_little_more_than_once(target: str, model: str, shape: Shape):
    plan = job_for(found_target(target), model)
    row, (ratio, temporaries) = (
        analyze_shape_cost(plan, abstract_arguments(plan), shape),
        MOST[target, model, shape],
    )
    assert row.facts is not None and row.excess is not None
    assert row.excess <= ratio
    assert row.facts.temporaries <= temporaries * 2**20


@pytest.mark.parametrize("model", KERNELS)
@pytest.mark.extras
def test_expert_layers_copy_no_weights_and_have_no_control_flow(model: str):
    plan = job_for(found_target("h200"), model)
    module = compiled(plan, WIDE)
    run = [x for x in layers(module).values() if x.operation not in FREE_OPERATIONS]
    places = [i for i, x in enumerate(run) if is_product(x)]
    assert len(places) == PRODUCTS * LAYERS
    assert not copied(module, plan)
    until = run[: places[-1]]
    assert not [x.name for x in until if x.operation in ("while", "conditional", "call")]
    assert places[PRODUCTS] - places[0] <= KERNELS[model]


@pytest.mark.parametrize("target, model, form", MOST_OF_CODES, ids=str)
@pytest.mark.extras
def test_codes_of_experts_are_read_in_place(target: str, model: str, form: Any):
    scheme, _, activations = form.partition(" x ")
    options = EngineOptions(quantization=scheme, activations=activations or None)
    plan = replace(job_for(found_target(target), model), options=options)
    row = analyze_shape_cost(plan, abstract_arguments(plan), WIDE)
    assert row.excess is not None and row.excess <= MOST_OF_CODES[target, model, form]


@pytest.mark.extras
def test_jaxs_kernel_replaces_a_refused_one_on_hopper():
    """It reads all experts."""
    plan = job_for(found_target("h200"), "30b-a3b")
    with disable_kernels([EXPERT_TILES_KERNEL.name]):
        module = compiled(plan, WIDE)
    assert sum(map(is_jaxs, layers(module).values())) == PRODUCTS * LAYERS
    assert not copied(module, plan) and not any(map(is_product, module.buffer_instructions()))


@pytest.mark.extras
def test_without_a_kernel_tiles_are_copied_in_a_loop(monkeypatch: pytest.MonkeyPatch):
    """A control of the test above."""
    monkeypatch.setattr(grouped_matmul, "ragged_dot_module", lambda: None)
    plan = job_for(found_target("h200"), "30b-a3b")
    with disable_kernels([EXPERT_TILES_KERNEL.name]):
        module = compiled(plan, Shape("decode", 16, 1))
    loops = [x for x in layers(module).values() if x.operation == "while"]
    assert len(loops) >= LAYERS and copied(module, plan)
    assert not any(map(is_product, module.buffer_instructions()))


@pytest.mark.parametrize("options", [{}, {"enable_expert_parallel": True}], ids=str)
@pytest.mark.extras
def test_each_of_several_gpus_multiplies_with_what_it_has(options: dict[str, bool]):
    plan = replace(job_for(found_target("4xh200"), "30b-a3b"), options=EngineOptions(**options))
    module = compiled(plan, Shape("decode", 8, 1))
    assert sum(map(is_product, layers(module).values())) == PRODUCTS * LAYERS
