"""What a trainer passes by mistake, and models and engines whose bits it cannot have, are refused by name."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from cases.models import RANDOM
from cases.trained import MODELS

from duetto import LLM
from duetto.cpu_kernels.library import load_library
from duetto.model.config import ModelConfig
from duetto.model.layers import Norm
from duetto.model.rope import Rope
from duetto.model.transformer import decoder_spec
from duetto.model.tree import init_params
from duetto.train import token_logprobs

pytestmark = pytest.mark.skipif(not load_library().isas, reason=load_library().refusal or "there are kernels")
TEXT = np.array([[1, 2, 3]])
LONGROPE = ModelConfig.uniform(
    300, 48, 80, 1, 4, 2, 16, 512,
    rope=Rope(
        kind="longrope", original_max_position=2, short_factors=(1.0,) * 8, long_factors=(2.0,) * 8, scale=1.1
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def small() -> Any:
    """A model of one layer."""
    config = replace(MODELS["dense"], layers=MODELS["dense"].layers[:1])
    params = init_params(jax.random.key(2), decoder_spec(config))
    return SimpleNamespace(config=config, params=jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, params))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"tokens": np.zeros(3, int)},
            r"tokens int.* \[3\] are not allowed: integers \[B,T\], B 1 or more, T 2 or more",
        ),
        ({"tokens": np.zeros((1, 3))}, "tokens float.* are not allowed: integers"),
        ({"tokens": np.array([[1, 2, 300]])}, "tokens has 300: from 0 to 299 is allowed"),
        ({"tokens": np.array([[1, -2, 3]])}, "tokens has -2"),
        ({"lengths": np.array([4])}, "lengths has 4: from 1 to 3 is allowed"),
        ({"lengths": np.array([0])}, "lengths has 0"),
        ({"lengths": np.array([1, 1])}, r"lengths int.* \[2\] are not allowed: integers \[1\]"),
        ({"temperature": 0.0}, "temperature 0.0 is not allowed: above 0, as greedy choices have no gradient"),
        ({"temperature": 1e-40}, "temperature 1e-40 is not allowed"),
        ({"tokens": np.zeros((0, 3), int)}, "B 1 or more"),
        ({"temperature": float("nan")}, "temperature nan is not allowed"),
        ({"temperature": np.ones(2)}, r"temperature \[2\] is not allowed: one number, or \[1\]"),
    ],
)
def test_input_that_is_refused_by_name(small, changed, message):
    with pytest.raises(ValueError, match=message):
        token_logprobs(small.params, small.config, **({"tokens": TEXT} | changed))


def test_narrow_integers_and_arrays_of_the_host(small):
    """A length may be beyond the range that a narrow dtype has for the number of tokens."""
    tokens, compute = np.arange(300)[None] % 100, partial(token_logprobs, config=small.config)
    expected = jax.jit(compute)(small.params, tokens=tokens, lengths=np.array([250]))
    host, lengths = jax.tree.map(np.asarray, small.params), np.array([250], np.uint8)
    narrow = jax.jit(lambda: compute(host, tokens=tokens.astype(np.int8), lengths=lengths))()
    np.testing.assert_array_equal(narrow, expected)
    assert (np.asarray(narrow)[0, :249] < 0).all() and narrow[0, 249] == 0


def test_known_tokens_are_checked_inside_of_jit(small):
    with pytest.raises(ValueError, match="tokens has 300"):
        jax.jit(lambda params: token_logprobs(params, small.config, np.array([[1, 2, 300]])))(small.params)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RANDOM["latent"], "layer 0 has a Latent, which XLA computes"),
        (RANDOM["distances"], "layer 0 has ALiBi's scores"),
        (RANDOM["recurrent"], "layer 0 has a DeltaNet"),
        (RANDOM["tiny"], "layer 0 has heads of 8 numbers; kernels take multiples of 16"),
        (LONGROPE, "computes keys anew at 2 tokens .longrope., and texts have 3"),
    ],
)
def test_models_without_exact_bits_are_refused(config, message):
    params = init_params(jax.random.key(0), decoder_spec(config))
    with pytest.raises(ValueError, match=f"exact log-probabilities are not possible: .*{message}"):
        token_logprobs(params, config, TEXT)
    plain = jax.jit(partial(token_logprobs, config=config, tokens=TEXT, exact=False))
    assert np.isfinite(plain(params)).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "weights are codes .quantization='int8'."),
        ({"kv_cache_dtype": "int8"}, "cache is not of float32 .kv_cache_dtype='int8'."),
    ],
)
def test_engines_whose_bits_a_trainer_cannot_have(small, options, message):
    sizes = {"max_num_seqs": 8, "max_model_len": 64, "max_prefill_tokens": 64, "cpu_kernels": True}
    with (
        LLM.from_params(small.config, small.params, **(sizes | options)) as llm,
        pytest.raises(ValueError, match=message),
    ):
        llm.logprobs_fn()


def test_parameters_that_are_refused_by_name(small):
    embed = small.params.embed
    with pytest.raises(ValueError, match="parameter embed of int32 is not allowed: floating-point"):
        token_logprobs(replace(small.params, embed=embed.astype(int)), small.config, TEXT, exact=False)
    with pytest.raises(ValueError, match="parameter norm.gain of bfloat16 is not allowed: float32"):
        gain = small.params.norm.gain.astype("bfloat16")
        token_logprobs(replace(small.params, norm=Norm(gain)), small.config, TEXT)
    with pytest.raises(ValueError, match="CPU kernels do not multiply float16, but bfloat16, float32"):
        token_logprobs(jax.tree.map(lambda x: x.astype("float16"), small.params), small.config, TEXT)
    with pytest.raises(ValueError, match=r"parameter embed has shape \(299, 48\), expected \(300, 48\)"):
        token_logprobs(replace(small.params, embed=embed[1:]), small.config, TEXT)
