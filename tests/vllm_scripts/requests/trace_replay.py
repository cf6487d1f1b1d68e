"""A known answer is fed token by token: the model scores it and chooses nothing."""

from duetto import LLM, SamplingParams

SIZES = {"max_model_len": 256, "max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 64}
PROMPT = "def area(width, height):\n"


def main():
    llm = LLM(model="checkpoints/demo", enable_trace_replay=True, **SIZES)
    params = SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True, logprobs=1)
    first = llm.generate([PROMPT], sampling_params=params)[0].outputs[0]
    params = SamplingParams(trace_decode_token_ids=first.token_ids, logprobs=5)
    second = llm.generate([PROMPT], sampling_params=params)[0].outputs[0]
    print("same tokens:", second.token_ids == first.token_ids, "same text:", second.text == first.text)
    pairs = zip(second.token_ids, second.logprobs, first.logprobs, strict=True)
    print("same scores:", all(new[token] == old[token] for token, new, old in pairs))


if __name__ == "__main__":
    main()
