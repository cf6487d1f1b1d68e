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
from duetto.model.layers import normalise
from duetto.model.transformer import Decoder, embed, forward, layer, turns, unembed

DATA = Path(__file__).resolve().parents[1].parent / "shared" / "data"
LENGTH = 80  # all prompts and their continuations fit: one compilation a model
NAMES = (
    "llama3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "gemma2",
    "gemma3_text",
    "phi3",
    "deepseek_v2_lite",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "gpt2",
)


def tolerance(name: str) -> float:
    """Of logits: the two forms of GELU differ by 2e-3."""
    return 5e-4 if name.startswith(("gemma", "gpt2")) else 1e-3


def cases(folder: Path) -> list[dict]:
    return json.loads((folder / "golden.json").read_text())["cases"]


@pytest.fixture(scope="module", params=[*NAMES, "llama3_bf16_sharded"])
def tiny(request):
    """Name, configuration, float32 parameters and golden outputs of a checkpoint with random weights."""
    source = DATA / "tiny" / request.param
    if not source.exists():
        pytest.skip("the fixtures of tiny checkpoints are not here")
    return request.param, *load(source, jnp.float32), cases(source)


@pytest.fixture(scope="module")
def stories():
    """A trained model of 260 thousand parameters, and what it continues greedily."""
    source = DATA / "stories260K"
    if not source.exists():
        pytest.skip("the checkpoint stories260K is not here")
    return *load(source), cases(source)


@partial(jax.jit, static_argnums=1)
def run(params: Decoder, config: ModelConfig, tokens: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Logits [T,V], and hidden values [1,T,D] of the embedding and after each layer, the last one normed."""
    positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
    hidden, _ = forward(params, config, tokens[None], positions, causal)
    states = [embed(params, config, tokens[None], positions)]
    for i, turn in enumerate(turns(config, positions, jnp.array([LENGTH]))):
        x, _ = layer(params.layers[i], config.layers[i], config, states[-1], turn, causal, None, i)
        states.append(x)
    states[-1] = normalise(states[-1], params.norm, config.norm)
    return unembed(params, config, hidden)[0], states


def outputs(params: Decoder, config: ModelConfig, ids: list[int]):
    """The same for some tokens; what pads them lies behind and is not seen."""
    tokens = np.zeros(LENGTH, np.int32)
    tokens[: len(ids)] = ids
    return run(params, config, tokens)


def assert_greedy(logits: jax.Array, case: dict, count: int) -> None:
    """Each token of the golden continuation is the likeliest after those before it."""
    start = len(case["prompt_ids"]) - 1
    found = np.asarray(logits)[start : start + count].argmax(-1)
    assert found.tolist() == case["greedy_ids"][:count]


def test_logits_greedy_tokens_and_hidden_values(tiny):
    name, config, params, golden = tiny
    for case in golden:
        logits, states = outputs(params, config, case["prompt_ids"] + case["greedy_ids"])
        assert_greedy(logits, case, 24)
        last = len(case["prompt_ids"]) - 1
        np.testing.assert_allclose(
            np.asarray(logits)[last], case["last_logits"], atol=tolerance(name), rtol=0
        )
        found = np.stack([np.asarray(state)[0, last, :8] for state in states])
        np.testing.assert_allclose(found, case["hidden_last_pos_first8"], atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_both_styles_of_configuration_say_the_same(name, tmp_path):
    """Equal configurations and equal parameters are equal in all that follows."""
    source = DATA / "tiny" / name
    if not source.exists():
        pytest.skip("the fixtures of tiny checkpoints are not here")
    folder = Path(shutil.copytree(source, tmp_path / name, copy_function=shutil.copyfile))
    shutil.copyfile(source / "config_v5.json", folder / "config.json")
    (config, params), (expected, same) = load(folder, jnp.float32), load(source, jnp.float32)
    assert config == expected
    for found, wanted in zip(jax.tree.leaves(params), jax.tree.leaves(same), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


@pytest.mark.parametrize("i", [0, 3, 7, 11])
def test_a_trained_model_tells_the_same_story(stories, i):
    config, params, golden = stories
    case = golden[i]
    logits, _ = outputs(params, config, case["prompt_ids"] + case["greedy_ids"][:24])
    found = np.asarray(logits)[len(case["prompt_ids"]) - 1]
    np.testing.assert_allclose(found, case["prompt_last_logits"], atol=1e-3, rtol=0)
    assert_greedy(logits, case, 24)
