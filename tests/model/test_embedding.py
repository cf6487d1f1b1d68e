"""Rows of an embedding in a program of several steps."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from duetto.model.transformer import lookup_embedding


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_loop_of_steps_copies_no_embedding_matrix(dtype: Any):
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((4096, 64)), dtype)

    def steps(matrix: Any, token: Any) -> Any:
        def step(i: Any, token: Any) -> Any:
            is_large = (lookup_embedding(matrix, token) > 100).any(-1)
            return (token + 1 + is_large.astype(jnp.int32)) % 4096

        return lookup_embedding(matrix, jax.lax.fori_loop(0, 5, step, token))

    token = jnp.array([[4093]], jnp.int32)
    program = jax.jit(steps).lower(matrix, token).compile()
    np.testing.assert_array_equal(program(matrix, token)[0, 0], matrix[2])
    memory = program.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < matrix.nbytes
