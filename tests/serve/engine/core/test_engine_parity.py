"""Model families through the engine, in pages, chunks and batches, against what Transformers computed for the
same checkpoints."""

import pytest
from cases.compare import log_softmax
from cases.families.golden import case_folder, prompts

from duetto import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, logprobs=8, ignore_eos=True)


# One of each way that the cache or the positions matter: the other families differ in names and fields only.
@pytest.mark.full
@pytest.mark.parametrize("name", ["mistral", "gemma2", "phi3", "deepseek_v3", "gpt_oss", "gpt2"])
def test_engine_equals_transformers(name, tmp_path):
    """Pages of 4 tokens, so that windows of 4 to 11 leave pages behind, and a prompt of 23 in two chunks."""
    golden = case_folder(name, tmp_path)
    options = {"max_num_seqs": 4, "max_prefill_tokens": 16, "page_size": 4, "compilation_cache": None}
    with LLM(tmp_path, dtype="float32", max_model_len=32, **options) as llm:
        outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
        again = llm.generate(prompts(), GREEDY, use_tqdm=False)
        assert llm.engine.tables.occupancy == 0
    for output, logits, greedy in zip(outputs, golden["logits"], golden["greedy"], strict=True):
        completion = output.outputs[0]
        assert list(completion.token_ids) == greedy
        expected = log_softmax(logits)
        for token, found in completion.logprobs[0].items():
            assert abs(found.logprob - expected[token]) < 5e-4
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in outputs]
    assert sum(o.num_cached_tokens for o in again) > 0
