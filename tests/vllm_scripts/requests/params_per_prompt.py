"""Each prompt with parameters of its own, several completions of one, and what happens to the neighbours:
nothing."""

from duetto import LLM, SamplingParams

llm = LLM(
    model="checkpoints/demo",
    max_model_len=256,
    max_num_seqs=8,
    block_size=16,
    max_num_batched_tokens=64,
    seed=0,
)
prompts = ["def add(a, b):", "while True:", "print("]
params = [
    SamplingParams(temperature=0.0, max_tokens=5),
    SamplingParams(
        n=2, temperature=0.9, top_k=20, seed=3, presence_penalty=0.5, frequency_penalty=0.2, max_tokens=6
    ),
    SamplingParams(
        temperature=0.7, min_p=0.05, repetition_penalty=1.1, logit_bias={0: -100.0}, seed=4, min_tokens=3
    ),
]
together = llm.generate(prompts, params)
for output in together:
    print(output.prompt, [completion.text for completion in output.outputs])
alone = [llm.generate(prompt, p, use_tqdm=False)[0] for prompt, p in zip(prompts, params, strict=True)]
print(
    "as if alone:",
    [[c.token_ids for c in o.outputs] for o in together] == [[c.token_ids for c in o.outputs] for o in alone],
)
