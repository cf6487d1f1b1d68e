"""Train a small model by reinforcement learning (REINFORCE, Williams 1992): each vowel of an output is
rewarded.

    python examples/reinforce.py

Every round samples answers with their log-probabilities, takes a step up the reward with the library's own
pure functions, and serves the new weights by `update_params`, which neither copies nor compiles. The trainer
reads a whole text at once and has no cache: its log-probabilities are computed by other products than
those of decode, and the last bits differ. `LLM.log_likelihood(..., by="decode")` gives the bits of sampling;
`examples/grpo.py` trains with them.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from duetto import LLM, RequestOutput, SamplingParams
from duetto.model.attention import causal
from duetto.model.config import ModelConfig
from duetto.model.transformer import compute_logits, decoder_spec, forward
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
PROMPT, ANSWER, ROWS, ROUNDS = list(b"Say: "), 16, 16, 30
VOWELS = jnp.zeros(CONFIG.vocab_size).at[jnp.array(list(b"aeiou"))].set(1.0)
OPTIMISER = optax.adam(3e-3)


def answer_logprobs(params: Any, texts: jax.Array) -> jax.Array:
    """Log-probabilities [B,ANSWER] of the answers in texts [B,T]."""
    inputs = texts[:, :-1]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32)[None], inputs.shape)
    hidden, _ = forward(params, CONFIG, inputs, positions, causal)
    scores = jax.nn.log_softmax(compute_logits(params, CONFIG, hidden).astype(jnp.float32))
    own = jnp.take_along_axis(scores, texts[:, 1:, None], axis=2)[:, :, 0]
    return own[:, -ANSWER:]


@jax.jit
def train_step(params: Any, state: optax.OptState, texts: jax.Array) -> tuple[Any, optax.OptState, Any]:
    """Take a step of REINFORCE. Returns parameters, optimizer state, and the scores before the step. The
    served parameters are not donated."""
    rewards = VOWELS[texts[:, -ANSWER:]]
    advantages = rewards - rewards.mean()

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        scores = answer_logprobs(params, texts)
        return -jnp.mean(advantages * scores), scores

    (_, scores), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    updates, state = OPTIMISER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, scores


def scores_of(outputs: list[RequestOutput]) -> np.ndarray:
    """Return the reported log-probabilities of the sampled tokens, [B,ANSWER]."""
    found = [zip(o.outputs[0].token_ids, o.outputs[0].logprobs or [], strict=True) for o in outputs]
    return np.array([[at[token].logprob for token, at in own] for own in found])


def reinforce(rounds: int = ROUNDS) -> tuple[list[float], float, bool]:
    """Train a model. Returns the mean reward of each round, the largest difference between the trainer's
    log-probabilities and the sampler's, and whether those that `log_likelihood(by="decode")` computes for the
    last answers have the sampler's bits."""
    params: Any = init_params(jax.random.key(0), decoder_spec(CONFIG))
    state, rewards, apart = OPTIMISER.init(params), [], 0.0
    asked = SamplingParams(temperature=1.0, max_tokens=ANSWER, logprobs=0, ignore_eos=True)
    sample = partial(LLM.generate, prompts=[PROMPT] * ROWS, sampling_params=asked, use_tqdm=False)
    with LLM.from_params(CONFIG, params, max_num_seqs=ROWS, max_model_len=64, max_prefill_tokens=16) as llm:
        for _ in range(rounds):
            outputs = sample(llm)
            texts = jnp.asarray([[*PROMPT, *o.outputs[0].token_ids] for o in outputs], jnp.int32)
            params, state, scores = train_step(params, state, texts)
            apart = max(apart, float(np.abs(np.asarray(scores) - scores_of(outputs)).max()))
            rewards.append(float(VOWELS[texts[:, -ANSWER:]].mean()))
            llm.update_params(params)
        outputs = sample(llm)
        given = [o.outputs[0].token_ids for o in outputs[:2]]
        again = llm.log_likelihood([PROMPT] * 2, given, by="decode")
        equal = bool((np.array([x.logprobs for x in again]) == scores_of(outputs[:2])).all())
        print(f"{bytes(given[0]).decode('latin-1')!r} after {outputs[0].outputs[0].weights}")
    return rewards, apart, equal


if __name__ == "__main__":
    rewards, apart, equal = reinforce()
    print(f"vowels: {rewards[0]:.2f} of the tokens in the first round, {rewards[-1]:.2f} in the last")
    print(f"log-probabilities: trained beside sampled {apart:.1e} apart; decoded again {equal and 'equal'}")
