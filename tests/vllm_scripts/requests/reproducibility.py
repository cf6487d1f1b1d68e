"""The same seed, the same tokens: in another order, beside others, and in another engine."""

import os
import random

from duetto import LLM, SamplingParams

os.environ["VLLM_BATCH_INVARIANT"] = "1"  # it is the default here
SIZES = {"max_model_len": 256, "max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 64}
PROMPTS = ["def f(", "import os", "class A", "x = "]


def tokens(llm: LLM, prompts: list[str]) -> dict[str | None, list[int]]:
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=8)
    return {o.prompt: o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)}


def main():
    llm = LLM(model="checkpoints/demo", seed=0, **SIZES)
    first = tokens(llm, PROMPTS)
    shuffled = random.Random(1).sample(PROMPTS, len(PROMPTS))
    print("another order:", tokens(llm, shuffled) == first)
    print("alone:", {p: tokens(llm, [p])[p] for p in PROMPTS} == first)
    del llm
    again = LLM(model="checkpoints/demo", seed=7, **SIZES)
    print("another engine:", tokens(again, PROMPTS) == first)


if __name__ == "__main__":
    main()
