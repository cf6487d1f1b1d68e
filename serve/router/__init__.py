"""A router: one address for several servers of a model. A light process: nothing here imports jax."""
