"""A model in two stages gives the tokens of one device."""

import threading
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.adapters import merged, read, write
from cases.invariance import PARAMS, bits, prompts
from fakes.greedy import greedy_programs
from jax.sharding import Mesh
from suite.fixtures import ROOT, with_few_shapes
from suite.marks import full

from duetto import LLM, SamplingParams
from duetto.checkpoints.huggingface import load_hf
from duetto.kvcache.stages import pipeline_stages, tree_devices
from duetto.lora.request import LoRARequest
from duetto.model.draft_pair import PairConfig
from duetto.model.sharding import Layout, device_bytes
from duetto.model.weights.lora import lora_stacks
from duetto.serve.engine.startup.mesh import param_shardings, place_params, shard_params
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.engine_plan import abstract_arguments, main_shapes, plan_engine
from duetto.serve.planner.render import render_plan
from duetto.serve.planner.roofline.targets import GPUS, local_target
from duetto.serve.planner.stage_plans import StagePlan, plan_stages
from duetto.serve.runtime.compiled import local_executor
from duetto.serve.runtime.compiled.sizing import stage_budgets
from duetto.serve.runtime.pipeline.pipelined_step import PipelinedStep
from duetto.serve.runtime.pipeline.split import split_layers

OPTIONS = {"max_num_seqs": 8, "max_prefill_tokens": 64, "max_model_len": 256, "page_size": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [[(k * i * i + i) % 300 for i in range(n)] for k, n in enumerate((62, 60, 110, 3))]


def staged(model) -> Any:
    """A model's parameters on two devices."""
    assert jax.device_count() == 2
    return shard_params(model.config, model.params, Layout(stages=2))


def cut(params: Any, layers: int) -> Any:
    """The same with so many layers in the first stage."""
    first, last = jax.devices()
    places = [first] * layers + [last] * (len(params.layers) - layers)
    return replace(params, layers=tuple(map(jax.device_put, params.layers, places)))


def serve(model, params: Any = None, **options: Any) -> LLM:
    params = staged(model) if params is None else params
    kept = {"kv_cache_dtype": model.kv_cache_dtype}
    return LLM.from_params(model.config, params, **OPTIONS | kept | options)


def generated(llm: LLM, texts=PROMPTS, params: Any = GREEDY) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(texts, params, use_tqdm=False)]


@pytest.mark.parametrize(
    "model",
    [full("parallel"), full("latent"), full("recurrent"), full("longrope"), full("windows, int8 cache")],
    indirect=True,
)
def test_tokens_are_those_of_the_oracle(model, oracle):
    plain, texts = oracle(model), prompts(model.config.vocab_size)
    expected = [plain(text, params) for text, params in zip(texts, PARAMS, strict=True)]
    with serve(model) as llm:
        assert len(pipeline_stages(llm.params)) == 2
        assert generated(llm, texts, PARAMS) == expected
        report = llm.report()
        assert report["compilations"] == 0
        assert all(seconds > 0 for seconds in report["stages"]["busy_seconds"])


def test_bits_depend_on_the_request_alone(tiny):
    texts = prompts(tiny.config.vocab_size)
    with serve(tiny) as llm:
        alone = []
        for text, params in zip(texts, PARAMS, strict=True):
            llm.engine.tables.reset_prefix_cache()
            alone += [bits(out) for out in llm.generate(text, params, use_tqdm=False)]
        llm.engine.tables.reset_prefix_cache()
        for cached in (False, True):
            outputs = llm.generate(texts, PARAMS, use_tqdm=False)
            assert [bits(out) for out in outputs] == alone
            assert any(out.num_cached_tokens for out in outputs) == cached


