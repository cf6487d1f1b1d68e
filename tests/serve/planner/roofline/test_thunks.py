"""No step of a GPU waits for its host: compiled for one that is absent, each is one command buffer."""

import json
import os
import subprocess
import sys

import pytest

from duetto.serve.planner.roofline.targets import MissingCompiler, find_target
from duetto.serve.planner.roofline.thunks import ThunkCounts, count_thunks

# A process of its own, without the settings of tests.
PROGRAMS = """
import json
import warnings
from contextlib import nullcontext
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
from fakes.greedy import greedy_programs

from duetto.model.config import Dense, Experts, Latent, LayerKind
from duetto.model.draft_head import draft_head_spec
from duetto.model.draft_pair import Pair, PairConfig
from duetto.model.transformer import decoder_spec
from duetto.model.tree import shapes_from_specs
from duetto.serve.cli.main import main
from duetto.serve.planner.engine_plan import abstract_params
from duetto.serve.runtime.compiled.lowering import LocalLowering
from duetto.serve.runtime.steps.phases import TargetOnly
from duetto.serve.runtime.compiled.shapes import Shape, Sizes
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.targets import target_lowering, find_target, compiler_options
from duetto.serve.planner.roofline.thunks import compile_with_thunks
from duetto.serve.engine.speculation.draft_steps import DraftSpeculation
from duetto.serve.engine.speculation.draft_proposers import DraftModelProposer, HeadProposer

main(["plan", "--shape", "135m", "--target", "h200", "--compile", "none", "--json"])
warnings.simplefilter("ignore")  # jax cannot read back what it compiled for an absent device
target = find_target("h200")
whole = replace(PRESETS["0.6b"], vocab_size=2048)
latent, experts = Latent(8, 512, 128, 64, 128), Experts(16, 4, 256, shared=256, scoring="sigmoid")
layers = {
    "dense": whole.layers[:2],
    "windows": (LayerKind(replace(whole.layers[0].mixer, window=128), Dense(512)), whole.layers[0]),
    "latent": (LayerKind(latent, Dense(512)), LayerKind(latent, experts)),
    "experts": (LayerKind(whole.layers[0].mixer, experts),) * 2,
}


def thunks(kind, phase, rows, tokens):
    config = replace(whole, layers=layers[kind.split()[0]])
    pair, params, hidden = PairConfig(config), abstract_params(config, "bfloat16", target), 0
    phases = TargetOnly(config)
    if "head" in kind:
        one, specs = params.embed.sharding, draft_head_spec(config.hidden_size, 256)
        head = shapes_from_specs(specs, jnp.dtype("bfloat16"))
        head = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), head)
        params, hidden = Pair(params, head), config.hidden_size
        phases = DraftSpeculation(pair, HeadProposer(config), "coupled")
    if "draft" in kind:
        pair, params = PairConfig(config, config), Pair(params, params)
        phases = DraftSpeculation(pair, DraftModelProposer(config, "rejection"), "rejection")
    sizes = Sizes(4096, 64, (1024,) * len(pair.windows), 64, hidden=hidden)
    with target_lowering(target), greedy_programs() if kind in ("latent", "experts") else nullcontext():
        lowered = LocalLowering.from_params(phases, params, sizes).lower_all(Shape(phase, rows, tokens))
    return [asdict(compile_with_thunks(program, compiler_options(target))[1]) for program in lowered]


for program in PROGRAMS:
    print(json.dumps(thunks(*program)))
"""
STEPS = (
    ("dense", "decode", 64, 1),
    ("dense", "prefill", 1, 128),
    ("dense", "verify", 8, 4),
    ("dense head", "verify", 8, 4),
    ("dense draft rejection", "verify", 8, 4),
    ("windows", "decode", 8, 4),
    ("latent", "decode", 8, 1),
    ("experts", "decode", 64, 1),
)
SEQUENCE = """000: kCommandBuffer [source       | next=005 (1)]
    001: kCustomKernel [source       | next=002 (1)] gemm_fusion_dot grid: [64, 1, 1] threads: [64, 1, 1]
    002: kConditional  [prev=001 (1) | sink        ]
      false_branch:
        003: kCustomKernel [source | sink] loop_select_fusion grid: [4, 1, 1] threads: [128, 1, 1]
      true_branch:
        004: kCopy [source | sink] kCopy
005: kConditional   [prev=000 (1) | next=009 (1)]
  false_branch:
    000: kCommandBuffer [source | sink]
        006: kCustomKernel [source | sink] loop_add_fusion grid: [4, 1, 1] threads: [128, 1, 1]
  true_branch:
    007: kWhile         [source | sink]
condition:
        008: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
      body:
        010: kCustomKernel [source | sink] loop_add_fusion_1 grid: [1, 1, 1] threads: [1, 1, 1]
009: kWhile         [prev=005 (1) | sink]
condition:
    011: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]
  body:
    000: kCommandBuffer [source | sink]
        012: kCustomKernel [source | sink] loop_add_fusion_2 grid: [1, 1, 1] threads: [1, 1, 1]
"""


def test_a_sequence_is_read_by_its_indentation():
    assert count_thunks(SEQUENCE) == ThunkCounts(buffers=3, read_backs=3, kernels=3)
    assert count_thunks(SEQUENCE, counted_numbers=[9]) == ThunkCounts(buffers=3, read_backs=2, kernels=3)
    assert count_thunks("") == ThunkCounts(0, 0, 0)


@pytest.fixture(scope="module")
def compiled() -> tuple[dict[str, str], dict[tuple[str, str, int, int], list[ThunkCounts]]]:
    """XLA's options as a plan prints them, and the thunks of every step's programs."""
    try:
        find_target("h200")
    except MissingCompiler as error:
        pytest.skip(str(error))
    command = [sys.executable, "-c", f"PROGRAMS = {STEPS}\n{PROGRAMS}"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # the fakes
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    plan, *found = map(json.loads, ran.stdout.splitlines())
    return plan["xla_options"], {
        step: [ThunkCounts(**x) for x in programs] for step, programs in zip(STEPS, found, strict=True)
    }


@pytest.mark.extras
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_each_program_is_one_command_buffer(compiled, step: tuple[str, str, int, int]):
    """Of a step, or of its forward pass and its sampler."""
    found = compiled[1][step]
    assert {(x.buffers, x.read_backs) for x in found} == {(1, 0)}
    assert found[0].kernels > 20 and len(found) == (2 if step[3] == 1 or step[1] == "prefill" else 1)


@pytest.mark.extras
def test_a_plan_prints_the_options_of_xla(compiled):
    assert "WHILE" in compiled[0]["xla_gpu_enable_command_buffer"].split(",")
