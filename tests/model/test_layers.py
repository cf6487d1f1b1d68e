"""The one product of activations and a weight, in 16 bits: a CPU takes another way to the same numbers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.weights import product, random
from suite.marks import full_if

from duetto.model.layers import einsum, is_single_row

pytestmark = pytest.mark.as_served


@full_if(lambda rows, dtype: dtype == jnp.float16 and rows != (2, 5))
@pytest.mark.parametrize("rows", [(1, 1), (1, 2), (3, 1), (2, 5)], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_a_product_in_16_bits_is_the_float32_product_rounded(rows: tuple[int, int], dtype: jnp.dtype):
    x, w = (random(*s, seed=i, dtype=dtype) for i, s in enumerate([(*rows, 96), (96, 4, 24)]))
    wide = np.einsum("btd,dnh->btnh", np.asarray(x, np.float64), np.asarray(w, np.float64))
    found = product("btd,dnh->btnh", x, w)
    assert found.dtype == dtype
    step = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(found, np.float64), wide, rtol=step / 2, atol=1e-4)
    exact = product("btd,dnh->btnh", x, w, jnp.float32)
    assert exact.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(exact), wide, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_cpu_sums_in_float32_and_never_makes_one_row(rows: int):
    x, w = (random(*shape, dtype=jnp.bfloat16) for shape in ((rows, 1, 96), (96, 24)))
    traced = jax.jit(partial(einsum, "btd,df->btf")).trace(x, w)
    cpu, cuda = (traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "cuda"))
    assert f"-> tensor<{max(rows, 2)}x1x24xf32>" in cpu
    assert f"-> tensor<{rows}x1x24xbf16>" in cuda and "xf32>" not in cuda


def test_one_row_is_known_by_its_shape():
    def found(equation: str, *shape: int) -> bool:
        return is_single_row(equation, random(*shape))

    assert found("btd,dnh->btnh", 1, 1, 8) and found("...d,vd->...v", 1, 8)
    assert found("btnh,nhd->btd", 1, 1, 2, 4)
    assert not found("btd,dnh->btnh", 1, 2, 8) and not found("btd,dnh->btnh", 2, 1, 8)
    assert not found("...d,df->...f", 8)
    assert not found("btYZ,YZnh->Ybtnh", 1, 1, 3, 4)  # the first axis of what is made is another
    assert not found("kbqh,kbsh->kbqs", 1, 1, 1, 8)  # k and b are of both
