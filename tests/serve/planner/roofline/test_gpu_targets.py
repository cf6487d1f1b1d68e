"""Each GPU and TPU that a plan knows compiles the kinds of layers, or refuses them by name before anything is
compiled."""

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import pytest
from cases.targets import SIZES, WORDS, found_target
from fakes.greedy import greedy_programs

from duetto.model.config import Dense, Experts, GroupedQuery, Latent, LayerKind, ModelConfig
from duetto.model.gpus import gpu_from_device
from duetto.model.recurrent.kinds import DeltaNet
from duetto.model.sharding import device_bytes
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.engine_plan import EnginePlan, abstract_arguments, compile_stages, plan_engine
from duetto.serve.planner.roofline.program_facts import read_program_facts
from duetto.serve.planner.roofline.targets import CHIPS, GPUS, TARGET_KINDS, find_target, target_facts
from duetto.serve.runtime.compiled.shapes import Shape

SLICES = {"v5e:1x1": 1, "v6e:1x1": 1, "v6e:2x2": 4}  # TPUs that split every layer
TRITON, MOSAIC = (f'custom_call_target="{name}' for name in ("__gpu$xla.gpu.triton", "mosaic_gpu"))
NARROW, WIDE, PREFILL = Shape("decode", 8, 1), Shape("decode", 64, 1), Shape("prefill", 1, 512)
DENSE, MIXTURE = Dense(1024), Experts(8, 2, 256)
LATENT, DELTA = Latent(128, 512, 128, 64, 128), DeltaNet(4, 8, 128, 128)


def heads(size: int) -> GroupedQuery:
    return GroupedQuery(8, 2, size)


class Cell(NamedTuple):
    """A program: its layers, each with the number of our Pallas kernels that it has. One cell of each
    instruction set draws, which takes longer to compile than layers do."""

    shape: Shape
    layers: dict[LayerKind, int]
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    quantization: Any = None
    draws: bool = False
    longest: int = 4096


# A head's decode has three kernels: turn and writes (not into a cache in 8 bits), parts, and their sum; its
# prefill two; experts have three, int4's four projections one each.
CELLS = {
    "decode": Cell(
        NARROW,
        {
            LayerKind(heads(64), MIXTURE): 6,
            LayerKind(heads(128), DENSE): 3,
            LayerKind(heads(256), DENSE): 3,
            LayerKind(LATENT, DENSE): 2,
            LayerKind(DELTA, DENSE): 1,
        },
        draws=True,
    ),
    "decode in 8 bits": Cell(
        WIDE,
        {LayerKind(heads(128), DENSE): 2, LayerKind(heads(64), MIXTURE): 5, LayerKind(LATENT, DENSE): 2},
        kv_cache_dtype="int8",
        quantization="int8",
    ),
    "decode in 4 bits": Cell(WIDE, {LayerKind(heads(64), MIXTURE): 10}, quantization="int4"),
    "prefill": Cell(
        PREFILL,
        {LayerKind(heads(96), DENSE): 2, LayerKind(heads(256), DENSE): 2, LayerKind(LATENT, DENSE): 1},
    ),
    "prefill in float16": Cell(
        PREFILL, {LayerKind(heads(128), DENSE): 2, LayerKind(heads(192), DENSE): 2}, "float16"
    ),
}


def layers(*kinds: LayerKind, kernels: int = 0) -> dict[LayerKind, int]:
    """Layers of these kinds, and how many kernels each has."""
    return dict.fromkeys(kinds, kernels)


# Eight heads of 80 numbers fill whole lanes together, two of 96 only with zeros. A latent of 128 heads takes
# a TPU's compiler minutes.
SMALL = LayerKind(GroupedQuery(8, 4, 64), MIXTURE)
EIGHT, TWO = (LayerKind(GroupedQuery(8, n, size), DENSE) for n, size in ((8, 80), (2, 96)))
ROWS = LayerKind(replace(LATENT, num_heads=16), DENSE)
TPU_CELLS = {
    "decode": Cell(
        NARROW,
        layers(SMALL, EIGHT, TWO, LayerKind(heads(256), DENSE), ROWS, kernels=1)
        | layers(LayerKind(DELTA, DENSE)),
    ),
    "decode at 32k": Cell(
        WIDE, layers(SMALL, LayerKind(heads(128), DENSE), ROWS, kernels=1), longest=32_768, draws=True
    ),
    "decode in 8 bits": Cell(
        WIDE, layers(SMALL, EIGHT, LayerKind(heads(128), DENSE)), kv_cache_dtype="int8", quantization="int8"
    ),
    "decode in 4 bits": Cell(NARROW, layers(SMALL, kernels=1), quantization="int4"),
    "prefill": Cell(PREFILL, layers(SMALL, EIGHT, TWO, kernels=1) | layers(ROWS)),
}


DRAWING = {chip.gpu.capability: name for name, chip in CHIPS.items()}.values()


