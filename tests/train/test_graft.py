"""A graft has the sampler's value and the derivative of a trainer's own pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from duetto.train import graft

REPORTED = np.log(np.array([[0.25, 0.5], [0.125, 0.75]], np.float32))
TARGETS = np.array([[0, 2], [1, 1]])


def own_logprobs(logits: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), TARGETS[..., None], axis=-1)[..., 0]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_graft_has_the_reported_value_and_the_other_derivative(wrap):
    logits = jax.random.normal(jax.random.key(0), (2, 2, 3))
    assert (own_logprobs(logits) != REPORTED).all()
    value, derivative = jax.vjp(wrap(lambda x: graft(REPORTED, own_logprobs(x))), logits)
    np.testing.assert_array_equal(value, REPORTED)
    cotangent = jnp.array([[1.0, -2.0], [0.5, 3.0]])
    np.testing.assert_allclose(
        *derivative(cotangent), *jax.vjp(own_logprobs, logits)[1](cotangent), rtol=1e-6
    )


def test_no_derivative_reaches_the_reported_value():
    gradient = jax.grad(lambda reported: graft(reported, jnp.zeros((2, 2))).sum())(jnp.asarray(REPORTED))
    np.testing.assert_array_equal(gradient, 0.0)


def test_shapes_and_dtypes_of_a_graft():
    with pytest.raises(ValueError, match=r"reported \[2, 2\] is not allowed: \[5\], as the other"):
        graft(REPORTED, jnp.zeros(5))
    gradient = jax.grad(lambda own: graft(REPORTED, 2 * own).sum())(jnp.zeros((2, 2), jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16 and (gradient == 2).all()
