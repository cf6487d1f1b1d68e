"""Rows of the invariance suite for adapters: each request gets the tokens of its own adapter, or of the model
alone, whoever is beside it, and whichever adapters come and go."""

import asyncio
from dataclasses import replace
from functools import partial
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases.adapters import ALL, ATTENTION, merged, read, write, written_as
from cases.invariance import LENGTHS, PARAMS, bits, prompts
from cases.oracle import continue_plainly
from cases.weights import logits
from scipy.special import log_softmax
from suite.fixtures import with_few_shapes

from duetto import SamplingParams
from duetto.lora.request import LoRARequest
from duetto.model.attention import causal
from duetto.model.transformer import compute_logits, forward
from duetto.model.weights.lora import AdapterSizes, lora_stacks, with_lora_stacks, with_row_slots
from duetto.serve.engine.lora.writer import AdapterWriter, add_lora_slots
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.http.main import make_server_app
from duetto.serve.server.service.service import Service

pytestmark = [
    pytest.mark.parametrize("model", ["tiny"], indirect=True, scope="session"),
]
SIZES = AdapterSizes(2, 8)
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
TIGHT = {  # so few pages that requests are preempted, and guesses
    "max_model_len": 230, "max_batched_token_mem": 240, "page_size": 16, "max_num_seqs": 4,
    "max_prefill_tokens": 32, "decode_steps": 1,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False},
}  # fmt: skip
WHOSE = ["a", None, "b", "b", None, "c", "a"]  # more adapters than places
EXACT = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(model, tmp_path_factory) -> dict[str, Path]:
    """Adapters of different ranks and modules; the last was trained."""
    where, config = tmp_path_factory.mktemp("adapters"), model.config
    return {
        "a": write(where / "a", config, 4, 0, ALL),
        "b": write(where / "b", config, 8, 1, ATTENTION),
        "c": trained(where / "c", model),
    }


def trained(folder: Path, model) -> Path:
    """An adapter of rank 3 that has learnt to repeat a text, by gradients through the record that serves."""
    config, text = model.config, jnp.arange(40, 72, dtype=jnp.int32)[None]
    params = add_lora_slots(model.params, config, AdapterSizes(1, 3))
    terms = {path: (a, 0 * b) for path, (a, b) in lora_stacks(params).items() if "attention" in path}
    optimiser = optax.adam(3e-2)

    def loss(terms):
        owned = with_row_slots(with_lora_stacks(model.params, terms), jnp.zeros(1, jnp.int32))
        places = jnp.arange(text.shape[1], dtype=jnp.int32)[None]
        hidden, _ = forward(owned, config, text, places, causal)
        scores = compute_logits(owned, config, hidden)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(scores, text[:, 1:]).mean()

    @jax.jit
    def update(terms, state):
        value, gradient = jax.value_and_grad(loss)(terms)
        change, state = optimiser.update(gradient, state)
        return optax.apply_updates(terms, change), state, value

    state, values = optimiser.init(terms), []
    with jax.numpy_dtype_promotion("standard"):  # optax's own steps are mixed
        for _ in range(12):
            terms, state, value = update(terms, state)
            values.append(float(value))
    assert values[-1] < 0.5 * values[0]
    own = {path: (np.asarray(a)[..., 0, :], np.asarray(b)[0]) for path, (a, b) in terms.items()}
    return written_as(folder, config, own, 3)


@pytest.fixture(scope="module")
def requests(folders) -> dict[str | None, LoRARequest | None]:
    named = enumerate(folders.items(), 1)
    return {None: None} | {name: LoRARequest(name, i, str(folder)) for i, (name, folder) in named}


@pytest.fixture(scope="module")
def wanted(requests):
    return [requests[name] for name in WHOSE]


@pytest.fixture(scope="module")
def llm(serve):
    with with_few_shapes():
        llm = serve(**LORA)
    with llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm, model, wanted):
    """Each request served alone by an engine without pages."""
    found = []
    for prompt, params, own in zip(prompts(model.config.vocab_size), PARAMS, wanted, strict=True):
        llm.engine.tables.reset_prefix_cache()
        found += [bits(o) for o in llm.generate(prompt, params, use_tqdm=False, lora_request=own)]
    return found


def test_alone_equals_the_oracle_and_the_model_without_adapters(model, alone, expected, folders):
    """Exactly: the oracle has the same terms, and no cache."""
    room, texts = add_lora_slots(model.params, model.config, SIZES), prompts(model.config.vocab_size)
    writer = AdapterWriter(room)
    for i, name in enumerate(WHOSE):
        if name is None:
            assert alone[i] == expected[i]
            continue
        adapter = read(folders[name], model.config)
        place = writer.lora_slots.reserve(adapter)
        room = writer.write_due_adapters(room)
        owned = replace(model, params=with_row_slots(room, jnp.full(1, place, jnp.int32)))
        writer.lora_slots.release(adapter)
        found = [token for token, *_ in alone[i]]
        assert found == continue_plainly(owned, texts[i], PARAMS[i], guess=found)
        assert found != [token for token, *_ in expected[i]]


