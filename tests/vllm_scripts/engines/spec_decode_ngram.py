"""Tokens guessed from the text so far: the same answers, in fewer steps."""

from duetto import LLM, SamplingParams
from duetto.v1.metrics.reader import Counter, Vector

PROMPT = "a = load(first)\nb = load(second)\na = load(first)\nb = load("
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SIZES = {"max_model_len": 256, "max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 64}


def main():
    plain = LLM(model="checkpoints/demo", **SIZES).generate(PROMPT, PARAMS)[0]
    llm = LLM(
        model="checkpoints/demo",
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 1,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        },
        disable_log_stats=False,
        **SIZES,
    )
    outputs = llm.generate([{"prompt": PROMPT, "multi_modal_data": None}], sampling_params=PARAMS)
    print("same tokens:", outputs[0].outputs[0].token_ids == plain.outputs[0].token_ids)
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_num_"):
            assert isinstance(metric, Counter | Vector)
            print(metric.name, metric.value if isinstance(metric, Counter) else metric.values)


if __name__ == "__main__":
    main()
