"""Tunix with duetto: its models' logits, its rollouts, and GRPO whose loss has the sampler's bits."""

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases.weights import logits
from flax import nnx
from jax.sharding import Mesh

from duetto.checkpoints.nnx import params_from_state

pytestmark = [pytest.mark.extras, pytest.mark.filterwarnings("ignore")]


def load_module(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of jax's former names
        return pytest.importorskip(name, reason="needs duetto[tunix]")


gemma = load_module("tunix.models.gemma.model")
gemma3, llama3, qwen2, qwen3 = (
    load_module(f"tunix.models.{name}.model") for name in ("gemma3", "llama3", "qwen2", "qwen3")
)
adapter, common = load_module("tunix.generate.tokenizer_adapter"), load_module("tunix.rl.common")
grpo_learner = load_module("tunix.rl.grpo.grpo_learner")
rl_cluster, base_rollout = load_module("tunix.rl.rl_cluster"), load_module("tunix.rl.rollout.base_rollout")
ours = load_module("duetto.compat.tunix")
DuettoRollout, exact_logps = ours.DuettoRollout, ours.exact_logps
plain_logps = common.compute_per_token_logps

SIZES = {
    "num_layers": 2, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2
}  # fmt: skip
LLAMA = SIZES | {"vocab_size": 50, "norm_eps": 1e-5, "rope_theta": 500_000}
GEMMA = SIZES | {"num_embed": 50, "sliding_window_size": 5}
GEMMA2 = GEMMA | {
    "use_post_attn_norm": True, "use_post_ffw_norm": True, "final_logit_softcap": 30.0,
    "attn_logits_soft_cap": 50.0,
    "attention_types": (gemma.AttentionType.LOCAL_SLIDING, gemma.AttentionType.GLOBAL),
}  # fmt: skip
GEMMA3 = GEMMA | {"num_layers": 7, "global_base_frequency": 1_000_000, "param_dtype": jnp.float32}
BY_WIDTH = gemma3.QueryPreAttentionNormalisation.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
MODELS = {
    "llama3": (llama3.Llama3, llama3.ModelConfig(**LLAMA)),
    "llama3, tied": (llama3.Llama3, llama3.ModelConfig(**LLAMA, weight_tying=True)),
    "qwen2": (qwen2.Qwen2, qwen2.ModelConfig(**LLAMA)),
    "qwen3": (qwen3.Qwen3, qwen3.ModelConfig(**LLAMA)),
    "qwen3, experts": (qwen3.Qwen3, qwen3.ModelConfig(**LLAMA, num_experts=4, num_experts_per_tok=2)),
    "gemma2": (gemma.Gemma, gemma.ModelConfig(**GEMMA2)),
    "gemma3": (gemma3.Gemma3, gemma3.ModelConfig(**GEMMA3, global_scale_factor=8.0)),
    "gemma3, equal heads": (
        gemma3.Gemma3,
        gemma3.ModelConfig(
            **GEMMA3 | {"num_kv_heads": 4, "embed_dim": 40}, query_pre_attn_norm=BY_WIDTH
        ),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def loosely() -> Iterator[None]:
    """Tunix mixes dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def random_model(make: Any, config: Any, scale: float = 0.3, seed: int = 0) -> nnx.Module:
    model = make(config, rngs=nnx.Rngs(0))
    rng, (leaves, treedef) = np.random.default_rng(seed), jax.tree.flatten(nnx.state(model, nnx.Param))
    arrays = [jnp.asarray(scale * rng.standard_normal(x.shape), x.dtype) for x in leaves]
    nnx.update(model, jax.tree.unflatten(treedef, arrays))
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_tunix_models_equal_ours(name):
    model = random_model(*MODELS[name])
    config = ours.read_tunix_config(MODELS[name][1], 64)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 50, (2, 13)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(13), (2, 13))
    mask = jnp.broadcast_to(jnp.tril(jnp.ones((13, 13), bool)), (2, 13, 13))
    theirs = nnx.jit(lambda m: m(tokens, positions, None, mask)[0])(model)
    params = params_from_state(config, nnx.state(model, nnx.Param), "tunix")
    np.testing.assert_allclose(logits(params, config, tokens), theirs, atol=3e-5, rtol=1e-4)


def test_an_actor_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="expected one of tunix.models.llama3"):
        ours.read_tunix_config(base_rollout.RolloutConfig(), 64)
    with pytest.raises(ValueError, match="local_scale_factor is 2.0, expected 1"):
        ours.read_tunix_config(gemma3.ModelConfig(**GEMMA3, local_scale_factor=2.0), 64)


# ---------------------------------------------------------------- rollouts

PAD, BOS, EOS = 0, 1, 2
WORDS = "\0\1\2abcdefghijklmnopqrstuvwxyz .,"
TINY = qwen3.ModelConfig(
    **SIZES | {"embed_dim": 64, "hidden_dim": 96, "head_dim": 16}, vocab_size=32, norm_eps=1e-6,
    rope_theta=10_000, use_tied_embedding=True,
)  # fmt: skip
ENGINE = {"cpu_kernels": True, "max_num_seqs": 8, "page_size": 16, "max_prefill_tokens": 64}


class Letters:
    """A tokenizer of letters."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [WORDS.index(c) for c in text]

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(WORDS[i] for i in ids)

    def bos_id(self) -> int:
        return BOS

    def eos_id(self) -> int:
        return EOS

    def pad_id(self) -> int:
        return PAD


def rollout_config(**changes: Any) -> Any:
    config = {
        "max_prompt_length": 8, "max_tokens_to_generate": 16, "temperature": 1.0, "return_logprobs": True,
        "seed": jax.random.key(3),
    }  # fmt: skip
    return base_rollout.RolloutConfig(**config | changes)


@contextlib.contextmanager
def serve(model: nnx.Module, **changes: Any) -> Iterator[Any]:
    rollout = DuettoRollout(
        model, adapter.TokenizerAdapter(Letters()), None, rollout_config(**changes), **ENGINE
    )
    try:
        yield rollout
    finally:
        rollout.llm.close()


@pytest.fixture(scope="module")
def actor() -> nnx.Module:
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return random_model(qwen3.Qwen3, TINY, scale=0.2)


@pytest.fixture(scope="module")
def rollout(actor) -> Iterator[Any]:
    with serve(actor) as rollout:
        yield rollout


PROMPTS = ["say a", "say a", "tell me more of it", "go"]


def in_rows(tokens: list[np.ndarray], width: int = 16) -> np.ndarray:
    return np.array([[*ids, *[PAD] * (width - len(ids))] for ids in tokens], np.int32)


NARROW = {"top_p": 0.8, "top_k": 9, "temperature": 1.3}


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.7}, {"temperature": 0.0}, NARROW])
def test_reported_log_probabilities_are_the_losss_own(rollout, actor, changes):
    """Of tokens in Tunix's own forward, at the temperature that its loss has."""
    config = rollout_config(**changes)
    out = rollout.generate(PROMPTS, config)
    answers = in_rows(out.tokens)
    args = *nnx.split(actor), jnp.asarray(out.left_padded_prompt_tokens), jnp.asarray(answers)
    theirs = common.compute_per_token_logps(*args, PAD, EOS, temperature=config.temperature)
    exact = exact_logps(*args, PAD, EOS, temperature=config.temperature)
    served = rollout.get_per_token_logps(*args[2:])
    for i, (ids, reported) in enumerate(zip(out.tokens, out.logprobs, strict=True)):
        assert reported.dtype == np.float32 and reported.shape == ids.shape
        np.testing.assert_allclose(reported, theirs[i, : len(ids)], atol=2e-5)
        assert np.array_equal(reported, exact[i, : len(ids)])
        assert np.array_equal(reported, served[i, : len(ids)])


