"""duetto as the rollout engine of Tunix (google-tunix 0.1.7), and Tunix's loss with the sampler's bits."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float32, Int
from tunix.rl import common  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout.base_rollout import (  # pyright: ignore[reportMissingImports]
    BaseRollout,
    RolloutConfig,
    RolloutOutput,
)

from ..checkpoints.families import FAMILIES
from ..checkpoints.nnx import params_from_state
from ..model.config import ModelConfig
from ..model.transformer import Decoder
from ..sampling.params import SamplingParams
from ..serve.llm.llm import LLM
from ..serve.text.outputs import CompletionOutput
from ..train import token_logprobs
from ..train.checks import cast_params

logger = logging.getLogger(__name__)
# The fields of a `config.json` by Tunix's.
FIELDS = {
    "num_layers": "num_hidden_layers",
    "vocab_size": "vocab_size",
    "num_embed": "vocab_size",
    "embed_dim": "hidden_size",
    "hidden_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "weight_tying": "tie_word_embeddings",
    "use_tied_embedding": "tie_word_embeddings",
    "num_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "final_logit_softcap": "final_logit_softcapping",
    "attn_logits_soft_cap": "attn_logit_softcapping",
    "sliding_window_size": "sliding_window",
    "global_base_frequency": "rope_theta",
    "local_base_frequency": "rope_local_base_freq",
}
# `apply_rope` of its Llama 3 and Qwen 3 has this base, whatever the config says.
FIXED_ROPE_THETA = 1_000_000


def read_tunix_config(config: Any, max_position: int) -> ModelConfig:
    """Return the model of a Tunix config: Llama 3, Qwen 2, Qwen 3 and its mixtures, Gemma 1, 2 and 3.

    max_position: longest text, in tokens. Raises ValueError for another family and for what duetto does not
    compute.
    """
    raw = {theirs: getattr(config, ours) for ours, theirs in FIELDS.items() if hasattr(config, ours)}
    raw["max_position_embeddings"] = max_position
    module = type(config).__module__.removeprefix("tunix.models.").partition(".")[0]
    if module not in FAMILY_FIELDS:
        known = ", ".join(f"tunix.models.{name}" for name in FAMILY_FIELDS)
        raise ValueError(f"the actor is of {type(config).__module__}, expected one of {known}")
    model_type, family_fields = FAMILY_FIELDS[module](config)
    return FAMILIES[model_type].parse_config(raw | family_fields)


def llama_fields(config: Any) -> tuple[str, dict[str, Any]]:
    """Return the family and the fields of Tunix's Llama 3."""
    return "llama", {"rope_theta": FIXED_ROPE_THETA}


def qwen2_fields(config: Any) -> tuple[str, dict[str, Any]]:
    """Return the family and the fields of Tunix's Qwen 2."""
    return "qwen2", {}


def qwen3_fields(config: Any) -> tuple[str, dict[str, Any]]:
    """Return the family and the fields of Tunix's Qwen 3, dense or a mixture."""
    fixed = {"rope_theta": FIXED_ROPE_THETA}
    if config.num_experts is None:
        return "qwen3", fixed
    return "qwen3_moe", fixed | {"moe_intermediate_size": config.hidden_dim, "norm_topk_prob": True}


def gemma_fields(config: Any) -> tuple[str, dict[str, Any]]:
    """Return the family and the fields of Tunix's Gemma 1 or 2."""
    if not config.use_post_attn_norm:
        return "gemma", {}
    types = [
        "sliding_attention" if t.name == "LOCAL_SLIDING" else "full_attention" for t in config.attention_types
    ]
    return "gemma2", {"query_pre_attn_scalar": config.head_dim, "layer_types": types[: config.num_layers]}


