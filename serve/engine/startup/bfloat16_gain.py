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
from ....model.weights.transposed import transpose_weight
from ...host.identity import gather_facts, hash_facts
from ...runtime.compiled import executable_cache
from ...runtime.compiled.shapes import MIN_DECODE_ROWS

ROW_COUNTS = MIN_DECODE_ROWS, 64  # rows of a decode of few requests, and of a prefill
MAX_WEIGHT_NUMBERS = 1 << 25  # numbers in the weights that are multiplied: this many exceed a CPU's caches
MIN_TRIAL_SECONDS, MAX_TRIAL_SECONDS = 0.3, 3.0  # minimum and maximum seconds of a measurement
ALIKE_CALLS, ALIKE_RATIO = 4, 1.1  # quickest calls of a product that must agree, and within which ratio
COMPARED_DTYPES = "float32", "bfloat16"


class TrialLayers(NamedTuple):
    """Sizes of the feed-forward layers that are measured.

    width: hidden size of the model.
    inner: inner size of a layer.
    number: layers.
    """

    width: int
    inner: int
    number: int

    @classmethod
    def from_config(cls, config: ModelConfig) -> "TrialLayers":
        """Return as many of a model's layers as MAX_WEIGHT_NUMBERS allow; a part of one if the model is
        large."""
        width = config.hidden_size
        inner = min(
            max(kind.inner_size for kind in config.layers) or 4 * width,
            max(MAX_WEIGHT_NUMBERS // (2 * width), 1),
        )
        return cls(width, inner, max(1, min(len(config.layers), MAX_WEIGHT_NUMBERS // (2 * width * inner))))


def bfloat16_gain(device: Any, config: ModelConfig) -> float:
    """Return the seconds of a model's products in float32 over those in bfloat16, as the first start on this
    machine measured them."""
    return load_or_measure_gain(device, TrialLayers.from_config(config))


@cache
def load_or_measure_gain(device: Any, layers: TrialLayers) -> float:
    """Return the gain stored on disk, or measure and store it. A process uses one value, stored or not."""
    key = hash_facts("bfloat16 gain", gather_facts("program", device), tuple(layers), ROW_COUNTS)
    if (stored := executable_cache.read_record(key, float)) is not None:
        return stored
    gain = measure_gain(device, layers)
    executable_cache.write_record(key, gain)
    return executable_cache.read_record(key, float) or gain


def measure_gain(device: Any, layers: TrialLayers) -> float:
    """Measure the gain: seconds in float32 over seconds in bfloat16, as a geometric mean over ROW_COUNTS.

    Rounds alternate between the dtypes. Other load slows most calls, but hardly the quickest ones. So rounds
    continue until the ALIKE_CALLS quickest calls of each product agree.
    """
    runs = {}
    for dtype in COMPARED_DTYPES:
        weights = [make_layer_weights(dtype, layers, device) for _ in range(layers.number)]
        for rows in ROW_COUNTS:
            x = jnp.ones((rows, layers.width), dtype, device=device)
            runs[rows, dtype] = partial(time_layers, weights, x)
    for run in runs.values():
        run()  # compiles
    quickest: dict[Any, list[float]] = {key: [] for key in runs}
    begin = time.monotonic()
    while (spent := time.monotonic() - begin) < MAX_TRIAL_SECONDS:
        alike = (
            len(calls) == ALIKE_CALLS and calls[-1] < ALIKE_RATIO * calls[0] for calls in quickest.values()
        )
        if spent > MIN_TRIAL_SECONDS and all(alike):
            break
        quickest = {key: sorted([*quickest[key], *run()])[:ALIKE_CALLS] for key, run in runs.items()}
    slow, fast = COMPARED_DTYPES
    return prod(quickest[rows, slow][0] / quickest[rows, fast][0] for rows in ROW_COUNTS) ** (
        1 / len(ROW_COUNTS)
    )


def make_layer_weights(dtype: str, layers: TrialLayers, device: Any) -> tuple[Any, Any]:
    """Return a layer's two weights, in the form that a CPU multiplies fastest."""
    width, inner = layers.width, layers.inner
    up, down = (jnp.full(shape, 0.01, dtype, device=device) for shape in ((width, inner), (inner, width)))
    return (transpose_weight(up, 1), transpose_weight(down, 1)) if up.itemsize == 2 else (up, down)


def time_layers(weights: Sequence[tuple[Any, Any]], x: Float[Array, "rows D"]) -> list[float]:
    """Return the seconds of a call of each layer. The weights of all layers exceed the processor's caches."""
    times = []
    for up, down in weights:
        begin = time.perf_counter()
        jax.block_until_ready(multiply_layer(x, up, down))
        times.append(time.perf_counter() - begin)
    return times


@jax.jit
def multiply_layer(x: Float[Array, "rows D"], up: Any, down: Any) -> Float[Array, "rows D"]:
    return einsum("...f,fd->...d", jax.nn.silu(einsum("...d,df->...f", x, up)), down)