def test_prompts_are_padded_on_the_left_and_cut_there(rollout):
    out = rollout.generate(PROMPTS, rollout_config())
    expected = [[0, 0, BOS, *Letters().encode("say a")]] * 2 + [Letters().encode("re of it")[-8:]]
    assert out.left_padded_prompt_tokens[:3].tolist() == expected
    assert out.left_padded_prompt_tokens[3].tolist() == [0] * 5 + [BOS, *Letters().encode("go")]


def test_equal_prompts_differ_and_a_seed_repeats_a_run(rollout):
    """Neither does a second call repeat the first."""
    runs = []
    for _ in range(2):
        rollout.num_calls = 0
        runs.append([rollout.generate(PROMPTS[:2], rollout_config()).text for _ in range(2)])
    first, second = runs[0]
    assert runs[0] == runs[1] and first[0] != first[1] and first != second


def test_answers_hold_no_padding_and_end_with_the_end_token(rollout):
    out = rollout.generate(PROMPTS * 8, rollout_config())
    ended = [ids for ids in out.tokens if EOS in ids]
    short = [ids for ids in out.tokens if EOS not in ids and len(ids) < 16]
    assert not any(PAD in ids for ids in out.tokens)
    assert ended and all(ids.tolist().index(EOS) == len(ids) - 1 for ids in ended)
    assert short  # a sampled padding token ended these
    assert not any(WORDS[EOS] in text or WORDS[PAD] in text for text in out.text)