def gemma3_fields(config: Any) -> tuple[str, dict[str, Any]]:
    """Return the family and the fields of Tunix's Gemma 3. Raises ValueError if local positions are
    scaled."""
    if config.local_scale_factor != 1:
        raise ValueError(f"local_scale_factor is {config.local_scale_factor}, expected 1")
    by_width = config.query_pre_attn_norm.name == "BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS"
    scalar = config.embed_dim // config.num_heads if by_width else config.head_dim
    scaling = {"rope_type": "linear", "factor": config.global_scale_factor}
    return "gemma3_text", {"query_pre_attn_scalar": scalar} | (
        {"rope_scaling": scaling} if config.global_scale_factor != 1 else {}
    )


FAMILY_FIELDS = {
    "llama3": llama_fields,
    "qwen2": qwen2_fields,
    "qwen3": qwen3_fields,
    "gemma": gemma_fields,
    "gemma3": gemma3_fields,
}


class DuettoRollout(BaseRollout):
    """Rollout engine for `ClusterConfig.rollout_engine`: the class, or a `functools.partial` of it with
    options of `LLM`.

    Weights are taken from the actor's state on the device. An answer ends with an end token. It also ends
    before a sampled padding token, since Tunix's loss masks every such token. Log-probabilities are of the
    loss's distribution, the softmax of logits / temperature, whatever `top_p` and `top_k` are.

    weights_version: version of the weights of the last answers, the number of updates before them.
    """

    def __init__(
        self,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Any,
        rollout_config: RolloutConfig,
        **options: Any,
    ):
        self.tokenizer, self.rollout_config = tokenizer, rollout_config
        length = rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate
        self.config = read_tunix_config(rollout_actor.config, length)
        params = read_actor_params(self.config, rollout_actor, rollout_config.data_type)
        options = {"max_model_len": length, **options, "logprobs_mode": "processed_logprobs"}
        self.llm = LLM.from_params(self.config, params, **options)
        self.score_answers = jax.jit(partial(score_answers, make_score_fn(self.llm), self.pad_id()))
        self.weights_version = self.num_calls = 0

    def generate(self, prompts: list[str], rollout_config: RolloutConfig, **kwargs: Any) -> RolloutOutput:
        """Sample one answer to each prompt. Of a longer prompt the last `max_prompt_length` tokens are
        read."""
        self.rollout_config, length = rollout_config, rollout_config.max_prompt_length
        prompt_ids = [self.tokenize(prompt)[-length:] for prompt in prompts]
        requests = self.llm.generate(prompt_ids, self.make_sampling_params(len(prompts)), use_tqdm=False)
        answers = [request.outputs[0] for request in requests]
        self.check_versions(answers)
        ends, pad = self.end_ids(), self.pad_id()
        tokens = [drop_last(answer.token_ids, {pad} - ends) for answer in answers]
        padded = np.array([[pad] * (length - len(ids)) + ids for ids in prompt_ids], np.int32)
        is_scored = rollout_config.return_logprobs
        logprobs = self.report_logprobs(answers, padded, tokens) if is_scored else None
        return RolloutOutput(
            text=[self.tokenizer.decode(drop_last(ids, ends)) for ids in tokens],
            logits=None,  # pyright: ignore[reportArgumentType]
            tokens=[np.array(ids, np.int32) for ids in tokens],
            left_padded_prompt_tokens=padded,
            logprobs=logprobs,
        )

    def tokenize(self, prompt: str) -> list[int]:
        """Return a prompt's token ids as Tunix's own sampler does, with one first token of the tokenizer."""
        bos = self.tokenizer.bos_id()
        ids = [int(i) for i in self.tokenizer.encode(prompt)]
        return self.tokenizer.dedup_bos_ids([bos, *ids] if bos else ids)

    def make_sampling_params(self, count: int) -> list[SamplingParams]:
        """Return the parameters of `count` requests. With a seed of the config each request of each call has
        a seed of its own: equal prompts get different answers, and a run is repeatable."""
        c, self.num_calls = self.rollout_config, self.num_calls + 1
        seeds: Sequence[int | None] = [None] * count
        if c.seed is not None:
            sequence = np.random.SeedSequence([*read_seed(c.seed), self.num_calls])
            seeds = [int(seed) for seed in sequence.generate_state(count)]
        params = partial(
            SamplingParams,
            temperature=c.temperature,
            top_p=1.0 if c.top_p is None else c.top_p,
            top_k=max(c.top_k or 0, 0),
            max_tokens=c.max_tokens_to_generate,
            stop_token_ids=sorted({*self.end_ids(), self.pad_id()}),
            logprobs=0,
            detokenize=False,
        )
        return [params(seed=seed) for seed in seeds]

    def check_versions(self, answers: Sequence[CompletionOutput]) -> None:
        """Note the version of the weights that made the answers. Raises RuntimeError if it changed
        meanwhile."""
        versions = {version for answer in answers for _, version in answer.weights or ()}
        if len(versions) > 1:
            raise RuntimeError(f"answers were sampled from weights of the versions {sorted(versions)}")
        self.weights_version = max(versions, default=self.weights_version)

    def report_logprobs(
        self, answers: Sequence[CompletionOutput], prompts: np.ndarray, tokens: Sequence[Sequence[int]]
    ) -> list[np.ndarray]:
        """Return the answers' log-probabilities as reported, or computed anew where the sampler's
        distribution is not the loss's."""
        c = self.rollout_config
        if c.temperature > 0 and c.top_p in (None, 1.0) and (c.top_k or 0) <= 0:
            return [answer.logprob_array[: len(ids)] for answer, ids in zip(answers, tokens, strict=True)]
        width = c.max_tokens_to_generate
        padded = np.array([[*ids, *[self.pad_id()] * (width - len(ids))] for ids in tokens], np.int32)
        rows = np.asarray(self.get_per_token_logps(jnp.asarray(prompts), jnp.asarray(padded)))
        return [row[: len(ids)] for row, ids in zip(rows, tokens, strict=True)]

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "B P"], completion_tokens: Int[Array, "B C"]
    ) -> Float32[Array, "B C"]:
        """Return log-probabilities of answers under the served weights and the last config's temperature."""
        temperature = loss_temperature(self.rollout_config.temperature)
        return self.score_answers(self.llm.params, prompt_tokens, completion_tokens, temperature)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Serve the actor's new state. Unfinished requests of another thread run to their end before.

        Raises ValueError for a state of adapters only, and for one that does not fit; the old weights are
        then served on.
        """
        if nnx.LoRAParam in (filter_types or ()):
            raise ValueError("the actor trains LoRA adapters: filter_types must be (nnx.Param,)")
        self.llm.update_params(params_from_state(self.config, params, "tunix"), mode="wait")

    def end_ids(self) -> set[int]:
        """Return the token ids that end an answer."""
        return {int(i) for i in self.rollout_config.eos_tokens or [self.eos_id()]}

    def pad_id(self) -> int:
        return self.tokenizer.pad_id()

    def eos_id(self) -> int:
        return self.tokenizer.eos_id()

    def model(self) -> None:
        """Return None: Tunix calls `update_params` only if this is not the actor."""


def read_actor_params(config: ModelConfig, actor: Any, dtype: Any) -> Decoder:
    """Return an actor's parameters in a dtype; None keeps theirs."""
    params = params_from_state(config, nnx.state(actor, nnx.Param), "tunix")
    return cast_params(config, params, dtype or params.embed.dtype)


