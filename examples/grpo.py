"""Train a small model by group relative policy optimisation (GRPO; DeepSeekMath, arXiv 2402.03300), with the
sampler's bits: the vowels of an answer are rewarded.

    python examples/grpo.py [float32 | bfloat16]

Every round samples a group of answers to each prompt, and takes two steps up the clipped objective of PPO.
The weights are masters in float32, served in either dtype. `LLM.logprobs_fn` computes what the sampler
reports, so in the first of the two steps every ratio of probabilities is exactly 1. It passes no lengths of
prompts, so it needs a CPU with duetto's kernels.
"""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from duetto import LLM, RequestOutput, SamplingParams
from duetto.model.config import ModelConfig
from duetto.model.transformer import decoder_spec
from duetto.model.tree import init_params

CONFIG = ModelConfig.uniform(
    vocab_size=128,
    hidden_size=64,
    ffn_size=160,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    max_position=64,
)
PROMPTS = [list(text) for text in (b"Say: ", b"Sing a song: ", b"Spell: ", b"O ")]
GROUP, ANSWER, ROUNDS, EPOCHS = 8, 16, 30, 2  # answers of a prompt, their tokens
VOWELS, CLIP = list(b"aeiou"), 0.2
OPTIMISER = optax.adam(3e-3)


class Rollout(NamedTuple):
    """Sampled texts, padded on the right.

    old: the sampler's log-probabilities of the tokens of answers.
    """

    texts: jax.Array  # [B,T]
    lengths: jax.Array  # [B]
    old: jax.Array  # [B,T-1], of each token after the first
    is_answer: jax.Array  # [B,T-1]
    rewards: jax.Array  # [B], share of vowels


def read_rollout(outputs: list[RequestOutput]) -> Rollout:
    """Return the answers of all groups as arrays, one row each."""
    answers = [(prompt, each) for prompt, o in zip(PROMPTS, outputs, strict=True) for each in o.outputs]
    B, T = len(answers), max(map(len, PROMPTS)) + ANSWER
    texts, lengths, old = np.zeros((B, T), np.int32), np.zeros(B, np.int32), np.zeros((B, T - 1), np.float32)
    is_answer, rewards = np.zeros((B, T - 1), bool), np.zeros(B, np.float32)
    for i, (prompt, each) in enumerate(answers):
        start, lengths[i] = len(prompt), len(prompt) + len(each.token_ids)
        texts[i, : lengths[i]] = [*prompt, *each.token_ids]
        is_answer[i, start - 1 : lengths[i] - 1] = True
        old[i, is_answer[i]] = each.logprob_array
        rewards[i] = np.isin(each.token_ids, VOWELS).mean()
    return Rollout(*map(jnp.asarray, (texts, lengths, old, is_answer, rewards)))


def group_advantages(rewards: jax.Array) -> jax.Array:
    """Return how many standard deviations of its group each reward is above the group's mean, [B]."""
    groups = rewards.reshape(-1, GROUP)
    above = groups - groups.mean(axis=1, keepdims=True)
    return (above / (groups.std(axis=1, keepdims=True) + 1e-6)).reshape(-1)


def make_train_step(logprobs: Callable[..., jax.Array]) -> Callable[..., tuple[Any, Any, jax.Array]]:
    """Return a compiled step of GRPO: from masters, optimiser state and rollout to new masters, new state,
    and the log of each ratio [B,T-1] before the step."""

    def loss(masters: Any, rollout: Rollout) -> tuple[jax.Array, jax.Array]:
        new = logprobs(masters, rollout.texts, rollout.lengths)
        log_ratios = jnp.where(rollout.is_answer, new - rollout.old, 0.0)
        ratios, advantages = jnp.exp(log_ratios), group_advantages(rollout.rewards)[:, None]
        clipped = jnp.clip(ratios, 1 - CLIP, 1 + CLIP)
        gains = jnp.minimum(ratios * advantages, clipped * advantages)
        return -jnp.mean(gains, where=rollout.is_answer), log_ratios

    @jax.jit
    def train_step(masters: Any, state: Any, rollout: Rollout) -> tuple[Any, Any, jax.Array]:
        gradients, log_ratios = jax.grad(loss, has_aux=True)(masters, rollout)
        updates, state = OPTIMISER.update(gradients, state, masters)
        return optax.apply_updates(masters, updates), state, log_ratios

    return train_step


def train(dtype: str = "float32", rounds: int = ROUNDS) -> tuple[list[float], np.ndarray]:
    """Train a model served in a dtype. Returns the mean reward of each round, and the logs of the ratios of
    each round's first step [rounds, B, T-1]: the trainer's log-probabilities minus the sampler's."""
    masters: Any = init_params(jax.random.key(0), decoder_spec(CONFIG))
    state, rewards, first = OPTIMISER.init(masters), [], []
    asked = SamplingParams(n=GROUP, temperature=1.0, max_tokens=ANSWER, logprobs=0, ignore_eos=True)
    served = jax.tree.map(lambda x: x.astype(dtype), masters)
    sizes: dict[str, Any] = {
        "max_num_seqs": GROUP * len(PROMPTS),
        "max_model_len": 64,
        "max_prefill_tokens": 16,
    }
    with LLM.from_params(CONFIG, served, cpu_kernels=True, **sizes) as llm:
        train_step = make_train_step(llm.logprobs_fn())
        for _ in range(rounds):
            rollout = read_rollout(llm.generate(PROMPTS, asked, use_tqdm=False))
            for epoch in range(EPOCHS):
                masters, state, log_ratios = train_step(masters, state, rollout)
                if epoch == 0:
                    first.append(np.asarray(log_ratios))
            rewards.append(float(rollout.rewards.mean()))
            llm.update_params(masters)
    return rewards, np.stack(first)


if __name__ == "__main__":
    dtype = (sys.argv[1:] or ["float32"])[0]
    rewards, log_ratios = train(dtype)
    ratios = np.exp(log_ratios)
    print(f"{dtype}: vowels are {rewards[0]:.2f} of the tokens at first, {rewards[-1]:.2f} in the last round")
    print(f"trainer beside sampler: log-probabilities at most {np.abs(log_ratios).max():.1e} apart")
    print(f"ratios of the first step of each round: {ratios.min():.7f} to {ratios.max():.7f}")
