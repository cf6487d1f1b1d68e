"""A model whose feed-forward layers lie apart gives the tokens and the bits of one device."""

import threading
from dataclasses import replace
from typing import Any

import jax
import pytest
from cases.invariance import PARAMS, bits, prompts
from fakes.greedy import greedy_programs
from jax.sharding import Mesh
from suite.fixtures import with_few_shapes
from suite.marks import full

from duetto import LLM, SamplingParams
from duetto.kvcache.stages import ffn_params_by_layer, params_without_ffn, tree_devices
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER, load_folder
from duetto.serve.options.engine import EngineOptions
from duetto.serve.runtime.compiled.futures import wait_result
from duetto.serve.runtime.pipeline.pipelined_step import PipelinedStep
from duetto.serve.runtime.pipeline.route import ATTENTION_HALF, FFN_HALF

APART = {"experimental_ffn_devices": 1, "max_prefill_tokens": 64, "page_size": 16}
SMALL = {"max_model_len": 160, "max_batched_token_mem": 160, "max_num_seqs": 4}  # requests give way
MORE = {"micro_batches": 3, "speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [[(k * i * i + i) % 300 for i in range(n)] for k, n in enumerate((62, 60, 110, 3))]


MIXED = pytest.mark.parametrize("model", ["parallel"], indirect=True)  # a dense layer and a mixture


@pytest.fixture(scope="module")
def llm(model):
    with with_few_shapes(), greedy_programs():
        llm = LLM.from_params(model.config, model.params, **APART, **SMALL)
    with llm:
        yield llm


@pytest.fixture(scope="module")
def expected(model, oracle):
    return [oracle(model)(prompt, GREEDY) for prompt in PROMPTS]


def generated(llm: LLM, texts=PROMPTS) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(texts, GREEDY, use_tqdm=False)]


@pytest.mark.minutes
@pytest.mark.usefixtures("steady_steps")
@pytest.mark.parametrize("model", ["latent"], indirect=True)
def test_bits_are_those_of_one_device(model):
    """Through chunks of prompts, hits of their pages, and guesses."""
    texts, own = prompts(model.config.vocab_size), {"max_num_seqs": 8, "max_model_len": 256}
    texts[2] = 3 * texts[2][:20]  # for the guesses
    with LLM.from_params(
        model.config, model.params, **own, **APART | {"experimental_ffn_devices": None}
    ) as one:
        alone = [bits(out) for out in one.generate(texts, PARAMS, use_tqdm=False)]
    with LLM.from_params(model.config, model.params, **own, **APART, **MORE) as llm:
        for cached in (False, True):
            outputs = llm.generate(texts, PARAMS, use_tqdm=False)
            assert [bits(out) for out in outputs] == alone
            assert any(out.num_cached_tokens for out in outputs) == cached
        assert bits(llm.generate(texts[-1], PARAMS[-1], use_tqdm=False)[0]) == alone[-1]
        report = llm.report()
        assert report["compilations"] == 0 and report["stages"]["layers"] == ["attention", "ffn"]
        assert all(seconds > 0 for seconds in report["stages"]["busy_seconds"])
        assert any(name.startswith("verify") for name in report["steps"])


@pytest.mark.full
@MIXED
def test_preempted_requests_are_resumed(expected, llm):
    assert generated(llm) == expected
    report = llm.report()
    assert report["preemptions"] > 0 and report["compilations"] == 0
    assert llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0].num_cached_tokens > 0


@MIXED
def test_each_part_holds_its_own_weights_and_cache(llm):
    first, second = jax.devices()
    slots = llm.engine._arguments.slots
    held = (
        params_without_ffn(llm.params),
        llm.engine.cache,
        wait_result(slots),
        wait_result(slots.first_stage_slots),
    )
    assert tree_devices(held) == {first}
    assert tree_devices(ffn_params_by_layer(llm.params)) == {second}
    assert llm.get_world_size() == 2
    _, params, _ = load_folder(DEMO_FOLDER, "float32", options=EngineOptions(**APART))
    assert tree_devices(params_without_ffn(params)) == {first} and tree_devices(
        ffn_params_by_layer(params)
    ) == {second}