def drop_last(ids: Sequence[int], unwanted: set[int]) -> list[int]:
    """Return token ids without the last one if it is unwanted."""
    return list(ids[:-1] if ids and ids[-1] in unwanted else ids)


def read_seed(seed: Any) -> list[int]:
    """Return the words of a seed: an integer, or a key of jax of either kind."""
    is_key = isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    words = np.asarray(jax.random.key_data(seed) if is_key else seed)
    return [int(word) % 2**32 for word in words.ravel()]


def loss_temperature(temperature: float) -> float:
    """Return the divisor of logits in Tunix's loss, which takes 0 for 1."""
    return temperature or 1.0


def make_score_fn(llm: LLM) -> Callable[..., Any]:
    """Return `f(params, tokens, temperature, prompt_lengths)` with the bits of an engine. Where these cannot
    be had it is XLA's, with a warning."""
    try:
        return llm.logprobs_fn()
    except ValueError as e:
        logger.warning("get_per_token_logps has other bits than the sampler: %s", e)
        return ignore_prompts(partial(token_logprobs, config=llm.config, exact=False))


def ignore_prompts(score: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that takes `prompt_lengths` too, and computes the same without them."""
    return lambda params, prompt_lengths, **texts: score(params, **texts)


def score_answers(
    score: Callable[..., Float32[Array, "B {T-1}"]],
    pad_id: int,
    params: Any,
    prompt_tokens: Int[Array, "B P"],
    completion_tokens: Int[Array, "B C"],
    temperature: Any,
) -> Float32[Array, "B C"]:
    """Return log-probabilities of answers behind prompts that are padded on the left. Rows are turned so that
    they begin with their first token, since the sampler saw no padding before it."""
    texts = jnp.concatenate([prompt_tokens, completion_tokens], axis=1)
    P, T = prompt_tokens.shape[1], texts.shape[1]
    padding = jnp.sum(jnp.cumsum(prompt_tokens != pad_id, axis=1) == 0, axis=1, keepdims=True)
    tokens = jnp.take_along_axis(texts, (jnp.arange(T)[None] + padding) % T, axis=1)
    prompt_lengths = P - padding[:, 0]
    logprobs = score(params, tokens=tokens, temperature=temperature, prompt_lengths=prompt_lengths)
    columns = prompt_lengths[:, None] - 1 + jnp.arange(T - P)[None]
    return jnp.take_along_axis(logprobs, columns, axis=1)


@partial(
    jax.jit, static_argnames=("pad_id", "eos_id", "stop_gradient", "return_logits", "temperature", "dtype")
)
def exact_logps(
    graphdef: Any,
    state: Any,
    prompt_tokens: Int[Array, "B P"],
    completion_tokens: Int[Array, "B C"],
    pad_id: int,
    eos_id: int,
    images: Any = None,
    stop_gradient: bool = True,
    return_logits: bool = False,
    segment_ids: Any = None,
    segment_positions: Any = None,
    temperature: float = 1.0,
    dtype: Any = None,
) -> Any:
    """Return log-probabilities of answers with the bits that `DuettoRollout` reported, differentiable with
    respect to `state`. Replaces `tunix.rl.common.compute_per_token_logps`.

    dtype: of the rollout's weights, if the actor's are of another (`RolloutConfig.data_type`).
    return_logits: the logits too, by Tunix's own forward pass; its loss logs their entropy.

    Raises ValueError for packed sequences and images, and where `token_logprobs` does.
    """
    if segment_ids is not None or images is not None:
        raise ValueError("segment_ids and images must be None: packed sequences and images are not supported")
    model = nnx.merge(graphdef, state)
    config = read_tunix_config(model.config, prompt_tokens.shape[1] + completion_tokens.shape[1])
    params = read_actor_params(config, model, dtype)
    score = ignore_prompts(partial(token_logprobs, config=config))
    tokens = prompt_tokens, completion_tokens
    logprobs = score_answers(score, pad_id, params, *tokens, loss_temperature(temperature))
    logprobs = jax.lax.stop_gradient(logprobs) if stop_gradient else logprobs
    if not return_logits:
        return logprobs
    logits = compute_plain_logps(
        graphdef,
        state,
        *tokens,
        pad_id,
        eos_id,
        stop_gradient=stop_gradient,
        return_logits=True,
        temperature=temperature,
    )[1]
    return logprobs, logits


compute_plain_logps = common.compute_per_token_logps  # Tunix's own, before anything replaces it
