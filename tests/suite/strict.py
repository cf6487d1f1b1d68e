"""Settings of jax that raise where types are mixed, as environment variables: a process shares programs only
with processes of the same settings."""

STRICT = {"JAX_NUMPY_DTYPE_PROMOTION": "strict", "JAX_NUMPY_RANK_PROMOTION": "raise"}
