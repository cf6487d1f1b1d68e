"""Products of codes with codes have the bits of one device, however the weight is split; of 4-bit codes where
its inputs are not."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from suite.fixtures import random_model

from duetto import LLM, SamplingParams
from duetto.model.config import Experts
from duetto.model.experts import MoE, experts_spec, run_moe, with_expert_axes
from duetto.model.layers import einsum
from duetto.model.sharding import make_axis_rules, make_shardings, sharded_axes
from duetto.model.tree import has_instance, init_params, is_spec
from duetto.model.weights.compression.compress import quantize_params
from duetto.model.weights.device_forms import DeviceForms, convert_to_device_forms
from duetto.model.weights.input_quantised import InputQuantised
from duetto.model.weights.quant import quantise_weight
from duetto.serve.engine.startup.mesh import place_params

DEVICES = 4
SIZES = {"max_model_len": 160, "max_num_seqs": 4, "max_prefill_tokens": 64, "page_size": 16}
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True)
PROMPTS = [[(k * i * i + i) % 300 for i in range(n)] for k, n in enumerate((62, 110, 3))]


def split_array(array: jax.Array, axis: int, count: int) -> jax.Array:
    names = ["tensor" if i == axis and n > 1 else None for i, n in enumerate(array.shape)]
    mesh = Mesh(np.array(jax.devices()[:count]), ("tensor",))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*names)))


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("axis", [0, 2], ids=["inputs", "outputs"])
def test_a_split_weight_gives_the_bits_of_one_device(count: int, axis: int):
    """One shared largest number, and integers: nothing that is added up has an order."""
    rng, equation = np.random.default_rng(0), "btnh,nhd->btd"
    x = jnp.asarray(rng.normal(size=(3, 5, 8, 16)), jnp.bfloat16)
    w = quantise_weight(jnp.asarray(rng.normal(size=(8, 16, 48)), jnp.float32), (-3, -2), "int8")
    assert w is not None
    expected = jax.jit(einsum, static_argnums=0)(equation, x, InputQuantised(w))
    split = InputQuantised(jax.tree.map(lambda array: split_array(array, axis, count), w))
    rows = split_array(x, 2 if axis == 0 else -1, count)
    product = jax.block_until_ready(jax.jit(einsum, static_argnums=0)(equation, rows, split))
    np.testing.assert_array_equal(product, expected)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("by_expert", [False, True], ids=["parts", "whole"])
def test_a_split_shared_expert_gives_the_bits_of_one_device(count: int, by_expert: bool):
    """Beside routed experts that add nothing, whose own sums are of floats."""
    kind, mesh = Experts(4, 2, 64, shared=64), Mesh(np.array(jax.devices()[:count]), ("tensor",))
    specs = jax.tree.map(lambda s: replace(s, scale=0.3), experts_spec(kind, 48, 4), is_leaf=is_spec)
    drawn = init_params(jax.random.key(0), specs)
    whole = replace(drawn, experts=jax.tree.map(jnp.zeros_like, drawn.experts))
    split = place_params(make_shardings(specs, mesh, make_axis_rules(mesh, by_expert)), whole)
    whole, split = code_layer(whole), code_layer(split)
    assert isinstance(split.shared.down, InputQuantised) and sharded_axes(split.shared.down.weight.values, 0)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(5, 1, 48)), jnp.bfloat16)
    everywhere = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
    run = jax.jit(partial(run_moe, c=kind))
    expected, found = run(whole, x=x), jax.block_until_ready(run(split, x=everywhere))
    assert np.asarray(expected).any()
    np.testing.assert_array_equal(found, expected)


def code_layer(layer: MoE) -> Any:
    """The layer as an engine serves it with activations in int8."""
    tree = quantize_params({"layers": {"ffn": layer}}, "int8")
    return convert_to_device_forms(tree, DeviceForms(activations="int8"))["layers"]["ffn"]


@pytest.mark.parametrize("axis", [0, 2], ids=["inputs", "outputs"])
def test_groups_of_inputs_are_added_up_by_device(axis: int):
    """Each device has the sum of its own groups, in float32. Without a split of inputs the bits are equal."""
    rng, equation = np.random.default_rng(0), "btnh,nhd->btd"
    x = jnp.asarray(rng.normal(size=(3, 5, 8, 16)), jnp.float32)
    w = quantise_weight(jnp.asarray(rng.normal(size=(8, 16, 48)), jnp.float32), (-3, -2), "int4")
    assert w is not None
    multiply = jax.jit(einsum, static_argnums=0)
    expected = multiply(equation, x, InputQuantised(w))
    rows = split_array(x, 2 if axis == 0 else -1, 4)
    parts = InputQuantised(jax.tree.map(lambda array: split_array(array, axis, 4), w))
    program = multiply.lower(equation, rows, parts).compile()
    product = jax.block_until_ready(program(rows, parts))
    assert "all-gather" not in str(program.as_text())
    if axis == 0:
        np.testing.assert_allclose(product, expected, rtol=1e-5, atol=1e-4)
    else:
        np.testing.assert_array_equal(product, expected)


@pytest.mark.parametrize("count", [2, 4])
def test_experts_on_several_devices_give_the_bits_of_one(count: int):
    """Each device multiplies by whole experts; two numbers are added up, which has no order."""
    c, D = Experts(4, 2, 24), 32
    made = init_params(jax.random.key(0), experts_spec(c, D, 1))
    experts = jax.tree.map(lambda w: InputQuantised(quantise_weight(w, (-2,), "int8")), made.experts)
    coded = replace(made, experts=experts)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3, D)), jnp.float32)
    expected = jax.jit(run_moe, static_argnums=1)(coded, c, x)
    mesh = Mesh(np.array(jax.devices()[:count]), ("expert",))

    def placed(array: jax.Array, name: str | None) -> jax.Array:
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(name)))

    split = replace(
        jax.tree.map(lambda array: placed(array, None), coded),
        experts=jax.tree.map(lambda array: placed(array, "expert"), coded.experts),
    )
    split = with_expert_axes(split)
    assert split.expert_axes.experts == ("expert",)
    with jax.set_mesh(mesh):
        product = jax.block_until_ready(jax.jit(run_moe, static_argnums=1)(split, c, placed(x, None)))
    np.testing.assert_array_equal(product, expected)


@pytest.mark.parametrize("name, own", [("tiny", {}), ("windows", {"enable_expert_parallel": True})])
def test_served_tokens_are_those_of_one_device(name: str, own: dict[str, Any]):
    """Logits are sums of floats, and split otherwise."""
    model = random_model(name)

    def answers(**options: Any) -> list[object]:
        with LLM.from_params(model.config, model.params, **SIZES, quantization="int8", **options) as llm:
            assert has_instance(llm.engine.params, InputQuantised) == ("activations" in options)
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        return [out.outputs[0].token_ids for out in outputs]

    split = answers(activations="int8", tensor_parallel_size=2, **own)
    assert split == answers(activations="int8")
