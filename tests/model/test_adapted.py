"""Weights beside which rows have low-rank terms of their own."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from duetto.model.config import GroupedQuery, LayerKind
from duetto.model.layers import einsum
from duetto.model.weights.adapted import NO_ADAPTER, Adapted, adaptable, per_token
from duetto.model.weights.quant import quantised
from duetto.model.weights.transposed import transpose

from cases.models import LATENT, RANDOM, TINY  # isort: skip

EQUATIONS = {"btd,dnh->btnh": ((2, 3, 16), (16, 4, 6), 1), "btnh,nhd->btd": ((2, 3, 4, 4), (4, 4, 24), 2)}
FORMS = {
    "array": lambda w, inputs: w,
    "transposed": transpose,
    "int8": lambda w, inputs: quantised(w, tuple(range(-w.ndim, inputs - w.ndim)), "int8"),
}


def made(equation, form, dtype=jnp.float32, places=3, rank=4):
    """x, the weight alone, the same with terms, and those as one weight [places, *inputs, *outputs]."""
    of_x, of_w, inputs = EQUATIONS[equation]
    keys = jax.random.split(jax.random.key(0), 4)
    x, w = (jax.random.normal(k, s).astype(dtype) for k, s in zip(keys, (of_x, of_w), strict=False))
    a = jax.random.normal(keys[2], (*of_w[:inputs], places, rank)).astype(dtype)
    b = jax.random.normal(keys[3], (places, rank, *of_w[inputs:])).astype(dtype)
    base = FORMS[form](w, inputs)
    whole = np.stack([np.tensordot(np.asarray(a)[..., i, :], np.asarray(b)[i], 1) for i in range(places)])
    return x, base, Adapted(base, a, b), whole


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("equation", EQUATIONS)
def test_each_row_has_its_own_term_or_the_bits_of_the_weight(equation, form):
    x, base, weight, whole = made(equation, form)
    run = jax.jit(lambda x, w, owner: einsum(equation, x, replace(w, owner=owner)))
    plain = jax.jit(lambda x, w: einsum(equation, x, w))(x, base)
    for owners in ([2, NO_ADAPTER], [NO_ADAPTER, 0], [1, 1]):
        found = run(x, weight, jnp.asarray(owners, jnp.int32))
        for row, owner in enumerate(owners):
            if owner == NO_ADAPTER:
                np.testing.assert_array_equal(found[row], plain[row])
            else:
                term = jnp.einsum(equation, x, jnp.asarray(whole[owner]))[row]
                np.testing.assert_allclose(found[row], plain[row] + term, rtol=1e-4, atol=1e-4)


def test_no_place_rounds_otherwise():
    """Where one product over all ranks does, on a CPU."""
    x, w = jnp.ones((64, 1, 64)), jnp.zeros((64, 100))
    a, b = jax.random.normal(jax.random.key(0), (64, 3)), jax.random.normal(jax.random.key(1), (3, 100))
    weight = Adapted(w, jnp.stack([a] * 4, 1), jnp.stack([b] * 4), jnp.arange(64, dtype=jnp.int32) % 4)
    found = jax.jit(lambda x, w: einsum("btd,df->btf", x, w))(x, weight)
    np.testing.assert_array_equal(found, np.broadcast_to(found[:1], found.shape))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("equation", EQUATIONS)
def test_a_rows_bits_depend_on_neither_its_place_nor_what_the_others_hold(equation, dtype):
    x, _, weight, _ = made(equation, "array", dtype)
    run = jax.jit(lambda x, w, owner: einsum(equation, x, replace(w, owner=owner)))
    found = run(x, weight, jnp.asarray([0, 1], jnp.int32))
    order = np.array([2, 0, 1])
    moved = replace(weight, a=weight.a[..., order, :], b=weight.b[order].at[0].set(1e30))
    again = run(x, moved, jnp.asarray([1, 2], jnp.int32))
    assert jnp.isfinite(again).all()
    np.testing.assert_array_equal(np.asarray(again), np.asarray(found))


def test_terms_that_are_no_numbers_stay_with_their_rows():
    x, _, weight, _ = made("btd,dnh->btnh", "array")
    bad = replace(weight, a=weight.a.at[:, 2].set(jnp.nan), owner=jnp.asarray([NO_ADAPTER, 0], jnp.int32))
    assert jnp.isfinite(einsum("btd,dnh->btnh", x, bad)).all()


def test_rows_lead_or_are_flat():
    owner = jnp.asarray([4, 5], jnp.int32)
    assert per_token(owner, (2, 3)).tolist() == [[4] * 3, [5] * 3]
    assert per_token(owner, (6,)).tolist() == [4, 4, 4, 5, 5, 5] and per_token(owner, (2,)).tolist() == [4, 5]


def test_what_may_have_an_adapter():
    assert len(adaptable(TINY)) == 14
    mixed = adaptable(RANDOM["windows"])  # the last layer's feed-forward part are experts
    assert {path.rpartition(".")[0] for path in mixed} == {
        f"layers.{i}.{part}" for i in range(3) for part in ("attention", "ffn") if (i, part) != (2, "ffn")
    }
    latent = replace(TINY, layers=(LayerKind(LATENT, TINY.layers[0].ffn),))
    assert sorted(adaptable(latent)) == ["layers.0.ffn.down", "layers.0.ffn.gate", "layers.0.ffn.up"]
    assert isinstance(TINY.layers[0].keys, GroupedQuery)
