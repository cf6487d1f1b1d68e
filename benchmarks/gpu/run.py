"""One figure, and what is measured: a model of a size, and what this device could reach."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from duetto.model.transformer import decoder_spec
from duetto.model.tree import init_params
from duetto.serve.cli.bench import BenchModel, median_seconds
from duetto.serve.engine.startup.model_folder import convert_to_engine_layout
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.targets import Peaks

PAGE = 64


class Row(NamedTuple):
    """One figure; `share` is what it reaches of a ceiling, or of what should be."""

    part: str
    what: str
    value: float
    unit: str
    share: float | None = None


@dataclass(frozen=True)
class Run:
    """What is measured: a preset cut to so many layers, at these widths, tokens in the cache and lengths of a
    prompt."""

    shape: str = "8b"
    layers: int | None = None
    dtype: str = "bfloat16"
    widths: tuple[int, ...] = (1, 64, 256)
    context: int = 1024
    long: int = 8192
    prompt: int = 4096
    repeats: int = 10
    shown: int = 24
    dry: bool = False

    @cached_property
    def peaks(self) -> Peaks:
        """Operations and bytes a second of this device, as a product and a copy reach them. The copy is of
        float32: XLA's of 16-bit numbers is slower."""
        n, size = (256, 1 << 20) if self.dry else (8192, 1 << 30)
        square, long = jnp.ones((n, n), jnp.bfloat16), jnp.ones(size // 4, jnp.float32)
        product = median_seconds(partial(jax.jit(jnp.matmul), square, square), self.repeats)
        copied = median_seconds(partial(jax.jit(jnp.negative), long), self.repeats)
        return Peaks(2 * n**3 / product, 2 * n**3 / product, 2 * size / copied, 0.0, 0)

    @cached_property
    def model(self) -> BenchModel:
        """Random weights of the shape."""
        config = PRESETS[self.shape]
        config = replace(config, layers=config.layers[: self.layers])
        params = init_params(jax.random.key(0), decoder_spec(config), jnp.dtype(self.dtype))
        options = EngineOptions(page_size=PAGE)
        return BenchModel(self.shape, config, convert_to_engine_layout(params, options), options)


DRY = Run("135m", 1, "float32", (1, 2), 64, 128, 64, 1, 4, dry=True)


def guarded(part: str, what: str, measured: Callable[[], float], unit: str, least: float) -> Iterator[Row]:
    """A row of a time and the share that the least possible is of it; what cannot run here is said and left
    out."""
    try:
        seconds = measured()
    except Exception as error:  # noqa: BLE001 - a peer's failure must not end the run
        print(f"  {part}: {what} does not run: {str(error).splitlines()[0][:120]}", flush=True)
        return
    scale = {"us": 1e6, "ms": 1e3}[unit]
    yield Row(part, what, seconds * scale, unit, least / seconds)
