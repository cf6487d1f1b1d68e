"""Parts in which duetto and its peers do the same work in turns."""

import statistics
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.engines import (
    CONTINUOUS,
    LLAMA,
    OURS,
    OURS_CODES,
    OURS_CODES_STEPS,
    OURS_FREE,
    OURS_STEPS,
    OURS_XLA,
    STATIC,
    Served,
)
from benchmarks.harness import Bench, Row, rows_of
from benchmarks.traces import at_once, replayed
from benchmarks.worker import Worker


def decode(bench: Bench) -> Iterator[Row]:
    """Seconds of a decode step by rows and context."""
    engines = bench.chosen(OURS, OURS_STEPS, OURS_FREE, OURS_XLA, OURS_CODES, OURS_CODES_STEPS, LLAMA, STATIC)
    yield from steps(bench, "decode", engines, bench.amount.contexts)


def contract(bench: Bench) -> Iterator[Row]:
    """The same with the reproducibility contract on and off, at the first context."""
    engines = bench.chosen(OURS, OURS_FREE)
    yield from steps(bench, "contract", engines, bench.amount.contexts[:1], times=2)


def steps(
    bench: Bench, part: str, engines: list[str], contexts: tuple[int, ...], times: int = 1
) -> Iterator[Row]:
    amount = bench.amount
    for rows in amount.widths:
        for context in contexts:
            measure = partial(step_ms, rows=rows, context=context, steps=amount.steps * times)
            found = bench.in_turns(engines, amount.rounds, measure, warm=True)
            yield from rows_of(part, f"{rows} rows, context {context}", "ms", found)


def step_ms(worker: Worker, rows: int, context: int, steps: int) -> float:
    return 1e3 * worker.decode(rows, context, steps)


def prefill(bench: Bench) -> Iterator[Row]:
    """Prompt tokens a second of one new prompt, to its first token."""
    for length in bench.amount.lengths:
        engines = bench.chosen(OURS, OURS_XLA, LLAMA, STATIC)
        found = bench.in_turns(engines, bench.amount.rounds, lambda w, n=length: n / w.prefill(n), warm=True)
        yield from rows_of("prefill", f"{length} tokens", "tokens/s", found)


def throughput(bench: Bench) -> Iterator[Row]:
    """Tokens generated a second when all requests of the trace's beginning are there at once."""
    entries = bench.entries(bench.amount.requests)
    requests = at_once(entries, bench.vocabulary)
    prompt_tokens, output_tokens = (
        sum(entry.prompt_tokens for entry in entries),
        sum(entry.output_tokens for entry in entries),
    )
    bench.note(
        f"{len(entries)} requests, {prompt_tokens} prompt and {output_tokens} output tokens, {bench.scale}"
    )
    engines = bench.chosen(OURS, OURS_XLA, LLAMA)
    engines += [name for family in (STATIC, CONTINUOUS) for name in faster_dtype(bench, family)]
    found = bench.in_turns(engines, bench.amount.runs, lambda w: w.serve(requests))
    rates = {name: [tokens(run) / run.seconds for run in runs] for name, runs in found.items()}
    what = f"{len(entries)} requests at once"
    yield from rows_of("throughput", what, "tokens/s", rates)
    yield from agreement(what, {name: runs[0] for name, runs in found.items()})


def faster_dtype(bench: Bench, family: str) -> list[str]:
    """Of a peer's dtypes the one that serves the first requests faster; the first run of each does not
    count."""
    requests = at_once(bench.entries(bench.amount.pilot), bench.vocabulary)
    names = bench.chosen(family)
    if len(names) < 2:
        return names
    found = bench.in_turns(names, 1, lambda w: w.serve(requests).seconds, warm=True)
    bench.note("pilot: " + ", ".join(f"{name} {spent[0]:.1f} s" for name, spent in found.items()))
    best = min(found, key=lambda name: found[name][0], default=None)
    for name in set(found) - {best}:
        bench.workers.pop(name).close()
    return [best] if best else []


def tokens(run: Served) -> int:
    return sum(len(answer.tokens) for answer in run.answers)


def agreement(what: str, runs: dict[str, Served]) -> Iterator[Row]:
    """Share of an engine's first tokens that are ours: the check that all have loaded the same model."""
    for name, run in runs.items():
        if OURS in runs and name != OURS:
            pairs = zip(runs[OURS].answers, run.answers, strict=True)
            equal = [ours.tokens[0] == theirs.tokens[0] for ours, theirs in pairs]
            yield Row(
                "throughput", f"{what}: first tokens equal to ours", name, "%", [100 * statistics.mean(equal)]
            )


def serving(bench: Bench) -> Iterator[Row]:
    """Latencies while requests arrive as in the trace, at shares of the rate that duetto serves when all are
    there at once."""
    entries = bench.entries(bench.amount.load_requests)
    whole = bench.worker(OURS).serve(at_once(entries, bench.vocabulary))
    capacity = len(entries) / whole.seconds
    bench.note(f"{len(entries)} requests, {capacity:.2f} requests/s of {OURS} when all are there at once")
    engines, kept = bench.chosen(OURS) + faster_dtype(bench, LLAMA), {}
    for load in bench.amount.loads:
        requests = replayed(entries, bench.vocabulary, load * capacity)
        found = bench.in_turns(engines, 1, lambda w, r=requests: spans(w.serve(r)))
        for name, (spent,) in found.items():
            kept[name] = load * capacity if within(bench, spent) else kept.get(name, 0.0)
        for span in ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"):
            values = {name: [1e3 * spent[span]] for name, (spent,) in found.items()}
            yield from rows_of("serving", f"{load * capacity:.2f} requests/s, {span}", "ms", values)
    limits = f"TTFT p99 < {bench.ttft_limit:g} s and TPOT p99 < {bench.tpot_limit * 1e3:g} ms"
    rates = {name: [rate] for name, rate in kept.items()}
    yield from (
        Row("serving", f"highest rate with {limits}", name, "requests/s", r) for name, r in rates.items()
    )


def spans(run: Served) -> dict[str, float]:
    first = [a.ttft for a in run.answers if a.ttft is not None]
    each = [
        (a.e2e - a.ttft) / (len(a.tokens) - 1)
        for a in run.answers
        if a.ttft is not None and len(a.tokens) > 1
    ]
    named = (("TTFT", first), ("TPOT", each))
    return {f"{name} p{p}": float(np.percentile(x, p)) for name, x in named for p in (50, 99)}


def within(bench: Bench, spent: dict[str, float]) -> bool:
    return spent["TTFT p99"] < bench.ttft_limit and spent["TPOT p99"] < bench.tpot_limit