@pytest.mark.full
def test_batched_and_prefix_hits_equal_alone(model, llm, alone, wanted):
    """A prompt's pages are found by those who have the same adapter; a place is taken by another adapter when
    nobody uses it."""
    texts, places = prompts(model.config.vocab_size), llm.engine.scheduler.lora_slots
    loads, compiled = places.loads, llm.report()["compilations"]
    llm.engine.tables.reset_prefix_cache()
    for found in [[0] * 7, [(n - 1) // 64 * 64 for n in LENGTHS]]:
        outputs = llm.generate(texts, PARAMS, use_tqdm=False, lora_request=wanted)
        assert [output.lora_request for output in outputs] == wanted
        assert [bits(o) for o in outputs] == alone
        assert [o.num_cached_tokens for o in outputs] == found
    (other,) = llm.generate(texts[-1], PARAMS[-1], use_tqdm=False, lora_request=wanted[2])
    assert other.num_cached_tokens == 0
    assert places.loads > loads and llm.report()["compilations"] == compiled


@pytest.mark.full
def test_preemption_and_draft_tokens_change_no_bit(model, serve, alone, wanted):
    texts = prompts(model.config.vocab_size)
    with serve(**TIGHT, **LORA) as llm:
        compiled = llm.report()["compilations"]
        for _ in range(2):
            outputs = llm.generate(texts, PARAMS, use_tqdm=False, lora_request=wanted)
            assert [bits(o) for o in outputs] == alone
        report = llm.report()
    assert report["preemptions"] > 0 and report["speculation"]["drafted"] > 0
    assert report["compilations"] == compiled


def test_a_trained_adapter_equals_its_merged_weights(model, llm, folders, requests):
    """Sums are in another order: log-probabilities within 2e-4, greedy tokens the same."""
    plain = replace(model, params=merged(model.params, read(folders["c"], model.config)))
    text = list(range(40, 60))
    (output,) = llm.generate(text, EXACT, use_tqdm=False, lora_request=requests["c"])
    assert output.outputs[0].token_ids == continue_plainly(plain, text, EXACT)

    (plainly,) = np.asarray(logits(plain.params, model.config, np.array([text], np.int32)))
    scores = log_softmax(plainly, axis=-1)
    found = [entry[token].logprob for token, entry in zip(text[1:], output.prompt_logprobs[1:], strict=True)]
    np.testing.assert_allclose(found, scores[np.arange(19), text[1:]], atol=2e-4)


@pytest.mark.full
def test_adapters_outlast_a_sleep_and_new_weights(model, llm, requests):
    text = prompts(model.config.vocab_size)[3]
    greedy = SamplingParams(temperature=0.0, max_tokens=8, logprobs=0)
    ask = partial(llm.generate, text, greedy, use_tqdm=False, lora_request=requests["a"])
    before = bits(ask()[0])
    for level in (1, 2):
        llm.sleep(level)
        if level == 2:
            llm.update_params(jax.tree.map(jnp.copy, model.params))
        llm.wake_up()
        assert bits(ask()[0]) == before
    llm.update_params(jax.tree.map(jnp.copy, model.params))
    assert jax.tree.structure(llm.params) == jax.tree.structure(model.params)
    assert bits(ask()[0]) == before


def test_an_adapter_in_place_of_another_has_other_pages(model, llm, folders, requests):
    text = prompts(model.config.vocab_size)[5]
    ask = partial(llm.generate, text, PARAMS[0], use_tqdm=False)
    first, second = (ask(lora_request=requests[name])[0] for name in "ab")
    swapped = LoRARequest("a", 1, str(folders["b"]))
    (found,) = ask(lora_request=swapped)
    assert bits(found) == bits(second) != bits(first) and found.num_cached_tokens == 128
    (again,) = ask(lora_request=replace(requests["a"], load_inplace=True))
    assert bits(again) == bits(first)


def test_a_server_names_loads_and_unloads_adapters(model, llm, folders):
    """As vLLM's: by `model`, with a list of all, while it runs."""
    options = ServerOptions(served_model_name=["base"], runtime_lora_updating=True)

    async def talk() -> None:
        service = Service(llm, options, {})
        transport = httpx.ASGITransport(make_server_app(service, [], None))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as http:
            for name in ("a", "b", "c"):
                llm.input_processor.adapter_registry._adapters_by_name.pop(name, None)

            async def completed(name: str) -> list[int]:
                body = {"model": name, "prompt": [5, 6, 7], "temperature": 0, "logprobs": 0, "max_tokens": 4}
                reply = (await http.post("/v1/completions", json=body)).json()
                assert reply["model"] == name
                return reply["choices"][0]["logprobs"]["token_logprobs"]

            base = await completed("base")
            told = {"lora_name": "sql", "lora_path": str(folders["a"])}
            assert (
                await http.post("/v1/completions", json={"model": "sql", "prompt": [5]})
            ).status_code == 404
            loaded = await http.post("/v1/load_lora_adapter", json=told)
            assert (loaded.status_code, loaded.text) == (
                200, "Success: LoRA adapter 'sql' added successfully.",
            )  # fmt: skip
            assert await completed("sql") != base == await completed("base")
            models = {one["id"]: one for one in (await http.get("/v1/models")).json()["data"]}
            assert models["sql"]["parent"] == "base" and models["sql"]["root"] == str(folders["a"])
            assert models["base"]["parent"] is None
            twice = await http.post("/v1/load_lora_adapter", json=told)
            assert twice.status_code == 400 and "load_inplace" in twice.json()["error"]["message"]
            for other in ({"lora_nam": "x"}, {"lora_name": "x" * 5000}):
                refused = (await http.post("/v1/load_lora_adapter", json=told | other)).json()["error"]
                assert "lora_name" in refused["message"] and len(refused["message"]) < 300
            wrong = await http.post(
                "/v1/load_lora_adapter", json=told | {"lora_name": "x", "lora_path": "/no"}
            )
            assert wrong.status_code == 400 and "adapter_config.json" in wrong.json()["error"]["message"]
            metrics = (await http.get("/metrics")).text
            assert 'max_lora="2"' in metrics and "vllm:lora_requests_info" in metrics
            gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})
            assert gone.text == "Success: LoRA adapter 'sql' removed successfully."
            assert (await http.post("/v1/unload_lora_adapter", json={"lora_name": "sql"})).status_code == 404
        await service.close()

    asyncio.run(talk())
