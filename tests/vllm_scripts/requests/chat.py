"""Reply to one conversation, then to several at once, with a template of the script's own for the last."""

from duetto import LLM, RequestOutput, SamplingParams

TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"


def show(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        print(f"prompt {output.prompt!r}, reply {output.outputs[0].text!r}")


def main():
    llm = LLM("checkpoints/demo", max_model_len=256, max_num_seqs=8, block_size=16, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0.3, seed=1, max_tokens=8)
    conversation = [
        {"role": "system", "content": "You write Python."},
        {"role": "user", "content": "Sort a list."},
        {"role": "assistant", "content": "values.sort()"},
        {"role": "user", "content": "Reverse it."},
    ]
    show(llm.chat(conversation, params, use_tqdm=False))
    show(llm.chat([conversation[:2], conversation], sampling_params=params))
    show(llm.chat([conversation], params, chat_template=TEMPLATE, add_generation_prompt=False))


if __name__ == "__main__":
    main()
