"""Weights of eight bits, and what is refused."""

from duetto import LLM, SamplingParams

SIZES = {"max_model_len": 256, "max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 64}
llm = LLM(model="checkpoints/demo", quantization="int8", dtype="half", **SIZES)
for output in llm.generate(["def f(", "import"], SamplingParams(temperature=0.0, max_tokens=5)):
    print(repr(output.outputs[0].text))
try:
    LLM(model="checkpoints/demo", quantization="bitsandbytes", **SIZES)
except ValueError as error:
    print("refused:", error)
