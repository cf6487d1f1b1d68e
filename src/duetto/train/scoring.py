"""Scores of whole texts: by XLA, and by the CPU kernels of an engine."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..model.attention import causal
from ..model.config import ModelConfig
from ..model.transformer import Decoder, compute_logits, finish_logits, forward, multiply_head
from ..sampling.processors import scale_by_temperature
from ..sampling.sample import score_tokens
from .attend import TrainableAttend
from .checks import explain_length, explain_placement, require_exact
from .tiles import ROW_TILE, map_row_tiles
from .weights import make_trainable, wrap_experts

Temperature = float | Float[Array, ""] | Float[Array, " B"]


class ScoredTexts(NamedTuple):
    """Texts without their last token, and what is scored after each token.

    inputs: int32 [B,T].
    positions: int32 [B,T].
    lengths: int32 [B], number of tokens that are read of each text.
    targets: int32 [B*T], next token of each.
    temperatures: float32 [B*T].
    prompt_lengths: int32 [B], number of tokens that are read of each text's prompt; None: not known.
    """

    inputs: Any
    positions: Any
    lengths: Any
    targets: Any
    temperatures: Any
    prompt_lengths: Any = None

    @classmethod
    def from_tokens(
        cls,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        temperature: Temperature,
        prompt_lengths: Int[Array, " B"] | None,
    ) -> "ScoredTexts":
        """Return the texts with these tokens and lengths, at a temperature of all or of each."""
        inputs = tokens[:, :-1]
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1], dtype=jnp.int32)[None], inputs.shape)
        by_text = jnp.asarray(temperature, jnp.float32).reshape(-1, 1)
        temperatures = jnp.broadcast_to(by_text, inputs.shape).reshape(-1)
        read = jnp.minimum(lengths, inputs.shape[1])
        prompts = None if prompt_lengths is None else jnp.minimum(prompt_lengths, read)
        return cls(inputs, positions, read, tokens[:, 1:].reshape(-1), temperatures, prompts)


def score_by_xla(decoder: Decoder, config: ModelConfig, texts: ScoredTexts) -> Float[Array, " rows"]:
    """Compute log-probabilities by XLA's own products."""
    decoder = wrap_experts(decoder, "")
    hidden, _ = forward(decoder, config, texts.inputs, texts.positions, causal)
    logits = compute_logits(decoder, config, hidden.reshape(-1, hidden.shape[-1]))
    return score_plainly(logits, texts.targets, texts.temperatures)


def score_by_kernels(
    decoder: Decoder, config: ModelConfig, texts: ScoredTexts, isa: str
) -> Float[Array, " rows"]:
    """Compute log-probabilities by the CPU kernels of an engine.

    Products, norms and attention are its own, each with the derivative of what XLA would compute in its
    place. XLA computes the rest, number by number, or in tiles of few rows where its bits depend on shapes.
    Raises ValueError where these are not an engine's bits.
    """
    require_exact(explain_placement(decoder) or explain_length(config, texts.inputs.shape[1] + 1))
    decoder, attend = make_trainable(decoder, isa), TrainableAttend(texts.lengths, isa)
    hidden, _ = forward(decoder, config, texts.inputs, texts.positions, attend)
    products = multiply_head(decoder, hidden.reshape(-1, hidden.shape[-1]))
    return score_rows(config, ROW_TILE, products, decoder.head_bias, texts.targets, texts.temperatures)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def score_rows(
    config: ModelConfig,
    row_tile: int,
    products: Float[Array, "rows V"],
    bias: Float[Array, " V"] | None,
    targets: Int[Array, " rows"],
    temperature: Float[Array, " rows"],
) -> Float[Array, " rows"]:
    """Return the log-probability of each row's target, as the sampler scores it, from products with the
    output matrix. Rows are scored `row_tile` at a time, and from logits in memory, as in a step: XLA's
    exponentials have other bits in arrays of other shapes, and in other fusions."""

    def score_tile(tile: Any) -> Float[Array, " rows"]:
        logits, targets, temperature = tile
        return score_tokens(scale_by_temperature(logits, temperature), targets, 1).logprob

    logits = map_row_tiles(lambda tile: finish_logits(config, tile, bias), products, row_tile)
    return map_row_tiles(score_tile, (logits, targets, temperature), row_tile)


def _score_backward(config: ModelConfig, row_tile: int, operands: Any, g: Any) -> Any:
    products, bias, targets, temperature = operands

    def score(products: Any, bias: Any) -> Float[Array, " rows"]:
        return score_plainly(finish_logits(config, products, bias), targets, temperature)

    return *jax.vjp(score, products, bias)[1](g), None, None


score_rows.defvjp(
    lambda config, row_tile, *operands: (score_rows(config, row_tile, *operands), operands), _score_backward
)


def score_plainly(
    logits: Float[Array, "rows V"], targets: Int[Array, " rows"], temperature: Float[Array, " rows"]
) -> Float[Array, " rows"]:
    """Return the log-probability of each row's target: the function that is differentiated."""
    logprobs = jax.nn.log_softmax(scale_by_temperature(logits, temperature))
    return jnp.take_along_axis(logprobs, targets[:, None], axis=1)[:, 0]
