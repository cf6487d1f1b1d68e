"""Log-probabilities of what was generated, of the prompt, and of the whole vocabulary."""

import math

from duetto import LLM, SamplingParams

llm = LLM(
    "checkpoints/demo",
    max_model_len=256,
    max_num_seqs=8,
    block_size=16,
    max_num_batched_tokens=64,
    max_logprobs=-1,
)
(output,) = llm.generate(
    ["x = [1, 2, 3]\nprint("], SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=0)
)
completion = output.outputs[0]
for token, alternatives in zip(completion.token_ids, completion.logprobs or [], strict=True):
    shown = {entry.decoded_token: round(entry.logprob, 2) for entry in alternatives.values()}
    print(f"rank {alternatives[token].rank}: {shown}")
known = [entry for entry in output.prompt_logprobs or [] if entry is not None]
print("prompt:", len(known), "of", len(output.prompt_token_ids), "scored")
print("sum is cumulative_logprob:", math.isclose(
    sum(e[t].logprob for t, e in zip(completion.token_ids, completion.logprobs or [], strict=True)),
    completion.cumulative_logprob or 0.0, abs_tol=1e-6,
))  # fmt: skip

everything = SamplingParams(temperature=0, max_tokens=1, logprobs=-1)
(entry,) = llm.generate("x = ", everything)[0].outputs[0].logprobs or []
print("whole vocabulary:", len(entry), round(sum(math.exp(e.logprob) for e in entry.values()), 3))
