"""Whole engines: the start, and the tokens a second of many requests."""

import gc
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any
from unittest.mock import patch

from benchmarks.gpu.profile import kernel_times
from benchmarks.gpu.run import PAGE, Row, Run
from duetto import LLM, SamplingParams
from duetto.model.gpus import COMMAND_BUFFER_OPS, XLA_GPU_OPTIONS
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline.floor import program_demand
from duetto.serve.runtime.compiled.shapes import Shape

# Ways to launch a step. A command buffer is updated where addresses have changed, and captures cuBLAS's
# kernels anew for it.
LAUNCHES: dict[str, dict[str, Any]] = {
    "duetto's": {},
    "cuBLAS by the host": {
        "xla_gpu_enable_command_buffer": COMMAND_BUFFER_OPS.replace("CUBLAS,CUBLASLT,", "")
    },
    "all by the host": {"xla_gpu_enable_command_buffer": ""},
    "temporaries apart": {"xla_gpu_temp_buffer_use_separate_color": True},
}
LAUNCHED_LAYERS, FEW = 16, 24  # layers, and tokens of a request, so that most steps read prompts


def engine_for(run: Run, rows: int, length: int) -> LLM:
    """An engine whose seats are as many requests of a length."""
    gc.collect()
    options = EngineOptions(
        max_num_seqs=rows, max_model_len=length, max_batched_token_mem=rows * length,
        page_size=PAGE, background_compilation=False, enable_prefix_caching=False,
    )  # fmt: skip
    return LLM.from_params(run.model.config, run.model.params, compilation_cache=None, **asdict(options))


def generate(llm: LLM, rows: int, prompt: int, output: int, turn: int) -> float:
    """Seconds of a batch of requests, each with its own prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
    prompts = [[(13 * r + 7 * i + turn) % 9999 + 3 for i in range(prompt)] for r in range(rows)]
    begin = time.monotonic()
    llm.generate(prompts, params, use_tqdm=False)
    return time.monotonic() - begin


def bench_launches(run: Run) -> Iterator[Row]:
    """A batch that mostly reads prompts, by ways to launch steps; shares are those of time in kernels."""
    run = replace(run, layers=run.layers or LAUNCHED_LAYERS)
    rows, prompt = run.widths[-1], run.prompt // 8
    for name, options in LAUNCHES.items():
        with patch.dict(XLA_GPU_OPTIONS, options), engine_for(run, rows, prompt + FEW) as llm:
            seconds = min(generate(llm, rows, prompt, FEW, turn) for turn in range(3))
            kernels = kernel_times(lambda llm=llm: generate(llm, rows, prompt, FEW, 3), 1)
        busy = sum(kernel.seconds for kernel in kernels)
        what = f"{name}: {rows} requests, {prompt} + {FEW} tokens"
        yield Row("launches", what, seconds, "s", busy / seconds)


def bench_serving(run: Run) -> Iterator[Row]:
    """A start, then two batches of as many requests as there are seats, each with its own prompt."""
    rows, prompt, output = run.widths[-1], run.prompt // 8, run.prompt // 32
    begin = time.monotonic()
    with engine_for(run, rows, prompt + output) as llm:
        what = f"start, {len(llm.engine.programs.steps)} programs"
        yield Row("serving", what, time.monotonic() - begin, "s")
        seconds = [generate(llm, rows, prompt, output, turn) for turn in range(2)][-1]
        what = f"{rows} requests, {prompt} + {output} tokens"
        least = least_seconds(run, rows, prompt, output)
        yield Row("serving", what, rows * output / seconds, "tokens/s", least / seconds)
        for name, count in sorted(llm.report()["steps"].items()):
            yield Row("serving", f"steps of {name}", count, "of both")


def least_seconds(run: Run, rows: int, prompt: int, output: int) -> float:
    """The roofline of one prompt after another, and of all steps at their mean context."""

    def floor(shape: Shape, context: int) -> float:
        least = program_demand(shape, run.model.config, run.model.dtype, context)
        return least.floor_seconds(run.peaks.flops(run.model.dtype), run.peaks.bandwidth)

    steps = output * floor(Shape("decode", rows, 1), prompt + output // 2)
    return rows * floor(Shape("prefill", 1, prompt), 0) + steps
