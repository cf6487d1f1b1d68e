"""Processed log-probabilities have the same bits alone, beside others, in chunks and through preemption."""

import pytest
from cases.invariance import PARAMS, bits, prompts
from suite.fixtures import with_few_shapes
from suite.marks import full

FEW_PAGES = {"max_batched_token_mem": 320, "page_size": 16, "max_prefill_tokens": 32}


@pytest.mark.parametrize("model", ["tiny", full("bfloat16")], indirect=True, scope="session")
def test_processed_logprobs_do_not_depend_on_neighbours(model, serve, expected):
    """The tokens are those of the raw mode, and so are the numbers of greedy requests without edits."""
    texts, alone = prompts(model.config.vocab_size), []
    mode = {"logprobs_mode": "processed_logprobs", "decode_steps": 1}
    with with_few_shapes(), serve(**mode) as llm:
        for text, params in zip(texts, PARAMS, strict=True):
            alone += [bits(o) for o in llm.generate(text, params, use_tqdm=False)]
            llm.engine.tables.reset_prefix_cache()
        assert [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)] == alone
    with with_few_shapes(), serve(**FEW_PAGES | mode) as llm:
        assert [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)] == alone
        assert llm.report()["preemptions"] > 0
    for params, found, raw in zip(PARAMS, alone, expected, strict=True):
        assert [token for token, *_ in found] == [token for token, *_ in raw]
        assert (found == raw) == params.greedy
