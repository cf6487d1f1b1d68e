"""Attention and feed-forward layers apart, on two virtual devices of this machine, of one core each, against
one of them: 32 requests decode in 1, 2 and 3 micro-batches. Prints a row for each: tokens a second, beside
those of one device, and the share of time in which the parts had nothing to do.

    python -m benchmarks.studies.halves
"""

import statistics
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from duetto import LLM, SamplingParams
from duetto.model.config import Dense
from duetto.model.transformer import decoder_spec
from duetto.model.tree import init

from .pipeline import CONFIG, ROUNDS, ROWS, TOKENS, measured

EVEN = replace(  # either half of a layer has as many weights
    CONFIG, layers=tuple(replace(kind, ffn=Dense(512)) for kind in CONFIG.layers)
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)


def alone(llm: LLM, requests: list[Any]) -> dict[str, Any]:
    before = llm.report()["seconds"]
    llm.generate(requests, GREEDY, use_tqdm=False)
    return {"rate": ROWS * TOKENS / (llm.report()["seconds"] - before), "bubbles": 0.0}


def main() -> None:
    draw = np.random.default_rng(0).integers
    requests = [{"prompt_token_ids": draw(3, 2048, 8).tolist()} for _ in range(ROWS)]
    options: dict[str, Any] = {"max_num_seqs": ROWS, "max_model_len": 256, "use_tqdm_on_load": False}
    whole = init(jax.random.key(0), decoder_spec(EVEN))
    engines = {0: LLM.from_params(EVEN, whole, **options)}
    options |= {"experimental_ffn_devices": 1}
    engines |= {m: LLM.from_params(EVEN, whole, micro_batches=m, **options) for m in (1, 2, 3)}
    runs: dict[int, list[dict[str, Any]]] = {m: [] for m in engines}
    for turn in range(ROUNDS + 1):
        for m, llm in engines.items():
            found = measured(llm, requests) if m else alone(llm, requests)
            runs[m] += [found] if turn else []  # the first warms up
    rates = {m: statistics.median(run["rate"] for run in found) for m, found in runs.items()}
    for m, found in runs.items():
        idle = statistics.median(run["bubbles"] for run in found)
        cells = f"{rates[m]:.0f}", f"{rates[m] / rates[0]:.2f}", f"{100 * idle:.0f} %" if m else "-"
        print("|", " | ".join([str(m) if m else "one device", *cells]), "|", flush=True)


if __name__ == "__main__":
    main()
