"""Requests dealt over two devices get the tokens of one."""

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from cases.adapters import merged, read, write
from cases.invariance import PARAMS, bits, prompts
from jax.sharding import Mesh
from suite.fixtures import random_model
from suite.marks import full

from duetto import LLM, SamplingParams
from duetto.lora.request import LoRARequest
from duetto.model.experts import MoE
from duetto.model.sharding import Layout, device_bytes
from duetto.model.tree import tree_bytes
from duetto.serve.engine.startup.mesh import param_shardings, place_params

SMALL = {  # two seats a shard, and a cache of one request's length for them: they preempt each other
    "max_model_len": 160, "max_batched_token_mem": 320, "max_num_seqs": 4, "max_prefill_tokens": 64,
    "page_size": 16, "reproducible": False, "data_parallel_size": 2,
}  # fmt: skip
LARGE: dict[str, Any] = SMALL | {"max_batched_token_mem": None, "max_num_seqs": 16, "max_model_len": 256}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = [[(k * i * i + i) % 300 for i in range(n)] for k, n in enumerate((62, 60, 61, 63, 110))]
EXPERTS = {"enable_expert_parallel": True}


def serve(model, params: Any = None, **options: Any) -> LLM:
    return LLM.from_params(model.config, model.params if params is None else params, **options)


def generated(llm: LLM, texts=PROMPTS, params: Any = GREEDY) -> list[list[int]]:
    return [list(out.outputs[0].token_ids) for out in llm.generate(texts, params, use_tqdm=False)]


@pytest.mark.usefixtures("greedy_only")
@pytest.mark.parametrize("name, options", [("tiny", {}), full("latent", EXPERTS), full("windows", EXPERTS)])
def test_served_tokens_are_those_of_one_device(name: str, options: dict[str, Any], oracle):
    """Also of requests that give way, come back, and find their prompts; alone too, beside an empty shard."""
    model, params = random_model(name), replace(GREEDY, max_tokens=32)
    expected = [oracle(model)(prompt, params) for prompt in PROMPTS]
    with serve(model, **SMALL | options) as llm:
        assert generated(llm, params=params) == expected
        assert [generated(llm, [prompt], params)[0] for prompt in PROMPTS] == expected
        report = llm.report()
        assert report["preemptions"] > 0 or name == "windows"
        assert report["compilations"] == 0 and report["cached_tokens"] > 0
        assert device_bytes(llm.engine.cache) * 2 == tree_bytes(llm.engine.cache)
        assert device_bytes(llm.params.embed) == tree_bytes(llm.params.embed)
        for layer in llm.params.layers:
            assert device_bytes(layer.attention) == tree_bytes(layer.attention)
            if isinstance(layer.ffn, MoE):
                assert device_bytes(layer.ffn.experts) * 2 == tree_bytes(layer.ffn.experts)
        assert llm.get_world_size() == 2


@pytest.mark.full
def test_nothing_goes_between_shards_but_tokens_of_experts():
    """Of a model of experts each layer gathers rows and choices, and sends back sums; of others nothing."""
    for name, options, expected in (
        ("tiny", {}, {}),
        ("latent", EXPERTS, {"all-gather": 2, "all-to-all": 1}),
    ):
        with serve(random_model(name), **SMALL | options) as llm:
            for shape in llm.engine.programs.steps:
                text = "\n".join(part.as_text() for part in llm.engine.programs.step_parts(shape))
                kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
                found = re.findall(rf"= .*? ({kinds})(?:-start)?\(", text)
                assert Counter(found) == expected, shape