@pytest.mark.full
def test_adapters_are_on_the_devices_of_their_layers(tiny, oracle, tmp_path):
    """More adapters than places come and go while steps are in flight: rows have the tokens of merged weights
    on one device, and those without an adapter the model's. Guesses of the host change none."""
    folders = {name: write(tmp_path / name, tiny.config, 2 + i, i) for i, name in enumerate("abc")}
    models: dict[str | None, Any] = {
        name: replace(tiny, params=merged(tiny.params, read(folder, tiny.config)))
        for name, folder in folders.items()
    } | {None: tiny}
    asked = {name: LoRARequest(name, i, str(folder)) for i, (name, folder) in enumerate(folders.items(), 1)}
    whose = ["a", None, "b", "c"]
    expected = [oracle(models[name])(prompt, GREEDY) for name, prompt in zip(whose, PROMPTS, strict=True)]
    guesses = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "adaptive": False}}
    for options in ({}, guesses):
        with with_few_shapes(verifications=1), nullcontext() if options else greedy_programs():
            llm = serve(tiny, enable_lora=True, max_loras=2, **options)
        with llm:
            for _ in range(2):
                wanted = [asked.get(name) for name in whose]
                outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=wanted)
                assert [list(out.outputs[0].token_ids) for out in outputs] == expected
            assert llm.report()["compilations"] == 0 and llm.engine.scheduler.lora_slots.loads > 2
            params: Any = llm.engine._arguments.params
            for path, stack in lora_stacks(params).items():
                layer = params.layers[int(path.split(".")[1])]
                assert tree_devices(stack) == tree_devices(layer.any_mixer_leaf)


@pytest.mark.full
def test_any_split_into_stages_gives_the_same_tokens(tiny, oracle):
    expected = [oracle(tiny)(prompt, GREEDY) for prompt in PROMPTS]
    for layers in range(1, tiny.config.num_layers):
        for micro_batches in (1, 3):
            with serve(tiny, cut(staged(tiny), layers), micro_batches=micro_batches) as llm:
                assert generated(llm) == expected


@pytest.mark.usefixtures("few_shapes", "greedy_only")
def test_preempted_requests_are_resumed(tiny, oracle):
    small = {"max_model_len": 160, "max_batched_token_mem": 160, "max_num_seqs": 4}
    expected = [oracle(tiny)(prompt, GREEDY) for prompt in PROMPTS]
    with serve(tiny, **small) as llm:
        assert generated(llm) == expected
        assert llm.report()["preemptions"] > 0


def test_stages_compute_for_different_requests_at_the_same_time(tiny, oracle):
    """From where all requests decode, every step of the last stage waits until the first has begun the next
    one: stages that take turns would wait for ever. That is half of the time of stages in turn."""
    long = replace(GREEDY, max_tokens=60)
    with serve(tiny, micro_batches=2) as llm:
        programs, meet = llm.engine.programs.steps, threading.Barrier(2, timeout=600)
        calls, meetings = [0, 0], range(0)

        def meeting(stage: int, program: Any) -> Any:
            def called(*given: Any) -> Any:
                calls[stage] += 1
                if calls[stage] - (stage == 0) in meetings:
                    meet.wait()
                return program(*given)

            return called

        for shape in [shape for shape in programs if shape.phase == "decode"]:
            both = tuple(meeting(i, program) for i, program in enumerate(programs[shape].programs))
            programs[shape] = replace(programs[shape], programs=both)
        for prompt in PROMPTS:
            llm.add_request({"prompt_token_ids": prompt}, long)
        running = llm.engine.scheduler.running
        while len(running) < len(PROMPTS) or any(x.tokens == x.prompt for x in running.values()):
            llm.step()
        meetings = range(calls[0] + 2, calls[0] + 22)
        found = [list(out.outputs[0].token_ids) for out in llm.wait_for_completion(use_tqdm=False)]
        assert found == [oracle(tiny)(prompt, long) for prompt in PROMPTS]
        assert calls[1] > meetings.stop


@pytest.mark.full
@pytest.mark.usefixtures("steady_steps")
def test_draft_tokens_change_no_token(tiny, oracle):
    again = [prompt[:20] * 3 for prompt in PROMPTS]
    expected = [oracle(tiny)(prompt, GREEDY) for prompt in again]
    with serve(tiny, speculative_config={"method": "ngram", "num_speculative_tokens": 3}) as llm:
        assert generated(llm, again) == expected
        assert any(name.startswith("verify") for name in llm.report()["steps"])


