"""What grammars cost while they decode: eight rows, of which none, one and all are under a JSON Schema, in
turns in one engine. Prints a row for each run, of the model that ships and of a larger one with random
weights: milliseconds a token of rows without and with a grammar (in brackets: times those of no grammar),
tokens a second.

A decode is two programs here, as on accelerators: draws wait for what grammars allow, and nothing else does.
Runs that are `settled` take each step in before the next begins instead, as engines on a CPU do.

    python benchmarks/studies/structured.py
"""

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from duetto import LLM, RequestOutput, SamplingParams
from duetto.model.config import ModelConfig
from duetto.model.transformer import decoder_spec
from duetto.model.tree import init_params
from duetto.sampling_params import StructuredOutputsParams
from duetto.serve.engine.core.results import InFlightSteps
from duetto.serve.runtime.compiled import lowering

ROWS, TOKENS, ROUNDS = 8, 192, 7
CONFIG = ModelConfig.uniform(2048, 640, 2560, 8, 10, 5, 64, 1024)
SCHEMA = {"type": "string", "minLength": 4 * TOKENS}  # never at its end: most of the vocabulary is allowed
RUNS = {"none": 0, "one": 1, "all": ROWS}
RUNS |= {f"{name}, settled": count for name, count in RUNS.items()}


@contextmanager
def settled(wanted: bool) -> Iterator[None]:
    """Takes each step in before the next is planned."""
    usual = InFlightSteps.must_await_results
    if wanted:
        InFlightSteps.must_await_results = lambda self, may_defer: True
    try:
        yield
    finally:
        InFlightSteps.must_await_results = usual


def run(llm: LLM, constrained: int) -> tuple[list[RequestOutput], float]:
    """The outputs, and the seconds of steps that they took."""
    asked = StructuredOutputsParams(json=SCHEMA)
    params = [
        SamplingParams(seed=i, max_tokens=TOKENS, ignore_eos=True, structured_outputs=own)
        for i, own in enumerate([asked] * constrained + [None] * (ROWS - constrained))
    ]
    before = llm.report()["seconds"]
    outputs = llm.generate(["def read_lines(path):\n"] * ROWS, params, use_tqdm=False)
    return outputs, llm.report()["seconds"] - before


def milliseconds(outputs: list[RequestOutput]) -> float | None:
    return 1e3 * statistics.median(o.metrics.tpot for o in outputs if o.metrics) if outputs else None


def main() -> None:
    lowering.is_decode_split = lambda arguments: True
    options: dict[str, Any] = {"max_num_seqs": ROWS, "max_model_len": 256}
    with LLM(**options) as llm:
        study("2.4M", llm)
        words = llm.tokenizer
    weights = init_params(jax.random.key(0), decoder_spec(CONFIG))
    with LLM.from_params(CONFIG, weights, words, eos_token_ids=[0], **options) as llm:
        study("40M", llm)


def study(model: str, llm: LLM) -> None:
    run(llm, 1)
    while llm.engine.warmup is not None:
        run(llm, 1)
    assert llm.engine.can_defer_sampling, "no draw is deferred here"
    found: dict[str, list[tuple[float | None, float | None, float]]] = {name: [] for name in RUNS}
    for turn in range(ROUNDS + 1):
        for name, count in RUNS.items():
            with settled("settled" in name):
                outputs, seconds = run(llm, count)
            times = milliseconds(outputs[count:]), milliseconds(outputs[:count]), ROWS * TOKENS / seconds
            found[name] += [times] if turn else []  # the first warms up
    base = [own[0] for own in found["none"]]
    for name, rounds in found.items():
        cells = [shown([own[i] for own in rounds], base) for i in (0, 1)]
        rate = f"{statistics.median(r[2] for r in rounds):.0f}"
        print("|", " | ".join([model, name, *cells, rate]), "|", flush=True)


def shown(times: list[float | None], base: list[float | None]) -> str:
    """The median, and that of the ratios to the same round of `base`."""
    pairs = [(t, b) for t, b in zip(times, base, strict=True) if t is not None and b is not None]
    if not pairs:
        return ""
    return (
        f"{statistics.median(t for t, _ in pairs):.2f} ms ({statistics.median(t / b for t, b in pairs):.2f})"
    )


if __name__ == "__main__":
    main()
