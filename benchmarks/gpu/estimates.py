"""What estimates from compiled programs (docs/accelerators.md) turn out to be: shares are of the
bytes that a program touches at this device's measured bandwidth."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from unittest.mock import patch

import jax
import jax.numpy as jnp

from benchmarks.gpu.profile import kernel_times
from benchmarks.gpu.run import PAGE, Row, Run, guarded
from duetto import LLM
from duetto.model.gpus import NO_CUBLAS_OPTIONS, XLA_GPU_OPTIONS
from duetto.model.tree import init_params
from duetto.model.weights.compression.compress import form_spec
from duetto.model.weights.device_forms import convert_to_device_forms
from duetto.serve.cli.bench import Bench, BenchModel, median_seconds
from duetto.serve.engine.startup.model_folder import choose_device_forms, convert_to_engine_layout
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline.floor import describe_pool_buffers
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.program_facts import read_program_facts
from duetto.serve.runtime.compiled import executable_cache
from duetto.serve.runtime.compiled.shapes import Shape

LAYERS = 4
# presets, and the forms of weights that each is measured in; "fixed" are products of one configuration
FORMS = {
    "30b-a3b": (None, "int4"),
    "gpt-oss-20b": (None, "int4"),
    "deepseek-v3": (None,),
    "qwen3.5-4b": (None,),
    "8b": (None, "fixed", "int8", "fp8", "int4"),
}
# XLA's options for a step; under the contract some have no product of cuBLAS, which may split sums
OTHERS: dict[str, dict[str, str]] = {"duetto's": {}, "no cuBLAS": NO_CUBLAS_OPTIONS}
LOAD = EngineOptions(
    max_num_seqs=256,
    max_prefill_tokens=2048,
    max_model_len=4096,
    page_size=PAGE,
    max_batched_token_mem=1 << 15,
    background_compilation=False,
)
TINY = replace(LOAD, max_num_seqs=8, max_prefill_tokens=128, max_model_len=256, max_batched_token_mem=None)


def model_of(run: Run, name: str, form: str | None) -> BenchModel:
    """Random weights of a preset that is cut to few layers, in a form."""
    config = replace(PRESETS[name], layers=PRESETS[name].layers[: run.layers or LAYERS])
    is_fixed = form == "fixed"
    params = init_params(
        jax.random.key(0), form_spec(config, None if is_fixed else form), jnp.dtype(run.dtype)
    )
    options = EngineOptions(page_size=PAGE, batch_invariant_matmul=is_fixed)
    return BenchModel(
        name,
        config,
        convert_to_device_forms(convert_to_engine_layout(params, options), choose_device_forms(options)),
        options,
    )


def bench_estimates(run: Run) -> Iterator[Row]:
    """A decode of each model and form, cut to few layers."""
    shape = Shape("decode", run.widths[1], 1)
    for name, forms in ({run.shape: (None, "fixed", "int8")} if run.dry else FORMS).items():
        for form in forms:
            gc.collect()
            what = f"{name}{f' {form}' if form else ''}, {run.layers or LAYERS} layers, {shape}"
            yield from guarded("estimates", what, *timed(run, model_of(run, name, form), shape))


def bench_options(run: Run) -> Iterator[Row]:
    """The kernels of a step of few layers with other options of XLA; its bits are those of `classes`."""
    model = model_of(run, run.shape, None)
    model = replace(model, options=replace(model.options, reproducible=False))
    shapes = [*(Shape("decode", width, 1) for width in run.widths), Shape("prefill", 1, run.prompt)]
    for name, options in OTHERS.items():
        with (
            patch.dict(XLA_GPU_OPTIONS, options),
            patch.object(executable_cache, "program_folder", lambda: None),
        ):
            for shape in shapes:
                gc.collect()
                bench = Bench(model, shape, run.context if shape.phase == "decode" else 0)
                kernels = kernel_times(bench.step, run.repeats)
                whole = sum(kernel.seconds for kernel in kernels)
                yield Row("options", f"{name}, {shape}: {kernels[0].name[:40]} first", whole * 1e6, "us")


def timed(run: Run, model: BenchModel, shape: Shape) -> tuple[Callable[[], float], str, float]:
    """How to measure a program, the unit, and the estimate from the bytes that it touches."""
    bench = Bench(model, shape, run.context)
    read = describe_pool_buffers(shape, model.config.layers, bench.state.cache, run.context)
    parts = bench.executor.programs.step_parts(shape)
    touched = sum(read_program_facts(part, read).bytes for part in parts)
    return lambda: median_seconds(bench.step, run.repeats), "ms", touched / run.peaks.bandwidth


def bench_classes(run: Run) -> Iterator[Row]:
    """Of an engine's shapes, those with the canonical bits; with and without products of one
    configuration."""
    config = replace(PRESETS[run.shape], layers=PRESETS[run.shape].layers[: run.layers or LAYERS])
    params = init_params(jax.random.key(0), form_spec(config, None), jnp.dtype(run.dtype))
    for batch_invariant_matmul in (False, True):
        options = replace(TINY if run.dry else LOAD, batch_invariant_matmul=batch_invariant_matmul)
        with LLM.from_params(config, params, compilation_cache=None, **asdict(options)) as llm:
            found, every = llm.engine.classes, list(llm.engine.programs.steps)
        what = "fixed products" if batch_invariant_matmul else "XLA's products"
        same = len(found.prefill) + len(found.decode)
        shapes = " ".join(map(str, (*found.prefill, *found.decode)))
        print(f"  {what}: {shapes} of {' '.join(map(str, sorted(every)))}", flush=True)
        yield Row("classes", f"shapes of one class, {what}", same, f"of {len(every)}", same / len(every))
        yield Row("classes", f"prefill and decode of one class, {what}", float(found.same_bits), "of 1")
