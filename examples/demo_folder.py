"""Write a trained decoder as a Hugging Face folder: weights, sizes, tokenizer and generation defaults."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
from demo_corpus import END
from tokenizers import Tokenizer

from duetto.checkpoints.huggingface import save_hf
from duetto.model.config import ModelConfig
from duetto.model.transformer import Decoder

# A base model has no chat format: a user's words become a comment, and what follows it is the reply.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}\n"
    "{% else %}# {{ message['content'] | replace('\n', '\n# ') }}\n{% endif %}"
    "{% endfor %}"
)

# Greedy text of a model this small repeats itself.
DRAWN = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}


def rounded(params: Decoder) -> Decoder:
    """Return the parameters that the file will hold, as float32: every figure is measured on these."""
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)


def write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_folder(out: Path, config: ModelConfig, params: Decoder, tokenizer: Tokenizer) -> None:
    """Write the folder that duetto and Transformers load, with weights in bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    end = tokenizer.token_to_id(END)
    save_hf(out, config, params, jnp.bfloat16)
    raw = json.loads((out / "config.json").read_text(encoding="utf-8"))
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    write_json(out / "config.json", raw | ids)
    write_json(out / "generation_config.json", ids | DRAWN)
    tokenizer.save(str(out / "tokenizer.json"))
    names = {"bos_token": END, "eos_token": END, "pad_token": END, "add_bos_token": False}
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": config.max_position,
            "chat_template": CHAT_TEMPLATE,
            **names,
        },
    )
