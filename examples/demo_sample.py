"""Sample text from a demo model without a KV cache: the whole forward pass for every token."""

import ast
from functools import partial

import jax
import jax.numpy as jnp
from demo_fit import logits
from tokenizers import Tokenizer

from duetto.model.config import ModelConfig
from duetto.model.transformer import Decoder


@partial(jax.jit, static_argnums=(1, 3))
def extend(
    params: Decoder, config: ModelConfig, tokens: jax.Array, end: int, length: jax.Array, draw: tuple
) -> jax.Array:
    """Return rows of tokens [B,T], each filled from its `length` [B] to the end of the row.

    `draw` is (key, temperature); temperature 0 is greedy. After `end` a row holds only `end`.
    """
    key, temperature = draw
    rows = jnp.arange(tokens.shape[0])

    def put(t: jax.Array, tokens: jax.Array) -> jax.Array:
        scores = logits(params, config, tokens)[:, t - 1]
        noise = jax.random.gumbel(jax.random.fold_in(key, t), scores.shape)
        chosen = jnp.argmax(scores + temperature * noise, axis=-1).astype(tokens.dtype)
        ended = (tokens[rows, t - 1] == end) & (t > length)
        return tokens.at[:, t].set(jnp.where(t < length, tokens[:, t], jnp.where(ended, end, chosen)))

    return jax.lax.fori_loop(jnp.min(length), tokens.shape[1], put, tokens)


def complete(
    model: tuple[ModelConfig, Decoder],
    tokenizer: Tokenizer,
    prompts: list[str],
    count: int,
    temperature: float,
    seed: int = 0,
) -> list[str]:
    """Return the continuation of each prompt, at most `count` tokens, sampled with one seed."""
    config, params = model
    ids, end = [e.ids for e in tokenizer.encode_batch(prompts)], 0
    length = jnp.array([len(i) for i in ids])
    rows = jnp.array([i + [end] * (max(map(len, ids)) + count - len(i)) for i in ids])
    filled = extend(params, config, rows, end, length, (jax.random.key(seed), temperature)).tolist()
    return [tokenizer.decode(row[len(i) : len(i) + count]) for i, row in zip(ids, filled, strict=True)]


def parses(line: str) -> bool:
    """Return whether the line, as the head of a function, is Python."""
    try:
        ast.parse(f"def{line}\n    pass")
    except (SyntaxError, ValueError):
        return False
    return True


def definitions(
    model: tuple[ModelConfig, Decoder], tokenizer: Tokenizer, prompt: str, count: int, seed: int = 0
) -> list[str]:
    """Sample `count` continuations of a prompt that ends in `def`, at temperature 1, and return the rest of
    each first line."""
    texts = complete(model, tokenizer, [prompt] * count, 32, temperature=1.0, seed=seed)
    space = prompt[len(prompt.rstrip(" ")) :]
    return [space + text.split("\n", 1)[0] for text in texts]
