"""Plans: work counted from sizes, memory that is what an engine holds, and the command that shows both."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import pytest
from cases.targets import SMALL, small_job
from fakes.greedy import greedy_programs
from fakes.processes import Forked, script

from duetto.model.draft_pair import Pair, PairConfig
from duetto.model.sharding import device_bytes
from duetto.model.transformer import decoder_spec
from duetto.model.tree import shapes_from_specs, tree_bytes
from duetto.sampling.params import SamplingParams
from duetto.serve.cli.main import main
from duetto.serve.host.devices import memory_limit
from duetto.serve.llm.llm import LLM
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.engine_plan import (
    abstract_arguments,
    abstract_params,
    plan_engine,
)
from duetto.serve.planner.roofline.floor import Demand, draft_pair_demand, program_demand
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.program_times import STATUS_FILE
from duetto.serve.planner.roofline.report import render_engine_report
from duetto.serve.planner.roofline.targets import local_target
from duetto.serve.planner.stage_plans import plan_stages
from duetto.serve.runtime.compiled.shapes import Shape, Sizes
from duetto.serve.runtime.compiled.sizing import choose_sizes

DRAFT = str(Path(__file__).resolve().parents[3] / "checkpoints" / "demo-draft")  # the smallest there is


def test_work_grows_as_it_should():
    def decode(rows: int, steps: int, context: int) -> Demand:
        return program_demand(Shape("decode", rows, steps), SMALL, "float32", context)

    assert decode(8, 4, 100).flops == 4 * decode(8, 1, 100).flops
    assert decode(16, 1, 100).flops == 2 * decode(8, 1, 100).flops
    keys = 2 * SMALL.num_layers * 4 * 32 * 4
    assert decode(8, 1, 200).bytes - decode(8, 1, 100).bytes == 8 * 100 * keys
    coded = [
        program_demand(Shape("decode", 8, 1), SMALL, "float32", n, None, "int8").bytes for n in (100, 200)
    ]
    assert coded[1] - coded[0] == 8 * 100 * 2 * SMALL.num_layers * 4 * (32 + 2)
    verify, prefill = (
        program_demand(Shape(phase, 1, 8), SMALL, "float32", 0) for phase in ("verify", "prefill")
    )
    assert verify.flops - prefill.flops == 7 * 2 * SMALL.vocab_size * SMALL.hidden_size


def test_pipeline_stages_add_up_to_the_models_work():
    shape, layers = Shape("decode", 8, 1), SMALL.layers
    whole = shapes_from_specs(decoder_spec(SMALL), jnp.dtype("float32"))
    parts = [
        program_demand(
            shape,
            dataclasses.replace(SMALL, layers=layers[i : i + 1]),
            "float32",
            100,
            dataclasses.replace(whole, layers=whole.layers[i : i + 1]),
            samples=i == 1,
        )
        for i in range(2)
    ]
    whole_flops = program_demand(shape, SMALL, "float32", 100).flops
    assert sum(part.flops for part in parts) == pytest.approx(whole_flops, rel=1e-3)  # but for a norm
    assert parts[1].bytes - parts[0].bytes >= tree_bytes(whole.embed)


@pytest.mark.parametrize("phase, steps", [("prefill", 0), ("decode", 0), ("verify", 1)])
def test_a_draft_model_counts_at_its_own_width(phase: str, steps: int):
    """It writes its keys in each phase, and reads its head only where it guesses: once for each token."""
    narrow = dataclasses.replace(SMALL, hidden_size=32)
    params = Pair(
        *(shapes_from_specs(decoder_spec(config), jnp.dtype("float32")) for config in (SMALL, narrow))
    )
    shape = Shape(phase, 2, 8)
    whole, own = (program_demand(shape, config, "float32", 16) for config in (SMALL, narrow))
    added = draft_pair_demand(shape, PairConfig(SMALL, narrow), "float32", 16, params).flops - whole.flops
    head = 2 * narrow.vocab_size * narrow.hidden_size
    sampled = {"prefill": 1, "decode": shape.area, "verify": shape.area}[phase]
    assert added == pytest.approx(own.flops - head * sampled * (1 - steps), rel=0.02)
    assert added < whole.flops / 2


def test_a_floor_is_the_slower_of_two():
    assert Demand(10, 2).floor_seconds(5, 4) == 2.0 and Demand(10, 2).bottleneck(5, 4) == "compute"
    assert Demand(10, 20).floor_seconds(5, 4) == 5.0 and Demand(10, 20).bottleneck(5, 4) == "memory"


def test_memory_is_what_the_arrays_take():
    job = small_job(64)
    arguments, shape = abstract_arguments(job), Shape("decode", 8, 1)
    job = dataclasses.replace(job, options=EngineOptions(max_num_seqs=8))
    (stage,) = plan_stages(job, arguments, [shape])
    memory = stage.memory
    assert memory.weights == tree_bytes(shapes_from_specs(decoder_spec(SMALL), jnp.dtype("float32")))
    assert memory.cache == 2 * SMALL.num_layers * 32 * 64 * 4 * 32 * 4
    assert memory.slots == device_bytes(arguments.slots)
    compiled = [row.facts for row in stage.rows if row.facts]
    assert [memory.temporaries] == [f.temporaries for f in compiled]


def test_a_plan_chooses_what_a_start_would():
    options = EngineOptions(max_num_seqs=4, max_model_len=512, page_size=32)
    job = plan_engine(None, "135m", "auto", options, local_target(), None)
    assert job.sizes == Sizes(512, 4, (4 * 512 // 32,), 32)
    assert (job.dtype, job.context, memory_limit(local_target().devices[0])) == ("float32", 512, None)


@pytest.mark.parametrize(
    "options, memory, message",
    [
        ({"max_num_seqs": 10**9}, None, "max_num_seqs 1000000000 needs .* GiB .* lower it"),
        ({"max_num_seqs": 10**6}, 1 << 30, "max_num_seqs 1000000 needs .* at most 1.0 GiB"),
        ({"max_num_seqs": 1}, 1 << 20, "weights do not fit: .* 0.0 GiB more than gpu_memory_utilization 0.9"),
        ({"max_model_len": 1}, None, "max_model_len 1 is not allowed: 2 or more"),
        ({"max_model_len": 257}, None, "beyond the model's 256 positions"),
        ({"max_batched_token_mem": 64}, None, "max_model_len 256 does not fit a cache of 64 tokens"),
    ],
)
def test_invalid_sizes_are_refused_before_memory_is_allocated(options, memory, message):
    config = dataclasses.replace(SMALL, max_position=256)
    with pytest.raises(ValueError, match=message):
        params = abstract_params(config, "float32", local_target())
        choose_sizes(PairConfig(config), EngineOptions(**options), params, memory)


def test_steps_of_a_dispatch_are_bounded():
    with pytest.raises(ValueError, match="decode_steps 1025 is not allowed: 1 to 1024"):
        EngineOptions(decode_steps=1025)


@pytest.mark.parametrize("context", [0, 513])
def test_a_context_that_does_not_fit_is_refused(context: int):
    with pytest.raises(ValueError, match=f"context {context} is not allowed: 1 to max_model_len 512"):
        plan_engine(None, "135m", "auto", EngineOptions(max_model_len=512), local_target(), context)


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--shape", "0.6b", "--compile", "none", "--max-num-seqs", "8"]) == 0
    shown = capsys.readouterr().out
    assert "0.6b in float32 on cpu" in shown and "prefill[1,512]" in shown and "decode[8,1]" in shown
    params = tree_bytes(shapes_from_specs(decoder_spec(PRESETS["0.6b"]), jnp.dtype("float32")))
    assert f"{params / 2**20:.1f} MiB" in shown


@greedy_programs()
def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]):
    flags = [
        "--max-num-seqs",
        "8",
        "--max-prefill-tokens",
        "64",
        "--max-model-len",
        "128",
        "--decode-steps",
        "1",
    ]
    assert main(["plan", "--json", "--model", DRAFT, *flags]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [p["shape"] for p in plan["programs"]] == ["prefill[1,64]", "prefill[2,32]", "decode[8,1]"]
    facts = [p["facts"] for p in plan["programs"] if p["facts"]]  # of one prefill, and of decode
    assert len(facts) == 2 and all(0 < f["temporaries"] < 64 << 20 for f in facts)
    assert plan["sizes"]["max_model_len"] == 128


# A process of its own: what it freed before would hide what it takes.
PEAK = """
from duetto.model.config import ModelConfig
from duetto.serve.planner.engine_plan import *
from duetto.serve.planner.stage_plans import *
from duetto.serve.planner.roofline.targets import local_target
config = ModelConfig.uniform(16384, 512, 1536, 2, 8, 4, 64, tied_embeddings=True)
options = EngineOptions(max_num_seqs=8)
job = EnginePlan("small", config, "float32", options, local_target(), Sizes(2048, 16, (2048,), 64), 256)
arguments, shape = abstract_arguments(job), Shape("decode", 8, 1)
(stage,) = plan_stages(job, arguments, [shape])
stage = measure_stage_programs(job, arguments, stage)
seconds = {row.shape: row.seconds for row in stage.rows}
print(stage.memory.total, stage.memory.peak, seconds[shape])
"""


@pytest.mark.skipif(not STATUS_FILE.exists(), reason="the system does not tell a process's memory")
def test_the_memory_plan_is_what_a_run_takes(tmp_path: Path):
    (program := tmp_path / "peak.py").write_text(PEAK)
    process = Forked(script, str(program))
    told, errors = process.communicate(600)
    assert process.wait() == 0, errors
    planned, peak, seconds = map(float, told.split())
    assert planned > 500 << 20
    assert peak == pytest.approx(planned, rel=0.05)
    assert seconds > 0


@greedy_programs()
def test_a_run_explains_its_programs(few_shapes: None):
    with LLM(DRAFT, max_num_seqs=8, max_model_len=128, max_prefill_tokens=64, compilation_cache=None) as llm:
        llm.generate([[1, 2, 3]] * 2, SamplingParams(temperature=0.0, max_tokens=4), use_tqdm=False)
        report = llm.report(explained=True)
        table = report["explained"].splitlines()
    assert list(report["step_seconds"]) == ["decode[8,1]", "prefill[1,64]"]
    assert all(seconds > 0 for seconds in report["step_seconds"].values())
    assert "decode[8,1] " in render_engine_report(report)
    for line, shape in zip(table[1:], ("decode[8,1]", "prefill[1,64]"), strict=True):
        name, *numbers = line.split()
        assert name == shape and "-" not in numbers
        least, touched = float(numbers[1]), float(numbers[2])
        assert 0 < least < touched


def test_tiers_are_planned_in_tokens(capsys):
    flags = ["--shape", "0.6b", "--compile", "none", "--max-num-seqs", "8", "--dtype", "bfloat16"]
    assert main(["plan", *flags, "--swap-space", "2", "--kv-disk-space", "0.5", "--json"]) == 0
    host, disk = json.loads(capsys.readouterr().out)["tiers"]
    page = 2 * 28 * 8 * 128 * 64 * 2  # keys and values of 28 layers with 8 heads of 128, 64 tokens
    assert host["page_bytes"] == disk["page_bytes"] == page
    assert host["tokens"] == (2 << 30) // page * 64 and disk["tokens"] == (1 << 29) // page * 64
    assert main(["plan", *flags, "--swap-space", "2"]) == 0
    assert f"host memory holds {host['tokens']} tokens; a page of 64 tokens" in capsys.readouterr().out
    assert main(["plan", *flags, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tiers"] == []


def test_an_impossible_plan_is_one_sentence(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--target", "h300"]) == 1
    assert main(["plan", "--target", "h200", "--measure"]) == 1
    assert main(["plan", "--model", "/nowhere"]) == 1
    assert main(["plan", "--shape", "8b", "--quantization", "awq"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.startswith("duetto: ") for line in lines] == [True] * 4
