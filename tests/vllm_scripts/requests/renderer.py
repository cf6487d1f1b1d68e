"""Prompts and conversations become token ids before they are submitted."""

from duetto import LLM, SamplingParams
from duetto.renderers import ChatParams
from duetto.renderers.inputs.preprocess import parse_model_prompt

PARAMS = SamplingParams(temperature=0.0, max_tokens=5)
SIZES = {"max_model_len": 256, "max_num_seqs": 8, "block_size": 16, "max_num_batched_tokens": 64}

llm = LLM(model="checkpoints/demo", tokenizer_mode="slow", config_format="mistral", load_format="hf", **SIZES)
prompt = parse_model_prompt(llm.llm_engine.model_config, "import sys\n")
kwargs = llm.renderer.default_cmpl_tok_params.with_kwargs(add_special_tokens=False)
(rendered,) = llm.renderer.render_cmpl([prompt], kwargs)
tokenizer = llm.get_tokenizer()
assert tokenizer is not None
print("ids:", rendered["prompt_token_ids"] == tokenizer.encode(prompt, add_special_tokens=False))
outputs = llm.generate(rendered, PARAMS), llm.generate(prompt, PARAMS)
print("same:", outputs[0][0].outputs == outputs[1][0].outputs, repr(outputs[0][0].prompt))

talk = [{"role": "user", "content": "Name a list."}]
template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
_, rendered = llm.renderer.render_chat([talk, talk], ChatParams(chat_template=template))
replies = llm.generate(rendered, PARAMS)
print("chat:", replies[1].outputs == llm.chat(talk, PARAMS, chat_template=template)[0].outputs)