def test_new_weights_of_the_actor_are_served(actor):
    with serve(actor, data_type=jnp.bfloat16, temperature=0.0) as rollout:
        before = rollout.generate(PROMPTS, rollout_config(temperature=0.0))
        new = nnx.state(random_model(qwen3.Qwen3, TINY, scale=0.2, seed=5), nnx.Param)
        rollout.update_params(new, (nnx.Param,))
        after = rollout.generate(PROMPTS, rollout_config(temperature=0.0))
        assert before.text != after.text and rollout.weights_version == 1
        assert rollout.llm.served_dtype == jnp.bfloat16
        with pytest.raises(ValueError, match="LoRA"):
            rollout.update_params(new, (nnx.LoRAParam,))
        with pytest.raises(ValueError, match="embedder.input_embedding is missing"):
            rollout.update_params({})
        assert rollout.generate(PROMPTS, rollout_config(temperature=0.0)).text == after.text


def test_the_exact_losss_gradient_is_tunixs(actor):
    """Of answers of several lengths, behind prompts that are padded."""
    rng = np.random.default_rng(2)
    prompts, answers = (rng.integers(3, 32, (3, n)).astype(np.int32) for n in (6, 9))
    prompts[0, :4], answers[1, 5:] = PAD, PAD
    graph, state = nnx.split(actor)

    @partial(jax.jit, static_argnums=0)
    def gradient(compute: Any, state: Any) -> Any:
        def loss(state: Any) -> jax.Array:
            tokens = jnp.asarray(prompts), jnp.asarray(answers)
            logps = compute(graph, state, *tokens, PAD, EOS, stop_gradient=False, temperature=0.7)
            return jnp.where(answers != PAD, logps, 0).sum()

        return jax.value_and_grad(loss)(state)

    for exact, plain in zip(
        *(jax.tree.leaves(gradient(f, state)) for f in (exact_logps, plain_logps)), strict=True
    ):
        np.testing.assert_allclose(exact, plain, rtol=1e-3, atol=1e-4 * float(np.abs(plain).max()))


def test_packed_sequences_and_images_are_refused(actor):
    ids = jnp.ones((1, 4), jnp.int32)
    with pytest.raises(ValueError, match="packed sequences"):
        exact_logps(*nnx.split(actor), ids, ids, PAD, EOS, segment_ids=ids)


# ---------------------------------------------------------------- three steps of GRPO


@dataclass
class Steps:
    """What steps of GRPO did: tokens, those whose log-probabilities differ, and the updates' ratios."""

    tokens: int
    differences: int
    ratios: list[float]
    versions: list[int]


def train(temperature: float, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """Three steps of two updates each, of real Tunix; a vowel is a reward."""
    monkeypatch.setattr(common, "compute_per_token_logps", exact_logps)
    model = random_model(qwen3.Qwen3, TINY, scale=0.1)
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    cluster = rl_cluster.RLCluster(
        actor=model,
        tokenizer=Letters(),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(
                (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT), mesh
            ),
            rollout_engine=partial(DuettoRollout, **ENGINE),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(3e-3), eval_every_n_steps=10**6, max_steps=6
            ),
            rollout_config=rollout_config(temperature=temperature),
        ),
    )
    steps, generate = Steps(0, 0, [], []), cluster.generate

    def compare(*args: Any, **kwargs: Any) -> Any:
        out = generate(*args, **kwargs)
        texts = jnp.asarray(out.left_padded_prompt_tokens), jnp.asarray(in_rows(out.tokens))
        exact = exact_logps(
            *nnx.split(cluster.actor_trainer.model), *texts, PAD, EOS, temperature=temperature
        )
        for ids, reported, row in zip(out.tokens, out.logprobs, np.asarray(exact), strict=True):
            steps.tokens += len(ids)
            steps.differences += int((reported != row[: len(ids)]).sum())
        steps.versions.append(cluster.rollout.weights_version)
        return out

    def reward(prompts: Any, completions: list[str], **_: Any) -> list[float]:
        return [sum(c in "aeiou" for c in text) / 16 for text in completions]

    def note_ratios(aux: dict[str, Any]) -> None:
        steps.ratios += [float(aux["is_ratio/min"]), float(aux["is_ratio/max"])]
        process(aux)

    process, trainer = cluster.actor_trainer._post_process_train_step, cluster.actor_trainer
    monkeypatch.setattr(cluster, "generate", compare)
    monkeypatch.setattr(trainer, "_post_process_train_step", note_ratios)
    learner = grpo_learner.GRPOLearner(
        rl_cluster=cluster,
        reward_fns=reward,
        algo_config=grpo_learner.GRPOConfig(num_generations=4, num_iterations=2, beta=0.0, epsilon=0.2),
    )
    assert learner.should_sync_weights
    learner.train([{"prompts": np.array(["say a", "go on"])}] * 3)
    cluster.rollout.llm.close()
    return steps


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_no_token_differs_in_three_steps_of_grpo(monkeypatch, temperature):
    """The first update of each step has a ratio of exactly one."""
    steps = train(temperature, monkeypatch)
    assert steps.tokens > 100 and steps.differences == 0
    assert steps.ratios[0::4] == steps.ratios[1::4] == [1.0] * 3 and len(steps.ratios) == 12
    assert steps.versions == [0, 1, 2]
