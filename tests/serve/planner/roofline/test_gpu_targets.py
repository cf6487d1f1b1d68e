"""Each GPU that a plan knows compiles the kinds of layers, or refuses them by name before anything is
compiled."""

from dataclasses import replace
from typing import Any

import pytest
from cases.targets import SIZES, WORDS, found_target

from duetto.model.config import Dense, Experts, GroupedQuery, Latent, LayerKind, ModelConfig
from duetto.model.gpus import gpu_of
from duetto.model.recurrent.kinds import DeltaNet
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.planning import EnginePlan, abstract_arguments, compile_and_read, plan_job
from duetto.serve.planner.roofline.targets import CHIPS, GPUS, KINDS, find_target, known_target
from duetto.serve.runtime.compiled.shapes import Shape

# Those that differ in capability or in shared memory.
CLASSES = "t4", "a100", "l4", "h200", "b200", "rtx5090"
TRITON = 'custom_call_target="__gpu$xla.gpu.triton"'
DECODE, PREFILL = Shape("decode", 8, 1), Shape("prefill", 1, 128)
DENSE, MIXTURE = Dense(1024), Experts(8, 2, 256)
# mixer, shape, dtype, cache, and Triton kernels of a layer
CELLS = {
    "heads of 64": (GroupedQuery(8, 2, 64), DECODE, "bfloat16", "auto", 3),
    "heads of 128, int8": (GroupedQuery(8, 2, 128), DECODE, "bfloat16", "int8", 2),
    "prefill, heads of 256": (GroupedQuery(8, 2, 256), PREFILL, "bfloat16", "auto", 2),
    "prefill, heads of 128, float16": (GroupedQuery(8, 2, 128), PREFILL, "float16", "auto", 2),
    "latent of 128 heads": (Latent(128, 512, 128, 64, 128), DECODE, "bfloat16", "auto", 2),
    "prefill, latent of 128 heads": (Latent(128, 512, 128, 64, 128), PREFILL, "bfloat16", "auto", 1),
    "delta rule": (DeltaNet(4, 8, 128, 128), DECODE, "bfloat16", "auto", 1),
}
# form of weights, and Triton kernels of a layer with heads of 64 and experts
MIXTURES = {"experts": (None, 6), "experts in int8": ("int8", 6), "experts in int4": ("int4", 10)}


def plan_of(
    name: str, mixer: Any, dtype: str, kept: str, ffn: Any = DENSE, form: str | None = None
) -> EnginePlan:
    target, layer = found_target(name), LayerKind(mixer, ffn)
    config = ModelConfig(WORDS, 512, (layer,), 4096)
    sizes = replace(SIZES, max_num_seqs=8, pages=(513,) * len(config.windows), kv_cache_dtype=kept)
    return EnginePlan("test", config, dtype, EngineOptions(quantization=form), target, sizes, 512)


@pytest.mark.extras
@pytest.mark.as_served
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", CLASSES)
def test_every_gpu_compiles_every_kind_of_layer(name: str, cell: str):
    mixer, shape, dtype, kept, kernels = CELLS[cell]
    plan = plan_of(name, mixer, dtype, kept)
    text = compile_and_read(plan, shape, abstract_arguments(plan))[0][0].as_text() or ""
    assert text.count(TRITON) == (0 if name == "t4" else kernels)


@pytest.mark.extras
@pytest.mark.as_served
@pytest.mark.parametrize("cell", MIXTURES)
@pytest.mark.parametrize("name", CLASSES)
def test_every_gpu_since_ampere_multiplies_experts_where_they_lie(name: str, cell: str):
    form, kernels = MIXTURES[cell]
    plan = plan_of(name, GroupedQuery(8, 2, 64), "bfloat16", "auto", MIXTURE, form)
    text = compile_and_read(plan, DECODE, abstract_arguments(plan))[0][0].as_text() or ""
    assert text.count(TRITON) == (0 if name == "t4" else kernels)


@pytest.mark.extras
@pytest.mark.as_served
@pytest.mark.parametrize("name", ["2xa100", "2xh200"])
def test_devices_of_a_mesh_are_the_gpu_that_is_described(name: str):
    """Each has the kernels of its own GPU."""
    plan = plan_of(name, GroupedQuery(8, 2, 64), "bfloat16", "auto", MIXTURE)
    assert {gpu_of(device) for device in plan.target.devices} == {CHIPS[name[2:]].gpu}
    text = compile_and_read(plan, DECODE, abstract_arguments(plan))[0][0].as_text() or ""
    assert text.count(TRITON) == 5 and "mosaic_gpu" not in text


@pytest.mark.extras
@pytest.mark.parametrize("name", CHIPS)
def test_a_plan_computes_in_what_the_gpu_multiplies(name: str):
    found_target(name)
    plan = plan_job(None, "135m", "auto", EngineOptions(max_num_seqs=8), find_target(name), None)
    assert plan.dtype == ("float16" if name == "t4" else "bfloat16")


@pytest.mark.extras
@pytest.mark.parametrize("name", ["t4", "a100"])
def test_a_cache_that_a_gpu_cannot_convert_is_refused_before_compiling(name: str):
    target = found_target(name)
    with pytest.raises(ValueError, match='"fp8" is not allowed: .* use "int8"'):
        plan_job(None, "135m", "auto", EngineOptions(kv_cache_dtype="fp8"), target, None)


def test_every_gpu_of_the_table_is_described_and_known_by_its_name():
    kinds = {(chip.gpu.capability, chip.gpu.shared_memory) for chip in CHIPS.values()}
    assert len(kinds) == len(CLASSES) == len({CHIPS[name].gpu.capability for name in CLASSES})
    assert set(CHIPS) == set(GPUS) and set(GPUS) < set(KINDS.values())
    for name, chip in CHIPS.items():
        assert known_target(name).peaks == GPUS[name] == known_target(f"8x{name}").peaks
        assert chip.gpu.shared_memory <= 232_448
