"""Two stages of two devices each, which split their layers."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax
import pytest
from suite.marks import full

from duetto import LLM, SamplingParams
from duetto.kvcache.stages import pipeline_stages
from duetto.model.sharding import device_bytes
from duetto.model.tree import tree_bytes
from duetto.serve.runtime.compiled.futures import StepFuture, wait_result
from duetto.serve.runtime.pipeline.pipelined_step import StageThreads

DEVICES = 4
OPTIONS = {"max_num_seqs": 4, "max_prefill_tokens": 64, "max_model_len": 160, "page_size": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[(k * i * i + i) % 300 for i in range(n)] for k, n in enumerate((62, 80, 3))]


def at_once(
    _: StageThreads, count: int, stage: int, work: Callable[..., Any], *given: Any
) -> list[StepFuture]:
    """One program at a time: where collectives of several overlap, a CPU with fewer cores than devices can
    hang."""
    done: Future[Any] = Future()
    done.set_result(jax.block_until_ready(work(*map(wait_result, given))))
    return [StepFuture(done).part(i) for i in range(count)]


@pytest.mark.usefixtures("few_shapes", "greedy_only")
@pytest.mark.parametrize("model", ["tiny", full("windows")], indirect=True)
def test_tokens_are_those_of_the_oracle(model, oracle, monkeypatch):
    assert jax.device_count() == 4
    monkeypatch.setattr(StageThreads, "submit_parts", at_once)
    expected = [oracle(model)(prompt, GREEDY) for prompt in PROMPTS]
    own = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "reproducible": False}
    with LLM.from_params(model.config, model.params, **OPTIONS, **own) as llm:
        assert len(pipeline_stages(llm.params)) == 2 and llm.get_world_size() == 4
        for layer in llm.params.layers:
            assert device_bytes(layer.attention.q) * 2 == tree_bytes(layer.attention.q)
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [list(out.outputs[0].token_ids) for out in found] == expected
