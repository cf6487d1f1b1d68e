"""Options that many scripts carry along, at values that ask for nothing."""

import gc

from duetto import LLM, SamplingParams

llm = LLM(
    model="checkpoints/demo", tokenizer_mode="auto", trust_remote_code=True, dtype="auto", seed=None,
    max_model_len=256, max_num_seqs=8, block_size=16, max_num_batched_tokens=64,
    gpu_memory_utilization=0.5, swap_space=4, cpu_offload_gb=0, enforce_eager=True,
    enable_chunked_prefill=False, enable_prefix_caching=None,
    disable_custom_all_reduce=True, distributed_executor_backend="mp", enable_lora=False, max_lora_rank=8,
    load_format="auto", kv_cache_dtype="auto", hf_overrides=None, runner="generate", async_scheduling=True,
    compilation_config={"level": 0}, limit_mm_per_prompt={"image": 1}, disable_log_stats=True,
)  # fmt: skip
params = SamplingParams.from_optional(
    n=None, temperature=0.0, max_tokens=4, structured_outputs=None, extra_args=None
)
outputs = llm.generate(["def f("], params, lora_request=None, use_tqdm=False)
print(outputs[0].outputs[0].text)
try:
    LLM(model="checkpoints/demo", max_model_length=128)
except TypeError as error:
    print("refused:", error)
del llm
gc.collect()
