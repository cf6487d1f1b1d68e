"""Give the device's memory back for a while."""

from duetto import LLM, SamplingParams

llm = LLM(
    "checkpoints/demo",
    max_model_len=256,
    max_num_seqs=8,
    block_size=16,
    max_num_batched_tokens=64,
    enable_sleep_mode=True,
)
params = SamplingParams(temperature=0, max_tokens=6)
before = llm.generate("def open(", params)[0].outputs[0].text
for level in (0, 1):
    llm.sleep(level=level)
    print("sleeping:", llm.is_sleeping())
    llm.wake_up()
    print("as before:", llm.generate("def open(", params)[0].outputs[0].text == before)
