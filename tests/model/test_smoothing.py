"""Smoothed models compute what they computed, and codes of 8 bits lose less of their activations."""

import inspect
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.families.golden import GOLDEN, case_folder, hub_config, prompts
from cases.weights import MIXED, logits
from suite.fixtures import ROOT
from suite.marks import full_if

from duetto.checkpoints.huggingface import load_hf, read_config
from duetto.model.attention import causal
from duetto.model.config import Experts, ModelConfig
from duetto.model.layers import einsum, normalise
from duetto.model.transformer import Decoder, compute_logits, decoder_spec, forward
from duetto.model.tree import leaves_by_path, map_by_path, pytree
from duetto.model.weights.compression.compress import contracted_axes, dequantise_weight, encode_weight
from duetto.model.weights.compression.smoothing import (
    NO_GAIN,
    NO_QUANTISED_READER,
    InputNorm,
    divide_gain,
    find_input_norms,
    measure_norm_outputs,
    multiply_rows,
    smooth_params,
    smoothing_factors,
)

DEMO = ROOT / "checkpoints" / "demo"
# dense, an offset, routers, one norm for both sublayers and one each, biases, latents, mixers side by side,
# norms of experts
QUICK = (
    "llama", "gemma2", "qwen2_moe", "cohere", "gpt_neox", "gpt2", "deepseek_v32", "falcon_h1",
    "gemma4_text mixture",
)  # fmt: skip


def described(name: str, folder: Path) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(hub_config(name)))
    return read_config(folder)


def foldable(config: ModelConfig) -> list[InputNorm]:
    return [norm for norm in find_input_norms(config) if not norm.obstacle]


def drawn_maxima(config: ModelConfig, norms: list[InputNorm]) -> dict[str, np.ndarray]:
    """Magnitudes of channels that differ by orders; one channel has none."""
    draw = np.random.default_rng(0)
    maxima = {norm.path: np.exp(1.5 * draw.standard_normal(config.hidden_size)) for norm in norms}
    for values in maxima.values():
        values[3] = 0
    return {path: values.astype(np.float32) for path, values in maxima.items()}


def same(smoothed: np.ndarray, original: np.ndarray) -> bool:
    return float(np.abs(smoothed - original).max()) <= 1e-4 * float(np.abs(original).max())


@full_if(lambda name: name not in QUICK)
@pytest.mark.parametrize("name", GOLDEN)
def test_a_smoothed_model_has_the_logits_of_the_original(name: str, tmp_path):
    case_folder(name, tmp_path)
    config, params = load_hf(tmp_path, "float32")
    norms = foldable(config)
    assert norms or all(kind.ffn is None for kind in config.layers) or not config.pre_norms, name
    smoothed = smooth_params(params, norms, drawn_maxima(config, norms))
    before, after = leaves_by_path(params), leaves_by_path(smoothed)
    changed = {path for path in before if not np.array_equal(before[path], after[path])}
    gains = {f"{norm.path}.gain" for norm in norms}
    assert (
        gains
        <= changed
        <= gains
        | {f"{norm.path}.bias" for norm in norms}
        | {path for norm in norms for path in norm.weight_axes}
    )
    tokens = jnp.asarray(prompts()[1:2], jnp.int32)
    assert same(*(np.asarray(logits(tree, config, tokens)) for tree in (smoothed, params)))


@pytest.mark.parametrize("name", GOLDEN)
def test_all_weights_that_read_a_norm_are_known(name: str, tmp_path):
    config = described(name, tmp_path)
    readers = {path for norm in find_input_norms(config) for path in norm.weight_axes}
    inputs = {
        path
        for path, spec in leaves_by_path(decoder_spec(config)).items()
        if re.match(r"layers\.\d+\.(attention|recurrent|ffn)\.", path)
        and ("model" in spec.axes[:-1] or path.endswith("output_gate"))
    }
    has_expert_norms = any(isinstance(kind.ffn, Experts) and kind.ffn.norms for kind in config.layers)
    routers = {path for path in inputs - readers if path.endswith("ffn.router")}  # read a norm of their own
    assert bool(routers) == has_expert_norms and inputs - routers == readers


def test_norms_that_are_left_have_a_reason(tmp_path):
    def obstacles(name: str) -> dict[str, str]:
        return {norm.path: norm.obstacle for norm in find_input_norms(described(name, tmp_path))}

    assert set(obstacles("olmo2").values()) == {NO_GAIN}
    assert set(obstacles("mamba2").values()) == {NO_QUANTISED_READER}
    mixed = obstacles("qwen3_next")
    assert set(mixed.values()) == {"", NO_QUANTISED_READER}
    assert all(path.endswith("attention_norm") for path, why in mixed.items() if why)


