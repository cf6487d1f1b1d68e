"""Speed of bfloat16 products on a CPU, relative to float32: measured for a second or a few at the first
start, and kept with the compiled programs."""

import time
from collections.abc import Sequence
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ....model.config import ModelConfig
from ....model.layers import einsum
from ....model.weights.transposed import transpose
from ...runtime.compiled import executable_cache
from ...runtime.compiled.shapes import SMALLEST_WIDTH

ROWS = SMALLEST_WIDTH, 64  # of a decode of few requests, and of a prefill
MOST = 1 << 25  # numbers in the weights that are multiplied: more of them fit in no cache
LEAST, LONGEST = 0.3, 3.0  # seconds of rounds: the least, and the most where the machine is busy
AGREE, WITHIN = 4, 1.1  # quickest calls of a product that have to be alike, and how much
DTYPES = "float32", "bfloat16"


class Layers(NamedTuple):
    """Feed-forward layers that are measured."""

    width: int  # of the model
    inner: int
    number: int

    @classmethod
    def of(cls, config: ModelConfig) -> "Layers":
        """Choose layers of a model: as many as MOST numbers allow, and a part of one if the model is
        large."""
        width = config.hidden_size
        inner = min(max(kind.inner for kind in config.layers) or 4 * width, max(MOST // (2 * width), 1))
        return cls(width, inner, max(1, min(len(config.layers), MOST // (2 * width * inner))))


def bfloat16_gain(device: Any, config: ModelConfig) -> float:
    """Return the seconds of a model's products in float32 over those in bfloat16, as the first start on this
    machine measured them."""
    return known_gain(device, Layers.of(config))


@cache
def known_gain(device: Any, layers: Layers) -> float:
    """Return the gain kept on disk, or else measure it. A process keeps to one value, even if it cannot be
    stored."""
    key = executable_cache.combined(
        [], "bfloat16 gain", executable_cache.environment(device), tuple(layers), ROWS
    )
    if (found := executable_cache.read(key, float)) is not None:
        return found
    gain = measured(device, layers)
    executable_cache.write(key, gain)
    return executable_cache.read(key, float) or gain


def measured(device: Any, layers: Layers) -> float:
    """Measure the gain: the geometric mean over ROWS of the ratio of the least seconds of a layer.

    Rounds take turns between the dtypes. Other load on the machine slows most calls, but hardly the quickest
    ones: rounds go on until the quickest calls of each product are alike.
    """
    runs = {}
    for dtype in DTYPES:
        weights = [weights_in(dtype, layers, device) for _ in range(layers.number)]
        for rows in ROWS:
            x = jnp.ones((rows, layers.width), dtype, device=device)
            runs[rows, dtype] = partial(seconds, weights, x)
    for run in runs.values():
        run()  # which compiles
    found: dict[Any, list[float]] = {key: [] for key in runs}
    begin = time.monotonic()
    while (spent := time.monotonic() - begin) < LONGEST:
        alike = (len(own) == AGREE and own[-1] < WITHIN * own[0] for own in found.values())
        if spent > LEAST and all(alike):
            break
        found = {key: sorted([*found[key], *run()])[:AGREE] for key, run in runs.items()}
    slow, fast = DTYPES
    return prod(found[rows, slow][0] / found[rows, fast][0] for rows in ROWS) ** (1 / len(ROWS))


def weights_in(dtype: str, layers: Layers, device: Any) -> tuple[Any, Any]:
    """Return a layer's two weights, in the form that a CPU multiplies fastest."""
    width, inner = layers.width, layers.inner
    up, down = (jnp.full(shape, 0.01, dtype, device=device) for shape in ((width, inner), (inner, width)))
    return (transpose(up, 1), transpose(down, 1)) if up.itemsize == 2 else (up, down)


def seconds(weights: Sequence[tuple[Any, Any]], x: Float[Array, "rows D"]) -> list[float]:
    """Return the seconds of a call for each layer; the weights do not fit the caches of the processor."""
    found = []
    for up, down in weights:
        begin = time.perf_counter()
        jax.block_until_ready(layer(x, up, down))
        found.append(time.perf_counter() - begin)
    return found


@jax.jit
def layer(x: Float[Array, "rows D"], up: Any, down: Any) -> Float[Array, "rows D"]:
    return einsum("...f,fd->...d", jax.nn.silu(einsum("...d,df->...f", x, up)), down)
