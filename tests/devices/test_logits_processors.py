"""Logits processors of users over two devices give the tokens of one."""

import pytest
from cases.invariance import prompts
from cases.oracle import continue_plainly
from cases.processors import ASKED, PROCESSORS
from suite.marks import full

from duetto import LLM

OPTIONS = {"max_num_seqs": 8, "max_prefill_tokens": 64, "max_model_len": 256, "page_size": 16}


@pytest.mark.usefixtures("few_shapes")
@pytest.mark.parametrize("name", [full("tensor"), full("data"), "pipeline"])
def test_tokens_are_those_of_the_oracle(tiny, name):
    texts = prompts(tiny.config.vocab_size)
    expected = [continue_plainly(tiny, *asked, PROCESSORS) for asked in zip(texts, ASKED, strict=True)]
    own = OPTIONS | {f"{name}_parallel_size": 2, "logits_processors": PROCESSORS}
    with LLM.from_params(tiny.config, tiny.params, **own) as llm:
        outputs = llm.generate(texts, ASKED, use_tqdm=False)
        assert [list(out.outputs[0].token_ids) for out in outputs] == expected
        assert llm.report()["compilations"] == 0 and llm.get_world_size() == 2
