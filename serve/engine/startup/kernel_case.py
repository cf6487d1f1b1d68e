"""A check of one kernel: its arrays, and its reference."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ....model.gpus import Kernel


class KernelCase(NamedTuple):
    """A kernel with sizes of the engine.

    sizes: description of the sizes.
    reason: why programs do not use the kernel, whatever its check says; None if they would.
    inputs: makes the arguments of `run` and of `reference`.
    run: calls the kernel.
    reference: computes the same result without it.
    """

    kernel: Kernel
    sizes: str
    reason: str | None
    inputs: Callable[[], tuple[Any, ...]]
    run: Callable[..., Any]
    reference: Callable[..., Any]

    @property
    def name(self) -> str:
        return f"{self.kernel.name} {self.sizes}"


def random_normal(seed: int, shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def must_interpret() -> bool:
    """Return True on a CPU, which can only interpret a kernel."""
    default: Any = jax.config.values["jax_default_device"] or jax.local_devices()[0]
    return getattr(default, "platform", default) == "cpu"  # the setting may be a platform's name
