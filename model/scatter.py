"""Indices of scatters that are unique, those that write nothing among them.

Flags that make a GPU's results reproducible (`xla_gpu_exclude_nondeterministic_ops`) turn a scatter whose
indices may meet into sorts of them; one with unique indices stays one kernel.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def apart(index: Int[Array, "*shape"], write: Bool[Array, "*shape"], size: int) -> Int[Array, "*shape"]:
    """The index where it is to `write`; elsewhere one past `size`, no two alike, which mode="drop" leaves
    out."""
    beyond = size + jnp.arange(index.size, dtype=jnp.int32).reshape(index.shape)
    return jnp.where(write, index, beyond)


def first_of_each(ids: Int[Array, "B ids"]) -> Bool[Array, "B ids"]:
    """True at the first occurrence of each id in its row."""
    n = ids.shape[1]
    before = jnp.tril(jnp.ones((1, n, n), bool), -1)
    return ~jnp.any((ids[:, :, None] == ids[:, None, :]) & before, axis=2)
