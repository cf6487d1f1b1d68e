"""What XLA makes of the stages of a pipeline for accelerators that need not be here."""

import json
from dataclasses import replace

import jax.numpy as jnp
import pytest
from cases.targets import SIZES, WORDS, found_target

from duetto.kvcache.stages import pipeline_stages
from duetto.model.draft_pair import PairConfig
from duetto.model.sharding import Layout
from duetto.model.transformer import decoder_spec
from duetto.model.tree import shapes_from_specs, tree_bytes
from duetto.serve.cli.main import main
from duetto.serve.engine.startup.mesh import param_shardings, place_params
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.program_facts import read_program_facts
from duetto.serve.planner.roofline.targets import target_lowering
from duetto.serve.runtime.compiled.lowering import make_abstract_arguments
from duetto.serve.runtime.compiled.shapes import Shape
from duetto.serve.runtime.pipeline.route import make_route
from duetto.serve.runtime.pipeline.stage_lowering import StageLowering
from duetto.serve.runtime.steps.phases import TargetOnly

STAGES = 3  # the first, one between, and the last


@pytest.mark.extras
@pytest.mark.usefixtures("greedy_only")
@pytest.mark.parametrize("target, each", [("8xh200", 1), ("8xh200", 2), ("v6e:2x4", 1), ("v6e:2x4", 2)])
def test_stages_move_no_weights_and_reduce_twice_per_layer(target, each):
    """Of three stages of two layers, on one device each or split over two."""
    found = found_target(target)
    config = replace(PRESETS["8b"], layers=PRESETS["8b"].layers[: 2 * STAGES], vocab_size=WORDS)
    layout = Layout(each, stages=STAGES)
    where = param_shardings(config, layout, devices=found.devices)
    params = place_params(where, shapes_from_specs(decoder_spec(config), jnp.dtype("bfloat16")))
    like = make_abstract_arguments(PairConfig(config), params, SIZES)
    shape, spans = Shape("decode", 64, 1), pipeline_stages(params)
    with target_lowering(found):
        lowered = StageLowering(TargetOnly(config), like, SIZES, make_route(params)).lower(shape)
        compiled = [read_program_facts(program.compile()) for program in lowered]
    hidden = shape.rows * config.hidden_size * 2
    logits = {f"f32[{n},{m}]" for v in (WORDS, WORDS // each) for n, m in ((shape.rows, v), (v, shape.rows))}
    for stage, (span, made) in enumerate(zip(spans, compiled, strict=True)):
        reduced = made.collectives.get("all-reduce")
        embedded = stage == 0
        if each == 1:
            assert made.collectives == {}
        elif stage < STAGES - 1:  # the last one has the head as well
            assert set(made.collectives) == {"all-reduce"}
            assert (reduced.calls, reduced.bytes) == (
                2 * len(span) + embedded,
                (2 * len(span) + embedded) * hidden,
            )
        assert {m.buffer for m in made.moved} <= logits  # no weight and no key


@pytest.mark.extras
def test_a_plan_shows_stages_and_micro_batches(capsys):
    found_target("8xh200")
    asked = ["plan", "--shape", "8b", "--target", "8xh200", "--compile", "none", "--json"]
    assert main([*asked, "--pipeline-parallel-size", "4", "--tensor-parallel-size", "2"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["devices"] == 8 and [stage["devices"] for stage in plan["stages"]] == [2] * 4
    spans = [tuple(stage["layers"]) for stage in plan["stages"]]
    assert [layer for first, last in spans for layer in range(first, last + 1)] == list(range(32))
    assert spans[-1][1] - spans[-1][0] < spans[1][1] - spans[1][0]  # it has the head
    weights = sum(2 * stage["memory"]["weights"] for stage in plan["stages"])
    assert weights == pytest.approx(
        tree_bytes(shapes_from_specs(decoder_spec(PRESETS["8b"]), jnp.dtype("bfloat16"))), rel=1e-3
    )
    micro = {m["micro_batches"]: m for m in plan["micro_batches"]}
    assert sorted(micro) == [1, 2, 4, 8]
    assert [round(micro[m]["drained"], 3) for m in (1, 2, 4, 8)] == [0.75, 0.6, 0.429, 0.273]
    assert micro[1]["bubbles"] == pytest.approx(0.75) and micro[4]["bubbles"] < 0.15
    assert micro[4]["rate"] > 1.5 * micro[1]["rate"] and micro[4]["seconds"] < micro[1]["seconds"]
