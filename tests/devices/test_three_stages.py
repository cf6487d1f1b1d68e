"""A stage between two others."""

import jax
import pytest
from cases.invariance import PARAMS, prompts

from duetto import LLM
from duetto.kvcache.stages import pipeline_stages

pytestmark = pytest.mark.full

DEVICES = 3
OPTIONS = {"max_num_seqs": 8, "max_prefill_tokens": 64, "max_model_len": 256, "page_size": 16}


@pytest.mark.parametrize("model", ["windows"], indirect=True)
def test_tokens_are_those_of_the_oracle(model, oracle):
    assert jax.device_count() == 3
    plain, texts = oracle(model), prompts(model.config.vocab_size)
    expected = [plain(text, params) for text, params in zip(texts, PARAMS, strict=True)]
    for micro_batches in (1, 3):
        own = {"pipeline_parallel_size": 3, "micro_batches": micro_batches}
        with LLM.from_params(model.config, model.params, **OPTIONS, **own) as llm:
            assert [len(span) for span in pipeline_stages(llm.params)] == [1, 1, 1]
            outputs = llm.generate(texts, PARAMS, use_tqdm=False)
            assert [list(out.outputs[0].token_ids) for out in outputs] == expected
            assert len(llm.report()["stages"]["busy_seconds"]) == 3
