"""Parameters that are at hand: served without a copy, and taken from a Flax NNX model or any nested
mapping."""

import importlib.util
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.weights import drawn, logits
from fakes.greedy import greedy_programs
from flax import nnx
from suite.marks import full

from duetto import LLM, SamplingParams
from duetto.checkpoints.nnx import params_from_state
from duetto.cpu_kernels.library import load_library
from duetto.model.config import ModelConfig
from duetto.model.transformer import decoder_spec
from duetto.model.tree import leaves_by_path
from duetto.train import token_logprobs

EXAMPLES = Path(__file__).resolve().parents[4] / "examples"
CONFIG = ModelConfig.uniform(50, 32, 48, 2, 4, 2, 8, 64)
SMALL = {
    "max_model_len": 32, "max_num_seqs": 1, "max_prefill_tokens": 16, "reproducible": False,
    "cpu_kernels": False,
}  # fmt: skip


class Attention(nnx.Module):
    """Grouped-query attention with rotary embeddings, written with Flax's own layers and the half-split
    pairing."""

    def __init__(self, rngs: nnx.Rngs):
        def heads(count: int) -> nnx.LinearGeneral:
            return nnx.LinearGeneral(32, (count, 8), use_bias=False, rngs=rngs)

        self.query, self.key, self.value = heads(4), heads(2), heads(2)
        self.out = nnx.LinearGeneral((4, 8), 32, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = turned(self.query(x)), turned(self.key(x)), self.value(x)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed)


