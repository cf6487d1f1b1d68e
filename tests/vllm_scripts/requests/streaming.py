"""Pieces as they are generated."""

from duetto import LLM, SamplingParams

llm = LLM("checkpoints/demo", max_model_len=256, max_num_seqs=8, block_size=16, max_num_batched_tokens=64)
params = SamplingParams(temperature=0.7, seed=5, max_tokens=10)
pieces = []
for piece in llm.stream("def count(words):", params):
    print(piece.text, end="", flush=True)
    pieces.append(piece.text)
print("\n---")
print(
    "whole:", "".join(pieces) == llm.generate("def count(words):", params, use_tqdm=False)[0].outputs[0].text
)