def test_prompts_are_scored_as_on_one_device(tiny):
    scored = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2)

    def scores(llm: LLM) -> list[list[float]]:
        outputs = llm.generate(PROMPTS, scored, use_tqdm=False)
        return [[x.logprob for at in out.prompt_logprobs[1:] for x in at.values()] for out in outputs]

    with with_few_shapes():
        alone = serve(tiny, tiny.params)
    with serve(tiny) as llm, alone as one:
        for found, expected in zip(scores(llm), scores(one), strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.full
def test_aborted_requests_leave_others_alone(tiny, oracle):
    expected = [oracle(tiny)(prompt, GREEDY) for prompt in PROMPTS]
    with serve(tiny) as llm:
        for i, prompt in enumerate(PROMPTS * 2):
            llm.add_request({"prompt_token_ids": prompt}, GREEDY, str(i))
        found = {}
        for step in range(1000):
            found |= {out.request_id: list(out.outputs[0].token_ids) for out in llm.step()}
            if step < 4:
                llm.abort(str(2 * step))
            if not llm.has_unfinished_requests():
                break
        assert {name: found[name] for name in "1357"} == {str(i): expected[i % 4] for i in (1, 3, 5, 7)}


def breaks(llm: LLM, step: int) -> None:
    """Let a decode fail in the last stage, or on the one device."""
    programs = llm.engine.programs.steps
    shape = max(s for s in programs if s.phase == "decode")
    own, calls = programs[shape], iter(range(1000))

    def fails(*given: Any) -> Any:
        if next(calls) == step:
            raise jax.errors.JaxRuntimeError("INTERNAL: a device is lost")
        return last(*given)

    if isinstance(own, PipelinedStep):
        last, programs[shape] = own.programs[-1], replace(own, programs=(*own.programs[:-1], fails))
    else:
        last, programs[shape] = own, fails


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("stages", [1, 2])
def test_a_failed_steps_cache_is_freed_before_the_next(tiny, oracle, stages, monkeypatch):
    """Two may not fit."""
    with serve(tiny, tiny.params if stages == 1 else None) as llm:
        shapes = {x.shape for x in jax.tree.leaves(llm.engine.programs.abstract_arguments.cache)}
        clear, left = local_executor.clear_frames, []

        def counted(failure: BaseException | None) -> None:
            clear(failure)
            left.append(sum(x.shape in shapes for x in jax.live_arrays()))

        monkeypatch.setattr(local_executor, "clear_frames", counted)
        breaks(llm, step=3)
        assert generated(llm) == [oracle(tiny)(prompt, GREEDY) for prompt in PROMPTS]
        assert left == [0]


def test_a_step_that_fails_during_sleep_loses_no_request(tiny, oracle):
    with serve(tiny) as llm:
        breaks(llm, step=0)
        for prompt in PROMPTS:
            llm.add_request({"prompt_token_ids": prompt}, GREEDY)
        shape = max(s for s in llm.engine.programs.steps if s.phase == "decode")
        while not any(ran.shape == shape for flight in llm.engine.in_flight_steps._steps for ran in flight):
            llm.step()
        llm.sleep(mode="keep")
        llm.wake_up()
        found = {
            out.request_id: list(out.outputs[0].token_ids) for out in llm.wait_for_completion(use_tqdm=False)
        }
        assert list(found.values()) == [oracle(tiny)(prompt, GREEDY) for prompt in PROMPTS]


@pytest.mark.full
def test_weights_are_replaced_and_offloaded_in_sleep(tiny, oracle):
    expected = [oracle(tiny)(prompt, GREEDY) for prompt in PROMPTS]
    with serve(tiny) as llm:
        other = jax.tree.map(lambda x: 2 * x, llm.params)
        llm.update_params(other)
        assert generated(llm) != expected
        llm.update_params(staged(tiny))
        llm.sleep(level=1)
        llm.wake_up()
        assert generated(llm) == expected


@pytest.mark.parametrize(
    "options, words",
    [
        ({"decode_steps": 4}, "decode_steps 4 is not allowed with 2 pipeline stages: only 1"),
        ({"swap_space": 1.0}, "swap_space 1.0 is not allowed with 2 pipeline stages: only 0"),
        ({"micro_batches": 9}, "micro_batches 9 is not allowed with max_num_seqs 8: 1 to 8"),
        ({"speculative_config": {"model": "demo-draft", "num_speculative_tokens": 2}}, "ngram and suffix"),
    ],
)
def test_what_stages_cannot_do_is_refused(tiny, options, words):
    with pytest.raises(ValueError, match=words):
        serve(tiny, **options)


def test_parameters_that_are_no_stages_are_refused(tiny):
    params, (first, last) = staged(tiny), jax.devices()
    back = jax.device_put(params.layers[0], last)
    for words, wrong in {
        "two stages share a device": replace(params, layers=(back, *params.layers)),
        "embed must lie on the devices of the first": replace(
            params, embed=jax.device_put(params.embed, last)
        ),
        "norm must lie on the devices of the last": replace(params, norm=jax.device_put(params.norm, first)),
    }.items():
        with pytest.raises(ValueError, match=words):
            serve(tiny, wrong)
    with pytest.raises(ValueError, match="micro_batches 2 is not allowed without"):
        serve(tiny, tiny.params, micro_batches=2)


@pytest.mark.full
def test_the_shipped_model_is_cut_by_an_option():
    """Its embedding is its head too: the last stage has a copy."""
    texts = ["One day, a", "def add(a, b):", "the"]
    with LLM(**OPTIONS) as one, LLM(pipeline_parallel_size=2, **OPTIONS) as two:
        found = [
            [out.outputs[0].text for out in llm.generate(texts, GREEDY, use_tqdm=False)] for llm in (one, two)
        ]
        assert found[0] == found[1]
        assert two.report()["stages"]["layers"] == ["0-2", "3-4"]
        assert two.params.head is not None and one.params.head is None


@pytest.mark.full
def test_tied_models_take_parameter_updates_without_a_head():
    """Nobody's checkpoint has the copy."""
    config, params = load_hf(DEMO_FOLDER, jnp.float32)
    assert params.head is None
    where = param_shardings(config, Layout(stages=2))
    tied = place_params(replace(where, head=None), params)
    with LLM.from_params(config, tied, **OPTIONS) as llm:
        expected = generated(llm)
        llm.update_params(jax.tree.map(lambda x: -x, tied))
        assert generated(llm) != expected
        llm.update_params(tied)
        assert generated(llm) == expected
        llm.update_params(llm.params)
        assert generated(llm) == expected


def test_invalid_stages_are_refused(tiny):
    with pytest.raises(
        ValueError, match="pipeline_parallel_size 3 is not allowed: 3 stages of 1 devices are 3"
    ):
        LLM(pipeline_parallel_size=3)
    mesh = Mesh(np.array(jax.devices()), ("tensor",))
    with pytest.raises(ValueError, match="pipeline_parallel_size 2 is not allowed with a mesh of your own"):
        LLM(pipeline_parallel_size=2, mesh=mesh)
    for options in ({"pipeline_parallel_size": 3}, {"tensor_parallel_size": 2}):
        with pytest.raises(ValueError, match="the parameters lie on 2 devices"):
            serve(tiny, staged(tiny), **options)
    with serve(tiny) as llm:
        with pytest.raises(ValueError, match="save_cache is not allowed with 2 pipeline stages"):
            llm.save_cache("nowhere")
        assert "duetto plan" in llm.report(explained=True)["explained"]
    with pytest.raises(ValueError, match="pipeline_parallel_size 3 is not allowed for 2 layers: 1 to 2"):
        split_layers(tiny.config, 3)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"decode_steps": 4}, "decode_steps 4 is not allowed with 2 pipeline stages"),
        ({"kv_disk_space": 1.0}, "kv_disk_space 1.0 is not allowed with 2 pipeline stages"),
        ({"micro_batches": 33}, "micro_batches 33 is not allowed with max_num_seqs 32: 1 to 32"),
        ({"speculative_config": {"model": "demo-draft", "num_speculative_tokens": 2}}, "ngram and suffix"),
        ({"micro_batches": 2, "pipeline_parallel_size": 1}, "micro_batches 2 is not allowed without"),
    ],
)
def test_what_stages_cannot_do_is_refused_before_weights_are_read(monkeypatch, options, words):
    def read(*given: Any, **others: Any) -> Any:
        raise AssertionError("weights are read")

    monkeypatch.setattr("duetto.serve.engine.startup.model_folder.read_model", read)
    with pytest.raises(ValueError, match=words):
        LLM(**{"pipeline_parallel_size": 2} | options)


