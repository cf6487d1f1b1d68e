"""The part for short prompts: a job as of a classifier, with and without gathering its prompts."""

import math
from collections.abc import Iterator

import numpy as np

from benchmarks.engines import Served, Setting
from benchmarks.harness import Bench, Row, own_workers, rows_of
from benchmarks.traces import TraceEntry, at_once

PROMPT, ANSWER = (24, 36), (1, 41)  # tokens, both ends included: 30 and 21 on average
TIMES = 5  # as many requests as the other parts take
GATHERED, AT_ONCE = "gathered", "not gathered"
LONGEST = 128


def short(bench: Bench) -> Iterator[Row]:
    """Tokens generated a second, and the padding of prefills, where prompts wait for others to share their
    prefills and where each takes the first free seat."""
    requests = at_once(entries(TIMES * bench.amount.requests), bench.vocabulary)
    settings = {
        name: Setting(bench.seats, LONGEST, {"max_prefill_delay": hold, "enable_prefix_caching": False})
        for name, hold in ((GATHERED, math.inf), (AT_ONCE, 0.0))
    }
    found: dict[str, list[Served]] = {name: [] for name in settings}
    with own_workers(bench, settings) as workers:
        for _ in range(bench.amount.runs + 1):  # the first measures the steps' times, and does not count
            for name, worker in workers.items():
                found[name].append(worker.serve(requests))
    what = f"{len(requests)} prompts of {PROMPT[0]} to {PROMPT[1]} tokens at once"
    rates = {name: [rate(run) for run in runs[1:]] for name, runs in found.items()}
    yield from rows_of("short", what, "tokens/s", rates, references=(GATHERED,))
    for name, runs in found.items():
        yield Row(
            "short", f"{what}: padding of prefills", name, "%", [100 * padding(run) for run in runs[1:]]
        )


def entries(count: int) -> list[TraceEntry]:
    """Requests with short prompts and short answers, their lengths drawn evenly."""
    draw = np.random.default_rng(3)
    lengths = (draw.integers(first, last, count, endpoint=True) for first, last in (PROMPT, ANSWER))
    return [TraceEntry(0.0, int(prompt), int(answer)) for prompt, answer in zip(*lengths, strict=True)]


def rate(run: Served) -> float:
    return sum(len(answer.tokens) for answer in run.answers) / run.seconds


def padding(run: Served) -> float:
    """Share of padding in what was computed of prompts, none of which was cached."""
    steps = run.counts["steps"].items()
    computed = sum(n * area(name) for name, n in steps if name.startswith("prefill"))
    return 1 - run.counts["prompt_tokens"] / computed


def area(name: str) -> int:
    """Tokens that a shape of this name computes: prefill[8,32]."""
    return math.prod(int(n) for n in name[name.index("[") + 1 : -1].split(","))
