"""Rows beside a request under a grammar wait for no mask on several devices either, and keep their bits."""

from typing import Any

import numpy as np
import pytest
from cases.invariance import bits
from cases.text.letters import letters
from suite.marks import full
from tokenizers import AddedToken

from duetto import LLM, SamplingParams
from duetto.model.sharding import Layout
from duetto.sampling.structured import StructuredOutputsParams
from duetto.serve.engine.startup.mesh import shard_params
from duetto.serve.runtime.compiled import lowering
from duetto.serve.runtime.compiled.futures import PendingSample

END = 256  # behind the bytes
OPTIONS = {
    "max_num_seqs": 4, "max_prefill_tokens": 64, "max_model_len": 128, "page_size": 16, "decode_steps": 1,
}  # fmt: skip
SHAPED = {"structured_outputs": StructuredOutputsParams(regex=r"[a-f]{3}-[0-9]{20}"), "max_tokens": 12}
PARAMS = [
    SamplingParams(temperature=1.2, seed=1, logprobs=1, **SHAPED),
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.2, seed=3, max_tokens=12, presence_penalty=0.3, logprobs=1),
    SamplingParams(temperature=0.0, logprobs=1, **SHAPED),
]
PROMPTS = [np.random.default_rng(i).integers(3, 250, n).tolist() for i, n in enumerate((5, 33, 64, 17))]


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize(
    "layout, options", [full(Layout(tensor=2), {}), (Layout(data=2), {"data_parallel_size": 2})]
)
def test_draws_that_wait_for_grammars_change_no_bit(one_layer, layout, options, monkeypatch):
    monkeypatch.setattr(lowering, "is_decode_split", lambda _: True)
    params, draws, draw = shard_params(one_layer.config, one_layer.params, layout), [], PendingSample.draw
    monkeypatch.setattr(PendingSample, "draw", lambda *given: draws.append(1) or draw(*given))
    own = {"eos_token_ids": [END], "tokenizer": letters(None, AddedToken("<end>", special=True))}
    with LLM.from_params(one_layer.config, params, **OPTIONS | own | options) as llm:

        def answered() -> list[Any]:
            llm.engine.tables.reset_prefix_cache()
            return [bits(out) for out in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]

        llm.engine.can_defer_sampling = False
        wanted = answered()
        assert not draws
        llm.engine.can_defer_sampling = True
        assert answered() == wanted == answered()
        assert draws and llm.report()["compilations"] == 0