def plan_of(name: str, cell: Cell) -> EnginePlan:
    config = ModelConfig(WORDS, 512, tuple(cell.layers), cell.longest)
    pages, kept = (513,) * len(config.windows), cell.kv_cache_dtype
    sizes = replace(SIZES, max_model_len=cell.longest, max_num_seqs=64, pages=pages, kv_cache_dtype=kept)
    tensor = SLICES.get(name, 1)
    options = EngineOptions(quantization=cell.quantization, tensor_parallel_size=tensor)
    return EnginePlan("test", config, cell.dtype, options, found_target(name), sizes, 512)


def compiled(plan: EnginePlan, cell: Cell) -> jax.stages.Compiled:
    with nullcontext() if cell.draws else greedy_programs():
        return compile_stages(plan, cell.shape, abstract_arguments(plan))[0][0][0]


def compiled_text(plan: EnginePlan, cell: Cell) -> str:
    return compiled(plan, cell).as_text() or ""


@pytest.mark.extras
@pytest.mark.as_served
@pytest.mark.parametrize("cell", CELLS.values(), ids=CELLS)
@pytest.mark.parametrize("name", CHIPS)
def test_every_gpu_compiles_every_kind_of_layer(name: str, cell: Cell):
    text = compiled_text(plan_of(name, cell), cell._replace(draws=cell.draws and name in DRAWING))
    kernels = text.count(TRITON) + text.count(MOSAIC)
    assert kernels == (0 if name == "t4" else sum(cell.layers.values()))
    assert (MOSAIC in text) == (name in ("h100", "h200") and cell.shape.phase == "prefill")


@pytest.mark.extras
@pytest.mark.as_served
@pytest.mark.parametrize("cell", TPU_CELLS.values(), ids=TPU_CELLS)
@pytest.mark.parametrize("name", SLICES)
def test_a_tpu_copies_no_pool(name: str, cell: Cell):
    """The whole cache is updated in place, though its pages would fill lanes better than its rows do; nothing
    is done row by row."""
    plan = plan_of(name, cell)
    plan = replace(plan, sizes=replace(plan.sizes, pages=(8192,) * len(plan.sizes.pages)))
    cache, program = abstract_arguments(plan).cache, compiled(plan, cell)
    found, text = read_program_facts(program), program.as_text() or ""
    assert len(re.findall(r'"tpu_custom_call".*/attend_chunk/', text)) == sum(cell.layers.values())
    least = min(device_bytes(pool) for pool in jax.tree.leaves((cache.k, cache.v)) if pool.ndim == 4)
    assert found.aliased >= device_bytes(cache)
    has_loops = cell.shape.phase == "prefill" or cell.draws or cell.kv_cache_dtype != "auto"
    assert has_loops or " while(" not in text
    assert not [moved for moved in found.moved if moved.bytes >= least / 4]


@pytest.mark.extras
@pytest.mark.as_served
@pytest.mark.parametrize("name, kernels", [("h200", 2), ("l4", 0)])
def test_latent_layers_in_float32_have_kernels_where_memory_is(name: str, kernels: int):
    cell = Cell(NARROW, {LayerKind(LATENT, DENSE): kernels}, "float32")
    assert compiled_text(plan_of(name, cell), cell).count(TRITON) == kernels


@pytest.mark.extras
@pytest.mark.as_served
@pytest.mark.parametrize("name", ["2xa100", "2xh200"])
def test_devices_of_a_mesh_are_the_gpu_that_is_described(name: str):
    """Each has the kernels of its own GPU."""
    cell = Cell(NARROW, {LayerKind(heads(64), MIXTURE): 5})
    plan = plan_of(name, cell)
    assert {gpu_from_device(device) for device in plan.target.devices} == {CHIPS[name[2:]].gpu}
    text = compiled_text(plan, cell)
    assert text.count(TRITON) == 5 and MOSAIC not in text


@pytest.mark.extras
@pytest.mark.parametrize("name", CHIPS)
def test_a_plan_computes_in_what_the_gpu_multiplies(name: str):
    found_target(name)
    plan = plan_engine(None, "135m", "auto", EngineOptions(max_num_seqs=8), find_target(name), None)
    assert plan.dtype == ("float16" if name == "t4" else "bfloat16")


@pytest.mark.extras
@pytest.mark.parametrize("name", ["t4", "a100"])
def test_fp8_caches_are_refused_before_compiling_where_unsupported(name: str):
    target = found_target(name)
    with pytest.raises(ValueError, match='"fp8" is not allowed: .* use "int8"'):
        plan_engine(None, "135m", "auto", EngineOptions(kv_cache_dtype="fp8"), target, None)


def test_every_gpu_of_the_table_is_known_by_name():
    assert set(CHIPS) == set(GPUS) and set(GPUS) < set(TARGET_KINDS.values())
    for name, chip in CHIPS.items():
        assert target_facts(name).peaks == GPUS[name] == target_facts(f"8x{name}").peaks
        assert chip.gpu.shared_memory <= 232_448
