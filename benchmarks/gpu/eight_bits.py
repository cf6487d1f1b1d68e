"""Products in eight bits beside those in 16: alone, and in whole steps."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu.programs import program
from benchmarks.gpu.run import PAGE, Row, Run, guarded
from duetto.model.gpus import disable_kernels
from duetto.model.layers import einsum
from duetto.model.transformer import decoder_spec
from duetto.model.tree import init_params, pytree
from duetto.model.weights.compression.compress import convert_weight_form
from duetto.model.weights.gpu.code_tiles import CODE_PRODUCT_KERNEL, ROW_CODES_KERNEL, multiply_by_kernel
from duetto.model.weights.gpu.transposed_codes import (
    TransposedCodes,
    quantise_matrix_rows,
    return_row,
    transpose_codes,
)
from duetto.model.weights.input_quantised import InputQuantised
from duetto.model.weights.quant import Quantised, quantise_weight
from duetto.serve.cli.bench import BenchModel, median_seconds
from duetto.serve.engine.startup.model_folder import convert_to_engine_layout
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.runtime.compiled.shapes import Shape

LAYERS = 4  # of a step
SCHEMES = "int8", "fp8"


@pytree
class KernelCodes(TransposedCodes):
    """Codes that the kernel multiplies at any number of rows."""


def multiply(x: jax.Array, w: Any) -> jax.Array:
    """The product of rows and a weight."""
    if not isinstance(w, KernelCodes):
        return einsum("td,df->tf", x, w)
    rows = quantise_matrix_rows((x,), return_row, w.activations)
    return multiply_by_kernel(rows, (w.weight,), x.dtype, interpret=jax.default_backend() == "cpu")[0]


def coded(weight: jax.Array, scheme: str) -> TransposedCodes:
    quantised = quantise_weight(weight, (-2,), scheme)
    assert isinstance(quantised, Quantised)
    return transpose_codes(InputQuantised(quantised, scheme), 1)


def seconds_of_pair(x: jax.Array, weights: tuple[Any, Any], kernels: bool, times: int) -> float:
    """Seconds of two products, the second back to the width of the first one's rows, in a program of so
    many."""

    @jax.jit
    def repeated(x: jax.Array, weights: tuple[Any, Any]) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, x: multiply(multiply(x, weights[0]), weights[1]), x)

    with disable_kernels([] if kernels else [CODE_PRODUCT_KERNEL.name, ROW_CODES_KERNEL.name]):
        return median_seconds(partial(repeated, x, weights), 1) / times


def bench_eight_bits(run: Run) -> Iterator[Row]:
    """Products of the feed-forward layer, up and down, then steps of a few layers. Shares of products are of
    16 bits' ceilings, so that more than all is a gain."""
    config, times = PRESETS[run.shape], 1 if run.dry else 20
    D, F = config.hidden_size, config.layers[0].inner_size
    keys = jax.random.split(jax.random.key(0), 2)
    up, down = (
        jax.random.normal(key, shape, jnp.bfloat16) / shape[0] ** 0.5
        for key, shape in zip(keys, ((D, F), (F, D)), strict=True)
    )
    weights = {"bfloat16": (up, down)} | {name: (coded(up, name), coded(down, name)) for name in SCHEMES}
    int8 = weights["int8"]
    by_kernel = tuple(KernelCodes(*(getattr(w, f) for f in w.__dataclass_fields__)) for w in int8)
    ways = [(name, pair, True) for name, pair in weights.items()]
    ways += [("int8 by XLA", int8, False), ("int8 by the kernel", by_kernel, True)]
    for rows in (*run.widths, run.prompt):
        x = jax.random.normal(keys[0], (rows, D), jnp.bfloat16)
        least = max(4 * D * F / run.peaks.bandwidth, 4 * rows * D * F / run.peaks.flops16)
        for name, pair, kernels in ways:
            measured = partial(seconds_of_pair, x, pair, kernels, times)
            yield from guarded("eight_bits", f"{name}, {rows} rows, {D}x{F} and back", measured, "us", least)
    yield from bench_coded_steps(run)


def bench_coded_steps(run: Run) -> Iterator[Row]:
    """Decode and prefill of a few layers, in 16 bits, of int8 weights, and with both in 8 bits."""
    config = PRESETS[run.shape]
    config = replace(config, layers=config.layers[: min(LAYERS, run.layers or LAYERS)])
    forms = (None, None), ("int8", None), ("int8", "int8"), ("fp8", "fp8")
    for scheme, activations in forms:
        options = EngineOptions(page_size=PAGE, quantization=scheme, activations=activations)
        params = init_params(jax.random.key(0), decoder_spec(config), jnp.dtype(run.dtype))
        params = convert_to_engine_layout(
            convert_weight_form(params, scheme, run.dtype, donate=True), options
        )
        one = replace(run)
        one.__dict__["model"] = BenchModel(run.shape, config, params, options)  # as if it were cached
        name = "16 bits" if scheme is None else f"{scheme} x {activations or '16 bits'}"
        shapes = (Shape("decode", run.widths[1], 1), run.context), (Shape("prefill", 1, run.prompt), 0)
        for shape, context in shapes:
            row = program(one, shape, context)
            yield row._replace(part="eight_bits", what=f"{name}, {len(config.layers)} layers, {row.what}")
