"""Which weights of a model are compressed, in few bits or low rank, and what that costs its answers."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.weights import PRODUCTS, dense, drawn, product, random

from duetto.checkpoints.huggingface import load_hf
from duetto.model.config import ModelConfig
from duetto.model.transformer import Decoder, decoder_spec
from duetto.model.tree import leaves_by_path
from duetto.model.weights.compression.compress import (
    CONTRACTED_AXES,
    CompressionPlan,
    compress,
    encode_weight,
    projection_plan,
    quantize_params,
)
from duetto.model.weights.compression.lowrank import factorise_weight

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_compressed_and_what_is_not(mixed: Decoder):
    found = leaves_by_path(
        compress(mixed, CompressionPlan((("head", "int8"), ("*.shared.*", "fp8"), ("layers.*", "int4"))))
    )
    assert found["head.values"].dtype == jnp.int8
    assert found["layers.1.ffn.shared.up.values"].dtype == jnp.float8_e4m3fn
    assert found["layers.1.ffn.experts.up.values"].dtype == jnp.uint8
    whole = leaves_by_path(mixed)
    for name in (
        "embed",
        "layers.1.ffn.router",
        "layers.1.ffn.correction",
        "layers.2.attention.sinks",
        "norm.gain",
    ):
        assert found[name] is whole[name]


def test_a_tied_embedding_stays_whole():
    config = ModelConfig.uniform(32, 16, 32, 1, 2, 1, 8, tied_embeddings=True)
    params = compress(drawn(decoder_spec(config)), projection_plan("int8"))
    assert params.head is None and params.embed.dtype == jnp.float32
    with pytest.raises(ValueError, match="rule 'head' meets no weight"):
        compress(params, CompressionPlan((("head", "int8"),)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("how", ["int3", "fp4", 0.0, 1.0, 2])
def test_unknown_ways_are_refused(how: Any):
    with pytest.raises(ValueError, match=f"{how!r} for 'layers.*' is not allowed: int8, int4, fp8"):
        projection_plan(how)


def test_weights_are_freed_one_by_one():
    params = drawn(decoder_spec(ModelConfig.uniform(32, 16, 32, 2, 2, 1, 8)))
    kept = quantize_params(params, "int8")
    assert not any(x.is_deleted() for x in jax.tree.leaves(params))
    given = quantize_params(params, "int8", donate=True)
    jax.tree.map(np.testing.assert_array_equal, given, kept)
    assert leaves_by_path(params)["layers.1.ffn.up"].is_deleted() and not params.embed.is_deleted()


def test_compressing_twice_compiles_once():
    params = drawn(decoder_spec(ModelConfig.uniform(32, 16, 32, 2, 2, 1, 8)))
    quantize_params(params, "int8")
    with jax.no_tracing():
        quantize_params(params, "int8")


@pytest.mark.parametrize("name", ["q", "o", "k_up", "down"])
def test_a_low_rank_is_the_best_of_its_rank(name: str):
    """The error is that of the singular values left out (Eckart and Young)."""
    equation, left, right = PRODUCTS[name]
    w, axes = random(*right, seed=1), CONTRACTED_AXES[name]
    record = encode_weight(w, axes, 0.6)
    inputs = -axes[-1] - 1
    matrix = np.asarray(w, np.float64).reshape(-1, int(np.prod(right[len(right) - inputs :])))
    rank = record.a.shape[-1]
    assert rank * sum(matrix.shape) <= 0.6 * matrix.size < (rank + 1) * sum(matrix.shape)
    left_out = np.linalg.svd(matrix)[1][rank:]
    whole = dense(record)
    error = np.linalg.norm(np.asarray(whole) - np.asarray(w))
    np.testing.assert_allclose(error, np.linalg.norm(left_out), rtol=1e-4)
    x = random(*left)
    np.testing.assert_allclose(
        product(equation, x, record), np.einsum(equation, x, whole), rtol=1e-4, atol=1e-4
    )


def test_a_weight_of_low_rank_loses_nothing():
    w = np.asarray(random(3, 40, 4)) @ np.asarray(random(3, 4, 60, seed=1))
    record = encode_weight(w, (-2,), 0.2)
    assert record.a.shape == (3, 40, 4) and record.b.shape == (3, 4, 60)
    np.testing.assert_allclose(np.asarray(record.a) @ np.asarray(record.b), w, atol=1e-4)
    assert (
        factorise_weight(random(4, 4), (-2,), 0.4) is None
        and factorise_weight(random(9, 9), (-1,), 0.5) is None
    )


@pytest.fixture(scope="module")
def quality() -> Iterator[ModuleType]:
    """The benchmark's own functions."""
    file = ROOT / "benchmarks" / "studies" / "quality.py"
    spec = importlib.util.spec_from_file_location("quality", file)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "quality", module)
        patch.syspath_prepend(str(ROOT / "examples"))
        spec.loader.exec_module(module)
        yield module


@pytest.mark.full
def test_what_compression_costs_the_demo_model(quality: ModuleType):
    """Bounds with room above what is measured; see docs/quantization.md."""
    config, params = load_hf(ROOT / "checkpoints" / "demo", jnp.float32)
    text = quality.held_out(2048)
    whole = quality.measure(config, params, params, text)
    assert whole.agreement == 1 and whole.divergence < 1e-6 and whole.perplexity < 25
    bounds = {
        "int8": (0.01, 0.98, 0.26),
        "fp8": (0.01, 0.96, 0.26),
        "int4": (0.03, 0.88, 0.15),
        "0.9": (0.7, 0.55, 0.91),
    }
    for case, (worse, agreement, ratio) in bounds.items():
        found = quality.measure(config, params, compress(params, quality.plan(case)), text)
        assert found.perplexity < (1 + worse) * whole.perplexity, case
        assert agreement < found.agreement < 1, case
        assert found.projections < ratio * whole.projections, case