def turned(x: jax.Array) -> jax.Array:
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] / 10000.0 ** (
        jnp.arange(4, dtype=jnp.float32)[None] / 4
    )
    cos, sin = (f(angles)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm1, self.norm2 = (nnx.RMSNorm(32, epsilon=1e-5, rngs=rngs) for _ in range(2))
        self.attention = Attention(rngs)
        self.gate, self.up = (nnx.Linear(32, 48, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(48, 32, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """A model that somebody else wrote: other names, the same mathematics."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(50, 32, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(32, epsilon=1e-5, rngs=rngs)
        self.logits = nnx.Embed(50, 32, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.logits.attend(self.norm(x))


NAMES = {
    "tokens.embedding": "embed",
    "blocks.{}.norm1.scale": "layers.{}.attention_norm.gain",
    "blocks.{}.attention.query.kernel": "layers.{}.attention.q",
    "blocks.{}.attention.key.kernel": "layers.{}.attention.k",
    "blocks.{}.attention.value.kernel": "layers.{}.attention.v",
    "blocks.{}.attention.out.kernel": "layers.{}.attention.o",
    "blocks.{}.norm2.scale": "layers.{}.ffn_norm.gain",
    "blocks.{}.gate.kernel": "layers.{}.ffn.gate",
    "blocks.{}.up.kernel": "layers.{}.ffn.up",
    "blocks.{}.down.kernel": "layers.{}.ffn.down",
    "norm.scale": "norm.gain",
    "logits.embedding": "head",
}


@pytest.fixture(scope="module")
def theirs() -> Llama:
    return Llama(nnx.Rngs(0))


def state_of(model: Llama) -> nnx.State:
    return nnx.state(model, nnx.Param)


@nnx.jit
def theirs_of(model: Llama, tokens: jax.Array) -> jax.Array:
    """Logits in one program: their steps one by one would be a program each."""
    return model(tokens)


def test_an_nnx_models_state_gives_its_logits(theirs):
    params = params_from_state(CONFIG, state_of(theirs), NAMES)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 11)), jnp.int32)
    np.testing.assert_allclose(
        logits(params, CONFIG, tokens), theirs_of(theirs, tokens), atol=2e-5, rtol=1e-4
    )


def test_an_nnx_models_arrays_are_the_parameters(theirs):
    state = state_of(theirs)
    params = params_from_state(CONFIG, state, NAMES)
    held = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)}
    assert {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params)} == held


def test_a_nested_mapping_with_our_own_names_needs_no_translation():
    params = drawn(decoder_spec(CONFIG))
    plain: dict = {}
    for path, leaf in leaves_by_path(params).items():
        node = plain
        for part in path.split(".")[:-1]:
            node = node.setdefault(part, {})
        node[path.split(".")[-1]] = leaf
    again = params_from_state(CONFIG, plain)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(params), strict=True))
    assert (
        leaves_by_path(params_from_state(CONFIG, leaves_by_path(params))).keys()
        == leaves_by_path(params).keys()
    )


def changed(names: dict[str, str], **leaves):
    given = {path: x for path, x in leaves_by_path(drawn(decoder_spec(CONFIG))).items()}
    return params_from_state(CONFIG, {**given, **leaves}, names)


@pytest.mark.parametrize(
    ("leaves", "names", "said"),
    [
        (
            {"norm.gain": jnp.zeros(31)}, {},
            r"parameter norm.gain has shape \(31,\), expected \(32,\) for norm.gain",
        ),
        ({"more": jnp.zeros(2)}, {}, "parameter more is not one of this model: it has no more"),
        (
            {"blocks.1.q": jnp.zeros(2)}, {"blocks.{}.q": "layers.{}.attention.q"},
            "layers.1.attention.q is given 2 times",
        ),
        ({}, {"head": "heads"}, r"parameter head is missing, expected shape \(50, 32\)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(leaves, names, said):
    with pytest.raises(ValueError, match=said):
        changed(names, **leaves)


def test_a_wrong_shape_is_named_as_they_name_it(theirs):
    state = nnx.to_pure_dict(state_of(theirs))
    state["blocks"][1]["gate"]["kernel"] = state["blocks"][1]["gate"]["kernel"].T
    said = r"parameter blocks.1.gate.kernel has shape \(48, 32\), expected \(32, 48\) for layers.1.ffn.gate"
    with pytest.raises(ValueError, match=said):
        params_from_state(CONFIG, state, NAMES)


def pointers(tree) -> list[int]:
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


@greedy_programs()
def test_parameters_are_served_in_place(few_shapes, theirs):
    """Not one is copied: not when the engine starts, not in generating, and not with new parameters."""
    params = params_from_state(CONFIG, state_of(theirs), NAMES)
    before = pointers(params)
    greedy = SamplingParams(temperature=0.0, max_tokens=5)
    with LLM.from_params(CONFIG, params, **SMALL) as llm:
        first = llm.generate([[1, 2, 3]], greedy, use_tqdm=False)[0].outputs[0].token_ids
        assert pointers(llm.params) == before == pointers(params)
        assert list(first) == plain_greedy(theirs, [1, 2, 3], 5)
        other = Llama(nnx.Rngs(7))
        new = params_from_state(CONFIG, state_of(other), NAMES)
        llm.update_params(new)
        second = llm.generate([[1, 2, 3]], greedy, use_tqdm=False)[0].outputs[0].token_ids
        assert pointers(llm.params) == pointers(new)
        assert list(second) == plain_greedy(other, [1, 2, 3], 5) != list(first)


def plain_greedy(model: Llama, tokens: list[int], count: int) -> list[int]:
    for _ in range(count):
        padded = jnp.asarray([np.resize(tokens, 8)])  # of one length: others would compile every layer anew
        tokens = [*tokens, int(np.asarray(theirs_of(model, padded))[0, len(tokens) - 1].argmax())]
    return tokens[-count:]


def example_of(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / name)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


@pytest.mark.full
def test_the_training_example_learns_while_it_samples():
    example = example_of("sample_while_training.py")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax needs both
        losses, texts = example.train(rounds=2, steps=15)
    assert losses[-1] < 0.8 * losses[0] and len(texts) == 2


@pytest.mark.full
def test_the_example_of_reinforcement_learns_from_its_own_samples():
    example = example_of("reinforce.py")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        rewards, apart, equal = example.reinforce(rounds=8)
    assert rewards[-1] > 3 * rewards[0] > 0 and apart < 1e-4 and equal


@pytest.mark.as_served
@pytest.mark.skipif(not load_library().isas, reason=load_library().refusal or "there are kernels")
@pytest.mark.parametrize("dtype, rounds", [("bfloat16", 8), full("bfloat16", 30), full("float32", 30)])
def test_the_example_of_grpo_is_on_policy_to_the_bit(dtype, rounds):
    example = example_of("grpo.py")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        rewards, log_ratios = example.train(dtype, rounds)
    assert log_ratios.shape[:2] == (rounds, 32) and (np.exp(log_ratios) == 1).all()
    np.testing.assert_array_equal(log_ratios, 0.0)
    assert rewards[-1] > (0.9 if rounds == 30 else 1.5 * rewards[0]) and rewards[0] > 0


@pytest.mark.full
@pytest.mark.as_served
@pytest.mark.skipif(not load_library().isas, reason=load_library().refusal or "there are kernels")
def test_a_plain_trainer_of_the_example_is_off_policy(monkeypatch):
    example = example_of("grpo.py")

    def plain_fn(llm: LLM):
        def logprobs(masters, *texts):
            params = jax.tree.map(lambda x: x.astype(llm.served_dtype), masters)
            return token_logprobs(params, llm.config, *texts, exact=False)

        return logprobs

    monkeypatch.setattr(LLM, "logprobs_fn", plain_fn)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        _, log_ratios = example.train("bfloat16", rounds=1)
    assert (log_ratios != 0).sum() > 0.9 * 32 * example.ANSWER