@pytest.mark.full
@pytest.mark.parametrize("name, options", [("tiny", {}), full("latent", EXPERTS)])
def test_bits_depend_on_the_request_alone(name: str, options: dict[str, Any], oracle):
    """Neither on the shard nor on what others do: draws, penalties and scores too."""
    model = random_model(name)
    texts = prompts(model.config.vocab_size)
    expected = [oracle(model)(text, params) for text, params in zip(texts, PARAMS, strict=True)]
    with serve(model, **LARGE | options | {"reproducible": True}) as llm:
        assert generated(llm, texts, PARAMS) == expected
        alone = []
        for text, params in zip(texts, PARAMS, strict=True):
            llm.engine.tables.reset_prefix_cache()
            alone += [bits(out) for out in llm.generate(text, params, use_tqdm=False)]
        llm.engine.tables.reset_prefix_cache()
        for cached in (False, True):
            outputs = llm.generate(texts, PARAMS, use_tqdm=False)
            assert [bits(out) for out in outputs] == alone
            assert any(out.num_cached_tokens for out in outputs) == cached


@pytest.mark.usefixtures("few_shapes")
def test_adapters_are_in_every_shard(tiny, oracle, tmp_path):
    """Rows have the tokens of merged weights on one device, in whichever shard, and the bits that they have
    alone."""
    folders = {name: write(tmp_path / name, tiny.config, 2 + i, i) for i, name in enumerate("ab")}
    asked = {name: LoRARequest(name, i, str(folder)) for i, (name, folder) in enumerate(folders.items(), 1)}
    whose = ["a", None, "b", "b", "a"]
    models: dict[str | None, Any] = {
        name: replace(tiny, params=merged(tiny.params, read(folder, tiny.config)))
        for name, folder in folders.items()
    } | {None: tiny}
    expected = [oracle(models[name])(prompt, GREEDY) for name, prompt in zip(whose, PROMPTS, strict=True)]
    wanted, scored = [asked.get(name) for name in whose], replace(GREEDY, logprobs=1)
    with serve(tiny, **LARGE | {"enable_lora": True, "max_loras": 2, "reproducible": True}) as llm:
        together = llm.generate(PROMPTS, scored, use_tqdm=False, lora_request=wanted)
        assert [list(out.outputs[0].token_ids) for out in together] == expected
        for prompt, own, found in zip(PROMPTS, wanted, together, strict=True):
            llm.engine.tables.reset_prefix_cache()
            (alone,) = llm.generate(prompt, scored, use_tqdm=False, lora_request=own)
            assert bits(alone) == bits(found)
        assert llm.report()["compilations"] == 0


@pytest.mark.full
def test_a_shard_is_empty_while_another_is_full(tiny, oracle):
    """Requests go where their prompt is, as long as that makes no step wider; others elsewhere."""
    begin = PROMPTS[-1][:96]
    texts = [[*begin, *range(i, i + 5)] for i in range(3)]
    expected = [oracle(tiny)(text, GREEDY) for text in texts]
    with serve(tiny, **SMALL | {"max_batched_token_mem": 640}) as llm:
        tables: Any = llm.engine.tables
        first, second = tables.shards
        assert generated(llm, texts[:1]) == expected[:1] and first.pools[0].list_cached_pages()
        outputs = llm.generate(texts[:2], GREEDY, use_tqdm=False)
        assert [list(out.outputs[0].token_ids) for out in outputs] == expected[:2]
        assert all(out.num_cached_tokens >= 96 for out in outputs) and not second.pools[0].list_cached_pages()
        assert generated(llm, texts) == expected and second.pools[0].list_cached_pages()


@pytest.mark.full
def test_samples_of_one_prompt_are_those_of_one_device(tiny):
    params = SamplingParams(
        temperature=0.9, top_p=0.9, n=5, seed=3, max_tokens=8, logprobs=1, prompt_logprobs=1
    )

    def answers(llm: LLM) -> list[list[list[int]]]:
        outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
        assert all(len(out.prompt_logprobs) == len(out.prompt_token_ids) for out in outputs)
        return [[list(one.token_ids) for one in out.outputs] for out in outputs]

    with serve(tiny, **LARGE) as llm, serve(tiny, **LARGE | {"data_parallel_size": 1}) as one:
        assert answers(llm) == answers(one)