def test_stages_share_the_hosts_memory_or_fill_their_devices(tiny):
    pair, options = PairConfig(tiny.config), EngineOptions(max_num_seqs=8, gpu_memory_utilization=0.5)

    def budgets(params: Any, memory: int | None) -> list[int]:
        return [stage.budget for stage in stage_budgets(pair, options, params, memory)]

    (whole,) = budgets(tiny.params, None)
    assert budgets(staged(tiny), None) == [whole // 2] * 2
    few, many = (budgets(staged(tiny), memory) for memory in (1 << 30, 3 << 30))
    assert [most - least for least, most in zip(few, many, strict=True)] == [1 << 30] * 2


def test_plans_count_loops_over_keys_once_per_run():
    """And what a quantised weight is widened to counts where nothing was compiled."""
    target = replace(local_target(), devices=tuple(jax.devices()))
    options = EngineOptions(pipeline_parallel_size=2, max_num_seqs=8, max_prefill_tokens=64)
    draft = str(ROOT / "checkpoints" / "demo-draft")  # of two layers

    def planned(compiled: bool, context: int, **asked: Any) -> list[StagePlan]:
        plan = plan_engine(draft, None, "float32", replace(options, **asked), target, context)
        shapes = main_shapes(plan.shapes)[1:] if compiled else []
        return plan_stages(plan, abstract_arguments(plan), shapes)

    touched = []
    for context in (64, 900):
        rows = [row for stage in planned(True, context) for row in stage.rows]
        touched.append([row.facts.bytes for row in rows if row.facts])
    assert len(touched[0]) == 2 and all(few < many for few, many in zip(*touched, strict=True))
    for plain, widened in zip(planned(False, 64), planned(False, 64, quantization="int8"), strict=True):
        assert plain.memory.temporaries < widened.memory.temporaries


@pytest.mark.parametrize("option", ["pipeline_parallel_size", "experimental_ffn_devices"])
def test_a_plan_has_a_column_for_each_stage(option):
    is_apart = option == "experimental_ffn_devices"
    count = 1 if is_apart else 2
    target = replace(local_target(), devices=tuple(jax.devices())[:2], peaks=GPUS["h200"])
    plan = plan_engine(None, None, "float32", EngineOptions(max_num_seqs=8, **{option: count}), target, 64)
    arguments = abstract_arguments(plan)
    found = plan_stages(plan, arguments, [])
    text = render_plan(plan, arguments, found)
    heads = {line.split()[0]: line.split()[1:] for line in reversed(text.splitlines()) if line.strip()}
    assert heads["stage"] == [stage.name for stage in found] and heads["devices"] == ["1", "1"]
    samples = ["attention"] if is_apart else [found[-1].name]  # stages that draw tokens
    slots = [device_bytes(arguments.slots) * (stage.name in samples) for stage in found]
    assert [stage.memory.slots for stage in found] == slots
    sizes = [f"{stage.memory.weights / 2**20:.1f}" for stage in found]
    assert heads["weights"] == [*sizes, "MiB"] and "micro-batches" in text
    assert ("apart" in text) == is_apart
