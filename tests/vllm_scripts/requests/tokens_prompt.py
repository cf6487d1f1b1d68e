"""Prompts as token ids, made by the model's own tokenizer."""

from duetto import LLM, SamplingParams, TextPrompt, TokensPrompt

llm = LLM("checkpoints/demo", max_model_len=256, max_num_seqs=8, block_size=16, max_num_batched_tokens=64)
tokenizer = llm.get_tokenizer()
assert tokenizer is not None
text = "def add(a, b):"
ids = tokenizer.encode(text)
params = SamplingParams(temperature=0.0, max_tokens=5, detokenize=True)
outputs = llm.generate(
    [
        TextPrompt(prompt=text),
        TokensPrompt(prompt_token_ids=ids),
        {"prompt_token_ids": ids, "prompt": "as named"},
    ],
    params,
)
print("same:", len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1, [o.prompt for o in outputs])
print("ids:", outputs[1].prompt_token_ids == ids, tokenizer.decode(ids) == text)
messages = [{"role": "user", "content": "Sort a list."}]
rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
print("chat:", llm.chat(messages, params)[0].prompt == rendered)
