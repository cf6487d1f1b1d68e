"""The bare forward pass, without cache or engine, against what Transformers computed for the same checkpoints."""

import json
import shutil
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from duetto.checkpoints.huggingface import load
from duetto.model.attention import causal
from duetto.model.config import ModelConfig
from duetto.model.layers import rms_norm, rotation
from duetto.model.transformer import Decoder, feed_forward, forward, mix, unembed

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
LENGTH = 80  # all prompts and their continuations fit: one compilation a model
TOLERANCE = 1e-3


@pytest.fixture(scope="module", params=["llama3", "llama3-v5", "llama3_bf16_sharded"])
def tiny(request, tmp_path_factory):
    """Configuration, float32 parameters and golden outputs of a checkpoint with random weights."""
    name, _, style = request.param.partition("-")
    source = DATA / "tiny" / name
    if not source.exists():
        pytest.skip("the fixtures of tiny checkpoints are not here")
    if style:
        source = Path(
            shutil.copytree(source, tmp_path_factory.mktemp("tiny") / name, copy_function=shutil.copyfile)
        )
        shutil.copyfile(source / "config_v5.json", source / "config.json")
    return *load(source, jnp.float32), json.loads((source / "golden.json").read_text())["cases"]


@pytest.fixture(scope="module")
def stories():
    """A trained model of 260 thousand parameters, and what it continues greedily."""
    source = DATA / "stories260K"
    if not source.exists():
        pytest.skip("the checkpoint stories260K is not here")
    return *load(source), json.loads((source / "golden.json").read_text())["cases"]


@partial(jax.jit, static_argnums=1)
def all_logits(params: Decoder, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    hidden, _ = forward(params, config, tokens[None], jnp.arange(LENGTH)[None], causal)
    return unembed(params, hidden)[0]


def logits(params: Decoder, config: ModelConfig, ids: list[int]) -> np.ndarray:
    """Logits after the last of some tokens; what pads them lies behind and is not seen."""
    tokens = np.zeros(LENGTH, np.int32)
    tokens[: len(ids)] = ids
    return np.asarray(all_logits(params, config, tokens))[len(ids) - 1]


def continuation(params: Decoder, config: ModelConfig, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits(params, config, ids).argmax()))
    return ids[len(prompt) :]


def hidden_states(params: Decoder, config: ModelConfig, ids: list[int]) -> list[jax.Array]:
    """Hidden values [T, D] of the embedding and after each layer, the last one normed."""
    turn = rotation(jnp.arange(len(ids))[None], config.rope.frequencies(config.head_size))
    states = [params.embed[jnp.array(ids)][None]]
    for i, w in enumerate(params.layers):
        x = states[-1]
        x = x + mix(w.attention, rms_norm(x, w.attention_norm, config.norm_eps), turn, causal, None, i)[1]
        states.append(x + feed_forward(w.ffn, rms_norm(x, w.ffn_norm, config.norm_eps)))
    states[-1] = rms_norm(states[-1], params.norm, config.norm_eps)
    return [x[0] for x in states]


@pytest.mark.parametrize("i", range(4))
def test_last_logits(tiny, i):
    config, params, cases = tiny
    found = logits(params, config, cases[i]["prompt_ids"])
    np.testing.assert_allclose(found, cases[i]["last_logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("i", range(4))
def test_greedy_tokens(tiny, i):
    config, params, cases = tiny
    assert continuation(params, config, cases[i]["prompt_ids"], 24) == cases[i]["greedy_ids"]


def test_hidden_values_after_each_layer(tiny):
    config, params, cases = tiny
    for case in cases[:2]:
        found = [state[-1, :8] for state in hidden_states(params, config, case["prompt_ids"])]
        np.testing.assert_allclose(np.stack(found), case["hidden_last_pos_first8"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("i", [0, 3, 7, 11])
def test_a_trained_model_tells_the_same_story(stories, i):
    config, params, cases = stories
    case = cases[i]
    found = logits(params, config, case["prompt_ids"])
    np.testing.assert_allclose(found, case["prompt_last_logits"], atol=TOLERANCE, rtol=0)
    assert continuation(params, config, case["prompt_ids"], 24) == case["greedy_ids"][:24]
