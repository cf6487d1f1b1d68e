"""Continue a few prompts."""

from duetto import LLM, SamplingParams

prompts = ["def area(width, height):", "import os\n", "class Stack:\n    def push(self,", "for line in"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=12)


def main():
    llm = LLM(
        model="checkpoints/demo", max_model_len=256, max_num_seqs=8, block_size=16, max_num_batched_tokens=64
    )
    for output in llm.generate(prompts, sampling_params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r} ({output.outputs[0].finish_reason})")


if __name__ == "__main__":
    main()
