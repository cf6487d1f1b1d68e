"""Requests without a seed of their own: the engine's decides, and each gets other tokens."""

from duetto import LLM, SamplingParams

PARAMS = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)


def run(seed: int) -> list[tuple[int, ...]]:
    llm = LLM(
        "checkpoints/demo",
        max_model_len=256,
        max_num_seqs=8,
        block_size=16,
        max_num_batched_tokens=64,
        seed=seed,
    )
    return [tuple(o.outputs[0].token_ids) for o in llm.generate(["def f("] * 3, PARAMS, use_tqdm=False)]


first = run(1)
print("different draws:", len(set(first)) == 3)
print("same engine seed:", run(1) == first, "another:", run(2) == first)
