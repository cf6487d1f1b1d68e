"""Where an output ends: strings, token ids, the model's end, the limit; and words that never come."""

from duetto import LLM, SamplingParams

llm = LLM(
    model="checkpoints/demo", max_model_len=256, max_num_seqs=8, block_size=16, max_num_batched_tokens=64
)
prompt = "def add(a, b):\n"
whole = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))[0].outputs[0]
middle = whole.text[len(whole.text) // 2 :][:3]
cut = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, stop=middle))[
    0
].outputs[0]
print("stopped:", cut.finish_reason, cut.stop_reason == middle, cut.text == whole.text.partition(middle)[0])
kept = SamplingParams(
    temperature=0, max_tokens=16, ignore_eos=True, stop=[middle], include_stop_str_in_output=True
)
print("kept:", llm.generate(prompt, kept)[0].outputs[0].text.endswith(middle))
token = whole.token_ids[5]
at = llm.generate(prompt, SamplingParams(temperature=0, stop_token_ids=[token], ignore_eos=True))[0].outputs[
    0
]
print("token:", at.finish_reason, at.stop_reason == token)
banned = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, bad_words=["return"])
print("banned:", "return" not in llm.generate(prompt, banned)[0].outputs[0].text)
