"""Requests for which the model computes NaN end with an error; those beside them keep every bit."""

import asyncio
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.requests import SIZES, exact
from suite.marks import full

from duetto import LLM, PoolingParams, SamplingParams
from duetto.model.pooling import Pooler, pool_hidden_states
from duetto.sampling.params import BeamSearchParams
from duetto.serve.engine.core.request import NAN_LOGITS, ScoreLog
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.service.errors import HttpError
from duetto.serve.server.service.service import Service
from duetto.serve.text.openai.tasks import Task
from duetto.serve.text.outputs import GenerationError

BAD = 7  # of its embedding nothing is a number
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1)
DRAWN = SamplingParams(
    temperature=0.9, seed=5, top_k=9, top_p=0.9, min_p=0.01, max_tokens=8, logit_bias={BAD: -100}
)
HEALTHY, BROKEN = [list(range(20, 60)), [5, 9, 11] * 8], [[5, 9, BAD, *range(20, 60)], [BAD]]
OPTIONS = {
    "plain": {},
    "several steps": {"decode_steps": 4},
    "draft tokens": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.fixture(
    scope="module",
    params=[full(x) if "speculative_config" in x else x for x in OPTIONS.values()],
    ids=OPTIONS,
)
def llm(request, one_layer):
    params = one_layer.params
    with LLM.from_params(one_layer.config, params, **(SIZES | request.param)) as llm:
        llm.engine.update_params(replace(params, embed=params.embed.at[BAD].set(jnp.nan)))
        yield llm


@pytest.mark.parametrize("params", [replace(GREEDY, logit_bias={BAD: -100}), DRAWN], ids=["greedy", "drawn"])
def test_only_the_requests_with_nan_end_with_an_error(llm, params):
    before = llm.engine.stats.finish_reasons.get("error", 0)
    alone = exact(llm.generate(HEALTHY, params, use_tqdm=False))
    mixed = llm.generate([HEALTHY[0], *BROKEN, HEALTHY[1]], params, use_tqdm=False)
    assert exact([mixed[0], mixed[3]]) == alone == exact(llm.generate(HEALTHY, params, use_tqdm=False))
    for output in mixed[1:3]:
        assert output.outputs[0].token_ids == [] and output.outputs[0].stop_reason == NAN_LOGITS
        assert output.outputs[0].finish_reason == "error"
    assert llm.engine.stats.finish_reasons["error"] == before + 2 and llm.engine.tables.occupancy == 0
    counted = {m.name: m.value for m in llm.get_metrics() if m.name == "vllm:corrupted_requests"}
    assert counted == {"vllm:corrupted_requests": before + 2}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_before_nan_are_kept(llm, temperature):
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=9, allowed_token_ids=[BAD], logprobs=0
    )
    (output,) = llm.generate([HEALTHY[0]], params, use_tqdm=False)
    assert output.outputs[0].token_ids == [BAD] and output.outputs[0].finish_reason == "error"
    assert len(output.outputs[0].logprobs) == 1


def test_pages_with_nan_are_not_found_again(llm):
    """Healthy ones are."""
    params = replace(GREEDY, logit_bias={BAD: -100})
    again = [llm.generate([HEALTHY[0], BROKEN[0]], params, use_tqdm=False) for _ in range(2)][1]
    assert [output.num_cached_tokens > 0 for output in again] == [True, False]


def test_nan_is_logged_once(llm, caplog):
    llm.generate(BROKEN, GREEDY, use_tqdm=False)
    llm.generate(BROKEN, GREEDY, use_tqdm=False)
    assert len([record for record in caplog.records if NAN_LOGITS in record.message]) == 1


def test_results_that_are_made_of_several_raise(llm):
    with pytest.raises(GenerationError, match="NaN"):
        llm.beam_search([BROKEN[0]], BeamSearchParams(beam_width=2, max_tokens=3))
    with pytest.raises(GenerationError, match="NaN"):
        llm.log_likelihood([BROKEN[0]])
    with pytest.raises(GenerationError, match="embed: .*NaN"):
        llm.embed(BROKEN[:1], use_tqdm=False)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_servers_request_ends_with_an_error(llm, is_stream):
    async def asked() -> None:
        service = Service(llm, ServerOptions(), {})
        task = Task("completion", None, GREEDY, prompt=BROKEN[0])
        async with service.open_call([task], service.admission.new_body()) as call:
            with pytest.raises(HttpError, match="NaN") as told:
                await (anext(call.read_outputs()) if is_stream else call.wait_end())
        await service.close()
        assert (told.value.status, told.value.code) == (500, "nan_logits")

    asyncio.run(asked())


def test_a_score_that_is_nan_is_noticed():
    log, top = ScoreLog(), np.zeros((2, 0))
    log.extend(np.array([-1.0, -np.inf]), np.ones(2), top, top)
    assert not log.has_nan
    log.extend(np.array([-1.0, np.nan]), np.ones(2), top, top)
    assert log.has_nan


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_an_embedding_of_nan_is_noticed(value, pooling):
    """Also where only one of a prompt's first tokens has it; what is behind a row's tokens does not count."""
    hidden = np.ones((3, 4, 8), np.float32)
    hidden[0, 1, 3] = hidden[1, 3, 3] = value
    pooled = jax.jit(pool_hidden_states)(hidden, np.array([4, 3, 4], np.int32))
    poolers = [Pooler(PoolingParams(pooling=pooling), length) for length in (4, 3, 4)]
    for row, pooler in enumerate(poolers):
        pooler.add_chunk(pooled, row, 0, pooler.length)
    assert [pooler.has_nan for pooler in poolers] == [True, False, False]