def test_factors_are_those_of_the_paper_and_unused_channels_stay():
    x, w = np.array([9, 4, 0, 5], np.float32), np.array([0.25, 1, 1, 0], np.float32)
    np.testing.assert_allclose(smoothing_factors(x, w), [6, 2, 1, 1])


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_factors_undo_the_rounding_of_gains(dtype: Any, offset: float):
    draw = np.random.default_rng(1)
    gain = (draw.standard_normal(64) + 1 - offset).astype(dtype)
    gain[0] = -offset
    factors = np.exp(3 * draw.standard_normal(64)).astype(np.float32)
    factors[1] = 1e30
    divided, exact = divide_gain(gain, offset, factors)
    whole, small = (x.astype(np.float32) + np.float32(offset) for x in (gain, divided))
    assert divided.dtype == dtype and np.isfinite(exact).all() and (exact != 0).all()
    np.testing.assert_allclose(small * exact, whole, rtol=1e-6)
    if not offset:
        np.testing.assert_allclose(exact[2:], factors[2:], rtol=1e-2 if dtype == jnp.bfloat16 else 2e-3)


def test_maxima_are_those_of_the_text_without_its_padding(mixed: Decoder):
    tokens = np.random.default_rng(2).integers(0, MIXED.vocab_size, (1, 24)).astype(np.int32)
    paths = tuple(norm.path for norm in foldable(MIXED))
    length = jnp.int32(17)
    maxima = measure_norm_outputs(mixed, MIXED, paths, jnp.asarray(tokens), length)
    assert tuple(sorted(maxima)) == tuple(sorted(paths)) and len(paths) == 2 * MIXED.num_layers
    first = normalise(mixed.embed[tokens[0, :17]], mixed.layers[0].attention_norm, MIXED.norm)
    np.testing.assert_allclose(maxima["layers.0.attention_norm"], np.abs(first).max(0), rtol=1e-6)
    other = np.where(np.arange(24) < 17, tokens, 5)
    padded = measure_norm_outputs(mixed, MIXED, paths, jnp.asarray(other), length)
    assert all(np.array_equal(maxima[path], padded[path]) for path in paths)


# ---------------------------------------------------------------- 8 bits


@pytree
class Coded:
    """A weight that multiplies rows of int8 codes, with a scale per row."""

    array: Any
    ragged_dot_shapes = ()

    def einsum(self, equation: str, x: jax.Array, dtype: Any = None) -> jax.Array:
        scale = jnp.maximum(jnp.abs(x).max(-1, keepdims=True), 1e-9) / 127
        return einsum(equation, jnp.round(x / scale) * scale, self.array, dtype)

    def ragged_dot(self, *operands: Any) -> jax.Array:
        raise NotImplementedError


def coded(params: Decoder, norms: list[InputNorm]) -> Decoder:
    """The weights that read norms in int8, and their inputs too."""
    paths = {path for norm in norms for path in norm.quantised_axes}

    def encode(path: str, leaf: Any) -> Any:
        if path not in paths:
            return leaf
        return Coded(dequantise_weight(encode_weight(leaf, contracted_axes(path), "int8"), jnp.float32))

    return map_by_path(params, (), encode)


def with_outliers(params: Decoder, norms: list[InputNorm], size: int) -> Decoder:
    """The same function with 4 channels of each norm 30 times as large."""
    draw, leaves, replacements = np.random.default_rng(4), leaves_by_path(params), {}
    for norm in norms:
        factors = np.ones(size, np.float32)
        factors[draw.choice(size, 4, replace=False)] = 30
        replacements[f"{norm.path}.gain"] = leaves[f"{norm.path}.gain"] * factors
        for path, axis in norm.weight_axes.items():
            replacements[path] = multiply_rows(leaves[path], 1 / factors, axis)
    return map_by_path(params, (), lambda path, leaf: replacements.get(path, leaf))


@partial(jax.jit, static_argnames="config")
def log_probabilities(params: Decoder, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    hidden, _ = forward(params, config, tokens, positions, causal)
    return jax.nn.log_softmax(compute_logits(params, config, hidden))


def test_codes_lose_far_less_of_outliers_once_smoothed():
    from tokenizers import Tokenizer

    config, plain = load_hf(DEMO, "float32")
    norms = foldable(config)
    assert len(norms) == 2 * config.num_layers
    params = with_outliers(plain, norms, config.hidden_size)
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids = [tokenizer.encode(inspect.getsource(module)).ids[:128] for module in (json.decoder, json.encoder)]
    calibration, tokens = (jnp.asarray([part], jnp.int32) for part in ids)
    paths = tuple(norm.path for norm in norms)
    maxima = measure_norm_outputs(params, config, paths, calibration, jnp.int32(128))
    smoothed = smooth_params(params, norms, jax.tree.map(np.asarray, maxima))
    expected = log_probabilities(params, config, tokens)

    def divergence(model: Decoder) -> float:
        found = log_probabilities(coded(model, norms), config, tokens)
        return float((jnp.exp(expected) * (expected - found)).sum(-1).mean())

    rough, smooth = divergence(params), divergence(smoothed)
    assert 0 < smooth < rough / 10, (rough, smooth)
