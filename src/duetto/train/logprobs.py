"""Log-probabilities of given texts, with the bits that an engine reports when it samples them.

Reinforcement learning compares the trainer's log-probabilities with the sampler's. In other systems they
differ, since the two add up numbers in other orders.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..checkpoints.nnx import params_from_state
from ..model.config import ModelConfig
from ..model.transformer import Decoder
from .checks import cast_params, check_dtypes, check_prompt_lengths, check_texts, find_kernel_isa
from .scoring import ScoredTexts, Temperature, score_by_kernels, score_by_xla

Score = Callable[[Decoder, ModelConfig, ScoredTexts], Float[Array, " rows"]]


def token_logprobs(
    params: Any,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, " B"] | None = None,
    temperature: Temperature = 1.0,
    exact: bool = True,
) -> Float[Array, "B T-1"]:
    """Return the float32 log-probability of each token of texts after its first; 0 behind a text's end.

    The function is pure: it may be jitted, with `config` and `exact` static, differentiated by `params`, and
    rematerialised. Results have the bits that an engine on this device reports for the tokens that it
    samples: its "raw_logprobs" at temperature 1, and at another its "processed_logprobs", if nothing but the
    temperature changes the logits.

    params: a decoder's arrays, or a state as in `params_from_state`, in the engine's dtype.
    tokens: texts, padded on the right with anything.
    lengths: number of tokens of each text; None: all are real.
    temperature: divisor of the logits, of all texts or of each.
    exact: False computes by XLA's own products, with other bits.

    Raises ValueError for a parameter, shape, token, length or temperature that is not allowed, and, if
    `exact`, where an engine's bits cannot be had.
    """
    decoder = params_from_state(config, params)
    check_dtypes(config, decoder)
    score = partial(score_by_kernels, isa=find_kernel_isa(config, decoder)) if exact else score_by_xla
    served = ServedModel(config, decoder.embed.dtype, score)
    return served.compute(jax.tree.map(jnp.asarray, decoder), tokens, lengths, temperature)


@dataclass(frozen=True)
class ServedModel:
    """A model as an engine computes it.

    dtype: dtype of the computation.
    score: computes the log-probability of each target of texts: `score_by_xla`, or with an engine's bits
    `score_by_kernels` or `EngineSteps.score`.
    """

    config: ModelConfig
    dtype: Any
    score: Score

    def token_logprobs(
        self,
        params: Any,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"] | None = None,
        temperature: Temperature = 1.0,
        prompt_lengths: Int[Array, " B"] | None = None,
    ) -> Float[Array, "B T-1"]:
        """Return log-probabilities as the function `token_logprobs`, from parameters of any float dtype.

        prompt_lengths: number of tokens of each text that the engine read as its prompt. Only a replay needs
        them.
        """
        decoder = cast_params(self.config, params, self.dtype)
        return self.compute(decoder, tokens, lengths, temperature, prompt_lengths)

    def compute(
        self,
        decoder: Decoder,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"] | None,
        temperature: Temperature,
        prompt_lengths: Int[Array, " B"] | None = None,
    ) -> Float[Array, "B T-1"]:
        """Return log-probabilities from parameters in the dtype of the computation."""
        tokens, lengths = check_texts(self.config, tokens, lengths, temperature)
        prompt_lengths = check_prompt_lengths(prompt_lengths, tokens)
        texts = ScoredTexts.from_tokens(tokens, lengths, temperature, prompt_lengths)
        logprobs = self.score(decoder, self.config, texts)
        is_scored = jnp.arange(1, tokens.shape[1])[None] < lengths[:, None]
        return jnp.where(is_scored, logprobs.reshape(is_scored.shape), 0.0)
