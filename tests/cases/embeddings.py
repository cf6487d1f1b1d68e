"""Embeddings of texts by an engine, and by the plainest means."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from duetto import LLM, PoolingParams
from duetto.model.attention import causal
from duetto.model.transformer import forward

WIDTH = 256  # tokens that a text is padded to


def embedded(llm: LLM, texts: list[list[int]]) -> list[list[float]]:
    """Of all texts at once, by the last hidden state and by the mean."""
    kinds = [PoolingParams(pooling=kind, normalize=False) for kind in ("last", "mean")]
    outputs = llm.embed(2 * texts, pooling_params=[k for k in kinds for _ in texts], use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


def embedded_plainly(params, config, texts: list[list[int]]) -> np.ndarray:
    """Likewise, each whole text forward."""
    states = [np.asarray(hidden(params, config, *padded(t)), np.float64)[: len(t)] for t in texts]
    return np.array([*(s[-1] for s in states), *(s.mean(axis=0) for s in states)])


def padded(text: list[int]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.zeros((1, WIDTH), np.int32)
    tokens[0, : len(text)] = text
    return tokens, np.full(1, len(text), np.int32)


@partial(jax.jit, static_argnames="config")
def hidden(params, config, tokens, length):
    places = jnp.arange(WIDTH, dtype=jnp.int32)[None]
    return forward(params, config, tokens, places, causal, None, length)[0][0]
