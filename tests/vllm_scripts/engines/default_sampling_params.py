"""Start from the model's own sampling parameters, and change some."""

from duetto import LLM


def main():
    llm = LLM(
        "checkpoints/demo",
        max_model_len=256,
        max_num_seqs=8,
        block_size=16,
        max_num_batched_tokens=64,
        generation_config="auto",
    )
    params = llm.get_default_sampling_params()
    params.max_tokens = 6
    params.temperature = 0.0
    quiet = params.clone()
    quiet.stop = ["\n"]
    for chosen in (params, quiet):
        (output,) = llm.generate("def read(path):", chosen, use_tqdm=False)
        print(f"{len(output.outputs[0].token_ids)} tokens, {output.outputs[0].text!r}")
    print("unchanged", params.stop, params.max_tokens)


if __name__ == "__main__":
    main()
