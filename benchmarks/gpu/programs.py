"""Whole compiled steps, and the share of their time that the roofline is."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext

import jax

from benchmarks.gpu.checks import reference_only
from benchmarks.gpu.profile import kernel_times
from benchmarks.gpu.run import Row, Run
from duetto.serve.cli.bench import Bench, measure_shape
from duetto.serve.runtime.compiled.shapes import ROW_TOKENS, Shape


def program(run: Run, shape: Shape, context: int, kernels: bool = True, each: int = 1) -> Row:
    """A compiled step's time, and its floor's share of it; `each` steps are in one dispatch."""
    gc.collect()
    with nullcontext() if kernels else reference_only():
        row = measure_shape(run.model, shape, context, run.repeats, run.peaks)
    assert row.floor is not None
    what = f"{shape}, context {context}" + ("" if kernels else ", without kernels")
    return Row(shape.phase, what, row.seconds * 1e3 / each, "ms", row.floor / row.seconds)


def bench_decode(run: Run) -> Iterator[Row]:
    for width in run.widths:
        yield program(run, Shape("decode", width, 1), run.context)


def bench_prefill(run: Run) -> Iterator[Row]:
    """A prompt in one row, and in the short rows in which several prompts share a call."""
    yield program(run, Shape("prefill", 1, run.prompt), 0)
    yield program(run, Shape("prefill", run.prompt // ROW_TOKENS, ROW_TOKENS), 0)


def bench_steps(run: Run) -> Iterator[Row]:
    """Four steps in one dispatch: what calling the program costs."""
    yield program(run, Shape("decode", run.widths[1], 4), run.context, each=4)


def bench_reference(run: Run) -> Iterator[Row]:
    yield program(run, Shape("decode", run.widths[1], 1), run.context, kernels=False)
    yield program(run, Shape("prefill", 1, run.prompt), 0, kernels=False)


def bench_kernels(run: Run) -> Iterator[Row]:
    """The longest kernels of a decode step of few rows and of many, summed by name; shares are of the sum of
    all."""
    for width in run.widths[:2]:
        gc.collect()
        bench = Bench(run.model, Shape("decode", width, 1), run.context)
        jax.block_until_ready(bench.step())
        found = kernel_times(bench.step, run.repeats)
        whole = sum(k.seconds for k in found)
        count = sum(k.calls for k in found)
        yield Row("kernels", f"all of {bench.shape}: {count} calls of {len(found)}", whole * 1e3, "ms")
        for kernel in found[: run.shown]:
            what = f"{bench.shape}: {kernel.calls} x {kernel.name[:44]}"
            yield Row("kernels", what, kernel.seconds * 1e6, "us", kernel.seconds / whole)
