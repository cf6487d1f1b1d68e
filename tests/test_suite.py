"""The suite's own tables agree with its tests, and what stands in for the library's programs with these."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from suite import quick
from suite.groups import UNMATCHED


def test_each_row_of_repetitions_matches_a_test(request: pytest.FixtureRequest):
    if any("::" in argument for argument in request.config.args):
        pytest.skip("single tests were asked for")
    assert request.config.stash[UNMATCHED] == []


@pytest.mark.parametrize(
    "dtype, shape",
    [
        ("float32", ()), ("float32", (5,)), ("float32", (3, 4, 7)), ("bfloat16", (3, 4, 7)),
        ("float8_e4m3fn", (5, 2)), ("int8", (5, 2)), ("uint8", (5, 2)), ("int4", (5, 2)),
    ],
)  # fmt: skip
def test_weights_are_examined_by_numpy_as_on_devices(dtype: str, shape: tuple[int, ...]):
    drawn = np.random.default_rng(0).normal(size=shape) * 4
    own = jax.device_put(drawn.astype(jnp.dtype(dtype)))
    np.testing.assert_array_equal(quick.digest(own), quick.ON_DEVICES["digest"](own))
    assert quick.fingerprint([own, own]) == quick.ON_DEVICES["fingerprint"]([own, own])
    if jnp.issubdtype(own.dtype, jnp.floating):
        wrong = [jax.device_put(np.full(shape, value, own.dtype)) for value in (np.nan, np.inf)]
        for x in (own, *wrong):
            assert quick.all_finite(x) == quick.ON_DEVICES["all_finite"](x)