@MIXED
def test_attention_and_feed_forward_parts_run_concurrently(llm, model, oracle, monkeypatch):
    """From where all requests decode, every half waits until the other part has begun one of its own: parts
    that take turns would wait for ever."""
    long, meet = replace(GREEDY, max_tokens=40), threading.Barrier(2, timeout=600)
    run, ran, met = PipelinedStep._run, {ATTENTION_HALF: 0, FFN_HALF: 0}, range(0)

    def meeting(step: PipelinedStep, i: int, *given: Any) -> Any:
        part = step.route[i].half
        if not step.route[i].is_last:
            ran[part] += 1
            if ran[part] - (part == ATTENTION_HALF) in met:  # it is a half ahead
                meet.wait()
        return run(step, i, *given)

    monkeypatch.setattr(PipelinedStep, "_run", meeting)
    texts = PROMPTS[1::2]
    for prompt in texts:
        llm.add_request({"prompt_token_ids": prompt}, long)
    running = llm.engine.scheduler.running
    while len(running) < len(texts) or any(x.tokens == x.prompt for x in running.values()):
        llm.step()
    executor: Any = llm.engine.executor
    executor.stages.drain()
    assert ran[ATTENTION_HALF] == ran[FFN_HALF]
    met = range(ran[FFN_HALF] + 4, ran[FFN_HALF] + 24)
    found = [list(out.outputs[0].token_ids) for out in llm.wait_for_completion(use_tqdm=False)]
    assert found == [oracle(model)(prompt, long) for prompt in texts]
    assert ran[FFN_HALF] > met.stop


@MIXED
@pytest.mark.parametrize("part", [FFN_HALF, full(ATTENTION_HALF)])
def test_requests_survive_a_failed_step(llm, expected, part):
    programs, calls = llm.engine.programs.steps, iter(range(1000))
    shape = max(s for s in programs if s.phase == "decode")
    step = programs[shape]
    last = max(i for i, stage in enumerate(step.route) if stage.half == part and not stage.is_last)

    def fails(*given: Any) -> Any:
        if next(calls) == 3:
            raise jax.errors.JaxRuntimeError("INTERNAL: a device is lost")
        return step.programs[last](*given)

    programs[shape] = replace(step, programs=(*step.programs[:last], fails, *step.programs[last + 1 :]))
    assert generated(llm) == expected
    programs[shape] = step


@pytest.mark.full
@MIXED
def test_weights_are_replaced_and_offloaded_in_sleep(llm, expected):
    own = llm.params
    llm.update_params(jax.tree.map(lambda x: 2 * x, own))
    assert generated(llm) != expected
    llm.update_params(own)
    llm.sleep(level=1)
    llm.wake_up()
    assert generated(llm) == expected
    assert tree_devices(ffn_params_by_layer(llm.params)) == {jax.devices()[1]}


@MIXED
def test_what_halves_cannot_do_is_refused(llm, model):
    with pytest.raises(ValueError, match="not allowed with a mesh of your own"):
        LLM(**APART, mesh=Mesh(jax.devices(), ("tensor",)))
    with pytest.raises(ValueError, match="are experimental: set experimental_ffn_devices"):
        LLM.from_params(model.config, llm.params)
    with pytest.raises(ValueError, match="save_cache is not allowed with experimental_ffn_devices 1"):
        llm.save_cache("nowhere")
    assert "duetto plan" in llm.report(explained=True)["explained"]
    own = replace(llm.params.layers[1], ffn=jax.device_put(llm.params.layers[1].ffn, jax.devices()[0]))
    with pytest.raises(ValueError, match="all must lie on the same devices"):
        LLM.from_params(model.config, replace(llm.params, layers=(llm.params.layers[0], own)), **APART)