@pytest.mark.full
@pytest.mark.usefixtures("steady_steps")
def test_draft_tokens_change_no_token(tiny, oracle):
    again, params = [prompt[:20] * 3 for prompt in PROMPTS], replace(GREEDY, max_tokens=32)
    expected = [oracle(tiny)(prompt, params) for prompt in again]
    options = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    with serve(tiny, **LARGE | options) as llm:
        assert generated(llm, again, params) == expected
        assert any(name.startswith("verify") for name in llm.report()["steps"])


@pytest.mark.full
def test_several_steps_in_one_dispatch_end_together(oracle):
    """Shards exchange what experts make in each of them: all take as many."""
    model = random_model("latent")
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 3, 7, 12, 5)]
    expected = [oracle(model)(prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
    with serve(model, **LARGE | EXPERTS | {"decode_steps": 4}) as llm:
        assert generated(llm, params=params) == expected
        assert any(name.endswith(",4]") for name in llm.report()["steps"])


@pytest.mark.usefixtures("greedy_only")
def test_requests_are_aborted_and_weights_offloaded_in_sleep(tiny, oracle):
    expected = [oracle(tiny)(prompt, GREEDY) for prompt in PROMPTS]
    with serve(tiny, **SMALL) as llm:
        for i, prompt in enumerate(PROMPTS * 2):
            llm.add_request({"prompt_token_ids": prompt}, GREEDY, str(i))
        found = {}
        for step in range(1000):
            found |= {out.request_id: list(out.outputs[0].token_ids) for out in llm.step()}
            if step < 5:
                llm.abort(str(2 * step))
            if not llm.has_unfinished_requests():
                break
        assert {name: found[name] for name in "13579"} == {str(i): expected[i % 5] for i in (1, 3, 5, 7, 9)}
        llm.update_params(jax.tree.map(lambda x: 2 * x, llm.params))
        assert generated(llm) != expected
        llm.update_params(place_params(param_shardings(tiny.config, Layout(data=2)), tiny.params))
        llm.sleep(level=1)
        llm.wake_up()
        assert generated(llm) == expected


@pytest.mark.parametrize(
    "options, words",
    [
        ({"max_num_seqs": 5}, "max_num_seqs 5 is not allowed with data_parallel_size 2: only a multiple"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size 2 is not allowed with data_parallel_size 2"),
        ({"swap_space": 1.0}, "swap_space 1.0 is not allowed with data_parallel_size 2: only 0"),
        ({"kv_disk_space": 1.0}, "kv_disk_space 1.0 is not allowed with data_parallel_size 2: only 0"),
        ({"tensor_parallel_size": 2}, "size 2 times data_parallel_size 2 is not allowed: devices here are 2"),
        ({"speculative_config": {"model": "x", "num_speculative_tokens": 2}}, "ngram and suffix draft there"),
    ],
)
def test_what_shards_cannot_do_is_refused(tiny, options, words):
    with pytest.raises(ValueError, match=words):
        serve(tiny, **SMALL | options)


@pytest.mark.usefixtures("greedy_only")
def test_a_users_mesh_determines_how_rows_are_split(tiny, oracle):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    own = place_params(param_shardings(tiny.config, Layout(data=2), mesh), tiny.params)
    with serve(tiny, own, **SMALL) as llm:
        assert generated(llm, PROMPTS[:1]) == [oracle(tiny)(PROMPTS[0], GREEDY)]
        with pytest.raises(ValueError, match="save_cache is not allowed with data_parallel_size 2"):
            llm.save_cache("nowhere")
    split = place_params(param_shardings(tiny.config, Layout(2)), tiny.params)
    with pytest.raises(ValueError, match="the parameters lie on a mesh without an axis data of that size"):
        serve(tiny, split, **SMALL)
    with pytest.raises(ValueError, match=r"data_parallel_size 3 is not allowed: the mesh has axes"):
        param_shardings(tiny.config, Layout(data=3), mesh)
