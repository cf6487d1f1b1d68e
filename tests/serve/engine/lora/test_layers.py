"""Adapters beside every kind of layer: latent attention, recurrent layers, shared and routed experts."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.adapters import merged
from cases.invariance import BASE, bits, prompts
from cases.models import EXPERTS, RANDOM, TINY
from cases.oracle import Model, continue_plainly
from cases.weights import decisive, drawn, logits
from suite.marks import full_if

from duetto import LLM, SamplingParams
from duetto.checkpoints.adapters.adapter import Adapter, AdapterReader, digest_terms
from duetto.lora.request import LoRARequest
from duetto.model.config import Dense, LayerKind
from duetto.model.experts import run_experts_ragged, run_experts_tiled
from duetto.model.ffn import FFN
from duetto.model.latent import MIN_EXPANDED_QUERIES
from duetto.model.recurrent.kinds import Mamba, ShortConv
from duetto.model.weights.lora import (
    Adapted,
    AdapterSizes,
    adaptable_specs,
    is_stacked_spec,
    lora_stacks,
    num_input_axes,
    with_lora_stacks,
    with_row_slots,
)
from duetto.serve.engine.lora.writer import add_lora_slots

CONFIGS = {
    "latent": RANDOM["latent"],
    "recurrent": RANDOM["recurrent"],
    "shared": replace(TINY, layers=(LayerKind(TINY.layers[0].mixer, replace(EXPERTS, shared_gate=True)),)),
    "routed": replace(TINY, layers=(LayerKind(TINY.layers[0].mixer, EXPERTS),)),
    "convolution and mamba": replace(
        TINY, layers=(LayerKind(ShortConv(2, 24), Dense(96)), LayerKind(Mamba(2, 4, 6, 5), Dense(96)))
    ),
}
RANK = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=1)


def model_of(name: str) -> Model:
    return Model(name, CONFIGS[name], drawn(decisive(CONFIGS[name])))


def adapter_of(model: Model, name: str) -> Adapter:
    """A random adapter that changes every weight that one may change, drawn by its name."""
    rng, terms = np.random.default_rng(ord(name)), {}
    for path, spec in adaptable_specs(model.config, routed=model.name == "routed").items():
        n, of = num_input_axes(spec), int(is_stacked_spec(spec))
        shapes = (*spec.shape[:n], RANK), (*spec.shape[:of], RANK, *spec.shape[n:])
        terms[path] = tuple(0.2 * rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return Adapter(name, RANK, terms, digest_terms(terms))


def with_terms(model: Model, adapter: Adapter) -> Model:
    """The model with one adapter beside its weights, for a batch of one row."""
    room = add_lora_slots(model.params, model.config, AdapterSizes(1, RANK, model.name == "routed"))
    stacks: dict[str, Any] = {path: (a[..., None, :], b[None]) for path, (a, b) in adapter.terms.items()}
    return replace(
        model, params=with_row_slots(with_lora_stacks(room, jax.device_put(stacks)), np.zeros(1, np.int32))
    )


@pytest.mark.full
@full_if(lambda name: name != "latent")
@pytest.mark.parametrize("name", CONFIGS)
def test_each_request_has_its_own_adapters_tokens(monkeypatch, name):
    """In chunks, in batches, with pages found: those of a pass without a cache, and alone the same bits."""
    model = model_of(name)
    monkeypatch.setattr(AdapterReader, "read", lambda _, folder, name: adapter_of(model, name))
    texts = [prompts(300)[i] for i in (1, 3, 5, 5)]
    whose = [LoRARequest("a", 1, "/a"), LoRARequest("b", 2, "/b"), None, LoRARequest("a", 1, "/a")]
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK, "decode_steps": 1}
    lora["lora_experts"] = name == "routed"
    with LLM.from_params(model.config, model.params, **BASE | lora) as llm:
        alone = []
        for text, own in zip(texts, whose, strict=True):
            llm.engine.tables.reset_prefix_cache()
            alone += [bits(o) for o in llm.generate(text, GREEDY, use_tqdm=False, lora_request=own)]
        llm.engine.tables.reset_prefix_cache()
        for hits in ([0, 0], [128, 128]):
            outputs = llm.generate(texts, GREEDY, use_tqdm=False, lora_request=whose)
            assert [bits(o) for o in outputs] == alone
            assert [o.num_cached_tokens for o in outputs][2:] == hits
    for text, own, found in zip(texts, whose, alone, strict=True):
        oracle = model if own is None else with_terms(model, adapter_of(model, own.lora_name))
        tokens = [token for token, *_ in found]
        assert tokens == continue_plainly(oracle, text, GREEDY, guess=tokens)
    assert alone[2] != alone[3]


def test_grouped_products_of_experts_have_each_rows_adapter():
    """As tiles do, which this device runs: rows of two adapters and of none, some of one expert."""
    rng, c = np.random.default_rng(0), replace(EXPERTS, count=4, groups=1, active_groups=1)
    D, shapes = 16, {"gate": (4, 16, 24), "up": (4, 16, 24), "down": (4, 24, 16)}

    def drawn_as(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    owner = jnp.array([1, -1, 0], jnp.int32)  # two tokens of each row
    weights = {
        name: Adapted(drawn_as(*shape), drawn_as(*shape[:2], 2, 3), drawn_as(2, 4, 3, shape[2]), owner)
        for name, shape in shapes.items()
    }
    x, chosen = drawn_as(6, D), jnp.array([[0, 1], [1, 2], [3, 1], [0, 3], [1, 0], [2, 0]], jnp.int32)
    f = FFN(**weights)
    tiled = jax.jit(run_experts_tiled, static_argnums=(1, 4))
    ragged = jax.jit(run_experts_ragged, static_argnums=1)
    tiles, grouped = tiled(f, c, x, chosen, 2), ragged(f, c, x, chosen)
    np.testing.assert_allclose(tiles, grouped, rtol=1e-4, atol=1e-3)
    for row, place in enumerate(owner.tolist()):
        own = {
            name: w.base + jnp.einsum("edr,erf->edf", w.a[:, :, place], w.b[place]) if place >= 0 else w.base
            for name, w in weights.items()
        }
        rows = slice(2 * row, 2 * row + 2)
        wanted = tiled(FFN(**own), c, x[rows], chosen[rows], 2)
        np.testing.assert_allclose(tiles[rows], wanted, rtol=1e-3, atol=1e-2)


def test_routed_experts_need_experts_on_one_device(tiny):
    with pytest.raises(ValueError, match="lora_experts is not allowed: the model has no experts"):
        LLM.from_params(tiny.config, tiny.params, **BASE | {"enable_lora": True, "lora_experts": True})


@pytest.mark.parametrize("name", CONFIGS)
def test_terms_equal_weights_that_they_are_merged_into(name):
    """For many tokens and for few, which latent attention computes in another way; each term counts."""
    model = model_of(name)
    adapter, config = adapter_of(model, "a"), model.config
    tokens = np.array([prompts(300)[3]], np.int32)

    def scores(params: Any, tokens: Any, count: int) -> jax.Array:
        return logits(params, config, tokens[:, :count])

    whole = with_terms(model, adapter).params

    def equal_scores(count: int) -> jax.Array:
        found, wanted = (scores(params, tokens, count) for params in (whole, merged(model.params, adapter)))
        np.testing.assert_allclose(found, wanted, atol=2e-3 * float(jnp.abs(wanted).max()))
        return found

    if name == "latent":
        equal_scores(MIN_EXPANDED_QUERIES - 1)
    found = equal_scores(MIN_EXPANDED_QUERIES + 5)
    for path in adapter.terms:
        a, b = lora_stacks(whole)[path]
        none = jax.device_put(np.zeros(b.shape, b.dtype))
        less = with_row_slots(
            with_lora_stacks(whole, lora_stacks(whole) | {path: (a, none)}), np.zeros(1, np.int32)
        )
        assert (scores(less, tokens, MIN_EXPANDED_QUERIES + 5) != found).any(), path
