"""Small models whose layers CPU kernels compute, and texts that an engine has sampled from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from duetto import LLM, SamplingParams
from duetto.model.config import Dense, Experts, GroupedQuery, LayerInput, LayerKind, ModelConfig, NormKind
from duetto.model.rope import Rope
from duetto.model.transformer import Decoder, decoder_spec
from duetto.model.tree import init_params, is_spec

TINY = ModelConfig.uniform(300, 48, 80, 2, 4, 2, 16, 512)
NORMED = GroupedQuery(4, 2, 16, qk_norm=NormKind(), softcap=8.0, sinks=True, bias=True)
CHUNKED = GroupedQuery(
    4, 2, 16, Rope(kind="proportional", partial_rotary_factor=0.5), scale=1.0, window=24, chunked=True,
    qk_norm=NormKind(), norm_after_rope=True,
)  # fmt: skip
GAINLESS = NormKind(gain=False)
PLAIN = GroupedQuery(4, 2, 16, qk_norm=NormKind(), value_norm=GAINLESS)
GROWING = GroupedQuery(
    4, 2, 16, Rope(original_max_position=64, query_growth=0.3), qk_norm=GAINLESS, norm_after_rope=True,
    gated=True,
)  # fmt: skip
NORMED_EXPERTS = Experts(4, 2, 24, shared=40, norms=NormKind())
MODELS = {
    "dense": TINY,
    "windows": replace(
        TINY,
        layers=(
            LayerKind(replace(NORMED, window=20), Dense(80, "gelu_tanh")),
            LayerKind(NORMED, Experts(4, 2, 24, "clamped_silu", clamp=2.0, bias=True)),
        ),
        post_norms=True, tied_embeddings=False, logit_softcap=10.0,
    ),
    "experts": replace(
        TINY,
        layers=(
            LayerKind(
                GroupedQuery(4, 2, 16),
                Experts(8, 2, 24, groups=4, active_groups=2, shared=24, correction=True, scoring="sigmoid"),
            ),
            LayerKind(GroupedQuery(4, 2, 16), Experts(4, 2, 24, "relu2", gated=False)),
        ),
    ),
    "parallel": replace(
        TINY,
        layers=(
            LayerKind(
                GroupedQuery(4, 2, 16, qk_norm=NormKind(), qk_norm_over="all heads"),
                Dense(80, "relu2", gated=False),
            ),
            LayerKind(
                GroupedQuery(4, 2, 16, None, qk_norm=NormKind("layer"), qk_norm_over="each head"),
                Dense(80, bias=True),
            ),
        ),
        norm=NormKind("layer"), parallel="one norm", residual_scale=0.7, logit_scale=0.8, head_bias=True,
    ),
    "borrowed": replace(
        TINY,
        layers=(
            LayerKind(CHUNKED, Dense(80)),
            LayerKind(GroupedQuery(4, 1, 16), Dense(80)),
            LayerKind(replace(CHUNKED, kv_layers_back=2), Dense(80)),
            LayerKind(GroupedQuery(4, 1, 16, kv_layers_back=2), Dense(48)),
        ),
        post_norms=True, layer_scales=True,
    ),
    "gainless": replace(
        TINY,
        layers=(
            LayerKind(GroupedQuery(4, 2, 16, clip=0.5, bias=True), Dense(80)),
            LayerKind(GroupedQuery(4, 2, 16, Rope(backward=True)), Dense(80)),
        ),
        norm=NormKind("layer", gain=False), embedding_norm=True, learned_positions=True, position_offset=2,
    ),
    "gated": replace(
        TINY,
        layers=(
            LayerKind(replace(GROWING, bias=True), Dense(80, output_gate=True)),
            LayerKind(replace(GROWING, window=40), Experts(4, 2, 24, shared=24, shared_gate=True)),
        ),
    ),
    "inputs": replace(
        TINY,
        layers=(
            LayerKind(replace(PLAIN, keys_as_values=True), replace(NORMED_EXPERTS, scales=True)),
            LayerKind(replace(PLAIN, window=30), replace(NORMED_EXPERTS, activation="gelu_tanh")),
        ),
        post_norms=True, layer_scales=True, layer_input=LayerInput(12, 300), embedding_scale=48**0.5,
    ),
}  # fmt: skip
SAMPLINGS = (
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.0, top_p=0.9, seed=2),
    SamplingParams(temperature=0.7, top_k=20, seed=3),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, seed=4),
    SamplingParams(temperature=0.0),
)


def draw_params(config: ModelConfig, seed: int) -> Decoder:
    """Draw parameters in float32 whose logits are far apart. No gain is 1, and no bias 0."""
    first, second = jax.random.split(jax.random.key(seed))
    noise = decoder_spec(config)
    noise = jax.tree.map(lambda spec: replace(spec, mean=0.0, scale=0.06, dtype=None), noise, is_leaf=is_spec)
    return jax.tree.map(jnp.add, init_params(first, decoder_spec(config)), init_params(second, noise))


@dataclass(frozen=True)
class Texts:
    """Texts of different lengths, padded on the right.

    tokens: int32 [B,T].
    lengths: int32 [B].
    starts: number of each text's first tokens that are its prompt.
    reported: log-probabilities of the sampled tokens of each text, float32.
    """

    tokens: Any
    lengths: Any
    starts: Sequence[int]
    reported: Sequence[Any]

    def sampled(self, logprobs: Any) -> list[Any]:
        """Select the numbers of sampled tokens from log-probabilities [B,T-1]."""
        rows = zip(np.asarray(logprobs), self.starts, self.lengths, strict=True)
        return [row[start - 1 : length - 1] for row, start, length in rows]

    def assert_reported(self, logprobs: Any) -> None:
        """Compare log-probabilities [B,T-1] with the report, bit by bit."""
        for mine, reported in zip(self.sampled(logprobs), self.reported, strict=True):
            np.testing.assert_array_equal(mine, reported)

    def take(self, count: int) -> "Texts":
        """Return the first texts, as long as the longest of them."""
        longest = max(self.lengths[:count])
        return Texts(
            self.tokens[:count, :longest], self.lengths[:count], self.starts[:count], self.reported[:count]
        )


def sample_texts(
    llm: LLM, prompt_sizes: Sequence[int], samplings: Sequence[SamplingParams] = SAMPLINGS, count: int = 20
) -> Texts:
    """Sample `count` tokens behind a random prompt of each size, by each sampling in turn."""
    random = np.random.default_rng(0)
    prompts = [random.integers(1, llm.config.vocab_size, size).tolist() for size in prompt_sizes]
    params = [
        replace(samplings[i % len(samplings)], max_tokens=count - i % 3, logprobs=1, ignore_eos=True)
        for i in range(len(prompts))
    ]
    choices = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    texts = [prompt + list(x.token_ids) for prompt, x in zip(prompts, choices, strict=True)]
    lengths = np.array([len(text) for text in texts], np.int32)
    tokens = np.full((len(texts), lengths.max()), -1, np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    return Texts(tokens, lengths, list(map(len, prompts)), [x.logprob_array for x in choices])
