"""Weights beside which rows have low-rank terms of their own."""

from dataclasses import replace
from itertools import product as product_of

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.weights import product, random

from duetto.model.config import LayerKind
from duetto.model.layers import einsum
from duetto.model.weights.lora import NO_ADAPTER, Adapted, adaptable_specs, repeat_per_token
from duetto.model.weights.quant import quantise_weight
from duetto.model.weights.transposed import transpose_weight

from cases.models import EXPERTS, LATENT, RANDOM, TINY  # isort: skip

EQUATIONS = {
    "btd,dnh->btnh": ((2, 3, 16), (16, 4, 6), 1),
    "btnh,nhd->btd": ((2, 3, 4, 4), (4, 4, 24), 2),
    "btnh,rnh->btnr": ((2, 3, 4, 6), (16, 4, 6), 1),  # by outputs: latent attention's keys
}
FORMS = {
    "array": lambda w, inputs: w,
    "transposed": transpose_weight,
    "int8": lambda w, inputs: quantise_weight(w, tuple(range(-w.ndim, inputs - w.ndim)), "int8"),
}


def made(equation, form, dtype=jnp.float32, places=3, rank=4):
    """x, the weight alone, the same with terms, and those as one weight [places, *inputs, *outputs]."""
    of_x, of_w, inputs = EQUATIONS[equation]
    of_a, of_b = (*of_w[:inputs], places, rank), (places, rank, *of_w[inputs:])
    x, w, a, b = (random(*s, seed=i, dtype=dtype) for i, s in enumerate((of_x, of_w, of_a, of_b)))
    base = jax.jit(FORMS[form], static_argnums=1)(w, inputs)
    whole = np.stack([np.tensordot(np.asarray(a)[..., i, :], np.asarray(b)[i], 1) for i in range(places)])
    return x, base, Adapted(base, a, b), whole


@pytest.mark.parametrize(
    ("equation", "form"),
    [pair for pair in product_of(EQUATIONS, FORMS) if pair != ("btnh,rnh->btnr", "transposed")],
)
def test_rows_have_their_adapters_term_or_the_weights_bits(equation, form):
    x, base, weight, whole = made(equation, form)
    run = jax.jit(lambda x, w, owner: einsum(equation, x, replace(w, row_slots=owner)))
    plain = np.asarray(product(equation, x, base))
    for owners in ([2, NO_ADAPTER], [NO_ADAPTER, 0], [1, 1]):
        found = np.asarray(run(x, weight, np.array(owners, np.int32)))
        for row, owner in enumerate(owners):
            if owner == NO_ADAPTER:
                np.testing.assert_array_equal(found[row], plain[row])
            else:
                term = np.einsum(equation, x, whole[owner])[row]
                np.testing.assert_allclose(found[row], plain[row] + term, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("equation", EQUATIONS)
def test_a_single_row_has_its_term_in_sixteen_bits(equation):
    x, base, weight, whole = made(equation, "array", jnp.bfloat16)
    x = x[:1, :1]
    found = product(equation, x, replace(weight, row_slots=jnp.array([2], jnp.int32)))
    plain, term = (
        product(equation, x, base),
        np.einsum(equation, *(np.asarray(y, np.float32) for y in (x, whole[2]))),
    )
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(plain, np.float32) + term, rtol=0.02, atol=0.05
    )


def test_each_row_of_a_batch_rounds_alike():
    """Where one product over all ranks does, on a CPU."""
    x, w = np.ones((64, 1, 64), np.float32), np.zeros((64, 100), np.float32)
    a, b = (np.asarray(random(*shape, seed=i)) for i, shape in enumerate([(64, 3), (3, 100)]))
    owner = np.arange(64, dtype=np.int32) % 4
    weight = Adapted(*map(jax.device_put, (w, np.stack([a] * 4, 1), np.stack([b] * 4), owner)))
    found = np.asarray(product("btd,df->btf", x, weight))
    np.testing.assert_array_equal(found, np.broadcast_to(found[:1], found.shape))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_row_bits_do_not_depend_on_slots_or_other_adapters(equation, dtype):
    x, _, weight, _ = made(equation, "array", dtype)
    run = jax.jit(lambda x, w, owner: einsum(equation, x, replace(w, row_slots=owner)))
    found = run(x, weight, np.array([0, 1], np.int32))
    order = np.array([2, 0, 1])
    a, b = np.array(weight.a)[..., order, :], np.array(weight.b)[order]
    b[0] = 1e30
    again = np.asarray(run(x, replace(weight, a=a, b=b), np.array([1, 2], np.int32)))
    assert np.isfinite(again.astype(np.float32)).all()
    np.testing.assert_array_equal(again, np.asarray(found))


def test_terms_that_are_no_numbers_stay_with_their_rows():
    x, _, weight, _ = made("btd,dnh->btnh", "array")
    a = np.array(weight.a)
    a[:, 2] = np.nan
    bad = replace(weight, a=a, row_slots=np.array([NO_ADAPTER, 0], np.int32))
    assert np.isfinite(product("btd,dnh->btnh", x, bad)).all()


def test_rows_that_are_selected_keep_their_adapters():
    x, _, weight, _ = made("btd,dnh->btnh", "array")
    whole, rows = replace(weight, row_slots=jnp.array([2, NO_ADAPTER], jnp.int32)), jnp.array([1, 0, 0])
    expected = np.asarray(product("btd,dnh->btnh", x, whole))[rows]
    np.testing.assert_array_equal(product("btd,dnh->btnh", x[rows], whole.select_rows(rows)), expected)
    assert weight.select_rows(rows) is weight  # it has no rows of a batch


def test_rows_lead_or_are_flat():
    owner, each = np.array([4, 5], np.int32), jax.jit(repeat_per_token, static_argnums=1)
    assert each(owner, (2, 3)).tolist() == [[4] * 3, [5] * 3]
    assert each(owner, (6,)).tolist() == [4, 4, 4, 5, 5, 5] and each(owner, (2,)).tolist() == [4, 5]


def test_adaptable_parameters_are_listed():
    assert len(adaptable_specs(TINY)) == 14
    mixed = adaptable_specs(RANDOM["windows"])  # the last layer's feed-forward part are experts
    assert {path.rpartition(".")[0] for path in mixed} == {
        f"layers.{i}.{part}" for i in range(3) for part in ("attention", "ffn") if (i, part) != (2, "ffn")
    }
    latent = replace(TINY, layers=(LayerKind(LATENT, EXPERTS),))
    attention = {f"layers.0.attention.{x}" for x in ("q_down", "q_up", "kv_down", "k_up", "v_up", "o")}
    shared = {f"layers.0.ffn.shared.{x}" for x in ("gate", "up", "down")}
    assert set(adaptable_specs(latent)) == attention | shared
    assert set(adaptable_specs(latent, has_mesh=True)) == attention
