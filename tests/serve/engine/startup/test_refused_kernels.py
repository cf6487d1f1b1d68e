"""A start that refuses every kernel serves with the bits of one that has none, whatever the feature."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases.gpus import served_as
from cases.invariance import BASE, PARAMS, bits, prompts
from jax.experimental import pallas

from duetto import LLM
from duetto.model.config import Dense, Experts, GroupedQuery, Latent, LayerKind, ModelConfig
from duetto.model.recurrent.kinds import DeltaNet
from duetto.model.transformer import decoder_spec
from duetto.model.tree import init_params
from duetto.model.weights.grouped_matmul import GROUPED_KERNEL

CHUNKS = {"max_prefill_tokens": 32, "max_num_seqs": 16, "page_size": 128, "decode_steps": 1}
TIGHT = {"max_batched_token_mem": 320, "page_size": 16, "max_prefill_tokens": 32}  # requests are preempted
# Layers of sizes that kernels of GPUs take, of each kind.
HEADS = LayerKind(GroupedQuery(4, 2, 16), Experts(4, 2, 64))
LATENT_ROWS = LayerKind(Latent(4, 32, 16, 16, 16), Dense(64))
STATES = LayerKind(DeltaNet(2, 4, 16, 16), Dense(64))
GUESSES = {
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 7, "adaptive": False},
    "decode_steps": 1,
}
WITH_KERNELS = {
    "heads, experts and latent rows": (
        (HEADS, LATENT_ROWS),
        {
            "attention_decode", "attention_prefill", "turn_and_write", "latent_decode", "latent_prefill",
            "expert_tiles",
        },
        (TIGHT, CHUNKS, GUESSES),
    ),
    "states": ((STATES,), {"recurrent_step"}, (TIGHT, CHUNKS)),
}  # fmt: skip


def unexpected(*_: Any, **__: Any) -> Any:
    raise AssertionError("a kernel that did not pass its check is traced")


@pytest.mark.full
@pytest.mark.parametrize("layers, kernels, variants", WITH_KERNELS.values(), ids=WITH_KERNELS)
@pytest.mark.usefixtures("few_shapes")
def test_a_start_that_refuses_every_kernel_gives_the_same_bits(layers, kernels, variants, monkeypatch):
    """On an H200 none of whose kernels passes its check: alone, together, from pages of earlier requests,
    through preemption, in chunks, and with draft tokens."""
    config = ModelConfig(300, 64, layers, 512)
    params = init_params(jax.random.key(0), decoder_spec(config), jnp.bfloat16)
    texts = prompts(config.vocab_size)

    def found(llm: LLM) -> list[Any]:
        alone = [llm.generate(t, p, use_tqdm=False)[0] for t, p in zip(texts, PARAMS, strict=True)]
        together = [bits(o) for o in llm.generate(texts, PARAMS, use_tqdm=False)]
        assert together == [bits(o) for o in alone]
        return together

    with LLM.from_params(config, params, **BASE) as llm:
        expected = found(llm)
        assert llm.report()["kernels"] == {}
    monkeypatch.setattr(pallas, "pallas_call", unexpected)
    with served_as("h200"):
        for options in ({}, *variants):
            with LLM.from_params(config, params, **BASE | options) as llm:
                report = llm.report()["kernels"]
                assert found(llm) == expected
            checks = [check for check in report.values() if check["kernel"] != GROUPED_KERNEL.name]
            assert {check["kernel"] for check in checks} == kernels
            assert all(check["reason"].startswith("AssertionError") for check in checks)
