"""Train a small model with optax and sample from it after each round: trainer and engine use the same
arrays.

    python examples/sample_while_training.py

`update_params` neither copies nor compiles, so a sample takes only the time of its tokens. The train step
must not donate its parameters, because the engine still reads them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from duetto import LLM, SamplingParams
from duetto.model.attention import causal
from duetto.model.config import ModelConfig
from duetto.model.transformer import Decoder, compute_logits, decoder_spec, forward
from duetto.model.tree import init_params

TEXT = (
    b"Prefill reads the prompt at once, decode writes one token a step; both are one function of the "
    b"same cache. " * 8
)
CONFIG = ModelConfig.uniform(
    vocab_size=256,
    hidden_size=64,
    ffn_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    max_position=128,
)
ROWS, LENGTH = 16, 64
OPTIMISER = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 10, 400, 1e-3))


def loss(params: Decoder, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of tokens [B,T+1] after their predecessors."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32)[None], inputs.shape)
    hidden, _ = forward(params, CONFIG, inputs, positions, causal)
    logits = compute_logits(params, CONFIG, hidden)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


@partial(jax.jit, donate_argnums=1)
def train_step(
    params: Any, state: optax.OptState, tokens: jax.Array
) -> tuple[Any, optax.OptState, jax.Array]:
    value, gradients = jax.value_and_grad(loss)(params, tokens)
    updates, state = OPTIMISER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


def batch(draw: np.random.Generator) -> jax.Array:
    """Random windows of the text, as bytes."""
    starts = draw.integers(0, len(TEXT) - LENGTH - 1, ROWS)
    return jnp.asarray([list(TEXT[a : a + LENGTH + 1]) for a in starts], jnp.int32)


def train(rounds: int = 4, steps: int = 40) -> tuple[list[float], list[str]]:
    """Train, and after each round continue "Prefill"; returns the loss and the text of each round."""
    params: Any = init_params(jax.random.key(0), decoder_spec(CONFIG))
    state, draw = OPTIMISER.init(params), np.random.default_rng(0)
    losses = []
    texts = []
    value = jnp.inf
    greedy = SamplingParams(temperature=0.0, max_tokens=60)
    with LLM.from_params(CONFIG, params, max_num_seqs=1, max_model_len=128, max_prefill_tokens=16) as llm:
        for _ in range(rounds):
            for _ in range(steps):
                params, state, value = train_step(params, state, batch(draw))
            llm.update_params(params)
            written = llm.generate([list(b"Prefill")], greedy, use_tqdm=False)[0].outputs[0].token_ids
            losses.append(float(value))
            texts.append(bytes(written).decode("latin-1"))
            print(f"loss {losses[-1]:.3f}  Prefill{texts[-1]!r}")
    return losses, texts


if __name__ == "__main__":
    train()
