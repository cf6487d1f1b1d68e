"""Bubbles of two stages on two virtual devices of this machine, of one core each: 32 requests decode in 1, 2
and 4 micro-batches. Prints a row of the table in docs/parallelism.md for each: tokens a second, the share of
time in which the stages had nothing to do by their own clocks, and what the formulas say.

    python benchmarks/studies/pipeline.py
"""

import os

FLAGS = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ["JAX_PLATFORMS"] = "cpu"

import statistics
from typing import Any

import jax
import numpy as np

from duetto import LLM, SamplingParams
from duetto.model.config import ModelConfig
from duetto.model.transformer import decoder_spec
from duetto.model.tree import init_params
from duetto.serve.planner.roofline.bubbles import drained_bubbles, steady_bubbles

ROWS, TOKENS, ROUNDS = 32, 128, 3
CONFIG = ModelConfig.uniform(2048, 512, 2048, 8, 8, 4, 64, 1024)


def measured(llm: LLM, requests: list[Any]) -> dict[str, Any]:
    """Tokens a second and what the stages' clocks say of a run."""
    executor: Any = llm.engine.executor
    executor.stages.clock.reset()
    before = llm.report()["seconds"]
    llm.generate(
        requests, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True), use_tqdm=False
    )
    report = llm.report()
    return report["stages"] | {"rate": ROWS * TOKENS / (report["seconds"] - before)}


def main() -> None:
    draw = np.random.default_rng(0).integers
    requests = [{"prompt_token_ids": draw(3, 2048, 8).tolist()} for _ in range(ROWS)]
    options: dict[str, Any] = {"max_num_seqs": ROWS, "max_model_len": 256, "use_tqdm_on_load": False}
    whole = init_params(jax.random.key(0), decoder_spec(CONFIG))
    options |= {"pipeline_parallel_size": 2}
    engines = {m: LLM.from_params(CONFIG, whole, micro_batches=m, **options) for m in (1, 2, 4)}
    runs: dict[int, list[dict[str, Any]]] = {m: [] for m in engines}
    for turn in range(ROUNDS + 1):
        for m, llm in engines.items():
            found = measured(llm, requests)
            runs[m] += [found] if turn else []  # the first warms up
    for m, found in runs.items():
        median = {key: statistics.median(run[key] for run in found) for key in ("rate", "bubbles")}
        busy = np.median([run["busy_seconds"] for run in found], axis=0).tolist()
        cells = f"{median['rate']:.0f}", f"{100 * median['bubbles']:.0f} %"
        formulas = f"{100 * steady_bubbles(busy, m):.0f} %", f"{100 * drained_bubbles(2, m):.0f} %"
        print("|", " | ".join([str(m), str(ROWS // m), *cells, *formulas]), "|", flush=True)


if __name__ == "__main__":
    main()
