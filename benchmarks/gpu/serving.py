"""Whole engines: the start, and the tokens a second of many requests."""

import gc
import time
from collections.abc import Iterator
from dataclasses import asdict

from benchmarks.gpu.run import PAGE, Row, Run
from duetto import LLM, SamplingParams
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline.floor import demand
from duetto.serve.runtime.compiled.shapes import Shape


def bench_serving(run: Run) -> Iterator[Row]:
    """A start, then two batches of as many requests as there are seats, each with its own prompt."""
    gc.collect()
    rows, prompt, output = run.widths[-1], run.prompt // 8, run.prompt // 32
    options = EngineOptions(
        max_num_seqs=rows, max_model_len=prompt + output, max_batched_token_mem=rows * (prompt + output),
        page_size=PAGE, background_compilation=False, enable_prefix_caching=False,
    )  # fmt: skip
    begin = time.monotonic()
    with LLM.from_params(
        run.model.config, run.model.params, compilation_cache=None, **asdict(options)
    ) as llm:
        what = f"start, {len(llm.engine.programs.steps)} programs"
        yield Row("serving", what, time.monotonic() - begin, "s")
        params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        seconds = 0.0
        for turn in range(2):
            prompts = [[(13 * r + 7 * i + turn) % 9999 + 3 for i in range(prompt)] for r in range(rows)]
            begin = time.monotonic()
            llm.generate(prompts, params, use_tqdm=False)
            seconds = time.monotonic() - begin
        what = f"{rows} requests, {prompt} + {output} tokens"
        least = least_seconds(run, rows, prompt, output)
        yield Row("serving", what, rows * output / seconds, "tokens/s", least / seconds)
        for name, count in sorted(llm.report()["steps"].items()):
            yield Row("serving", f"steps of {name}", count, "of both")


def least_seconds(run: Run, rows: int, prompt: int, output: int) -> float:
    """The roofline of one prompt after another, and of all steps at their mean context."""

    def floor(shape: Shape, context: int) -> float:
        least = demand(shape, run.model.config, run.model.dtype, context)
        return least.floor(run.peaks.flops(run.model.dtype), run.peaks.bandwidth)

    steps = output * floor(Shape("decode", rows, 1), prompt + output // 2)
    return rows * floor(Shape("prefill", 1, prompt), 0) + steps
