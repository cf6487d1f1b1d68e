"""The part for pages beyond the pool: conversations whose pages are ten times what the pool holds."""

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import OURS_NARROW, Served, Setting
from benchmarks.harness import Bench, Row, own_workers, rows_of
from benchmarks.parts.beside import spans
from benchmarks.traces import BLOCK_TOKENS, conversations, read, with_prefixes

DIVISOR = 32
PAGE = BLOCK_TOKENS // DIVISOR  # a block of the trace is a page
LONGEST = 2048  # tokens of a prompt
TURNS = 2  # requests of a conversation at least: what is said once is found nowhere
SHARE = 10  # of the trace's pages, the pool holds one in so many
LOAD = 0.8  # of the rate that an engine without tiers serves
SPACE = 8  # GiB of a tier
OFF = "no tier"


def tiers(bench: Bench) -> Iterator[Row]:
    """The Mooncake trace's conversations in bfloat16, arriving at a rate that an engine without tiers bears:
    how much of the prompts is found, how much computed, and what that does to latencies."""
    found_in_trace = read(bench.mooncake)
    longest = min(LONGEST, bench.config["max_position_embeddings"] // 2)
    entries = conversations(found_in_trace, 2 * bench.amount.prefix_requests, longest * DIVISOR, TURNS)
    requests = with_prefixes(entries, bench.vocabulary, DIVISOR)
    room = max(len(r.prompt) + r.output for r in requests)
    distinct = len({name for entry in entries for name in entry.blocks}) * PAGE
    memory = {"max_batched_token_mem": max(distinct // SHARE, room), "page_size": PAGE}
    prompts = sum(len(r.prompt) for r in requests)
    bench.note(f"{len(requests)} requests, {prompts} prompt tokens, {distinct} of them distinct, {memory}")
    with tempfile.TemporaryDirectory() as folder:
        options = {name: memory | own for name, own in choices(Path(folder)).items()}
        seats = max(1, bench.seats // 4)
        settings = {name: Setting(seats, room, own) for name, own in options.items()}
        with own_workers(bench, settings, OURS_NARROW) as workers:
            rate = LOAD * len(requests) / workers[OFF].serve(requests).seconds
            arriving = [
                replace(r, arrival=at) for r, at in zip(requests, moments(len(requests), rate), strict=True)
            ]
            bench.note(f"arriving at {rate:.2f} requests/s")
            runs = {name: worker.serve(arriving) for name, worker in workers.items()}
    yield from figures(runs, prompts)


def choices(folder: Path) -> dict[str, dict[str, Any]]:
    """Options of the engines that are compared, by name."""

    def disk(name: str) -> dict[str, Any]:
        return {"kv_disk_space": SPACE, "kv_disk_path": str(folder / name)}

    host = {"swap_space": SPACE}
    return {OFF: {}, "host": host, "disk": disk("alone"), "host and disk": host | disk("both")}


def moments(count: int, rate: float) -> list[float]:
    """Arrivals in the trace's order, so many a second on average and independent of one another: in its own
    moments whole conversations, taken in the order in which they begin, would all begin at once."""
    return np.cumsum(np.random.default_rng(0).exponential(1 / rate, count)).tolist()


def figures(runs: dict[str, Served], prompts: int) -> Iterator[Row]:
    hits = {name: [100 * run.counts["cached_tokens"] / prompts] for name, run in runs.items()}
    computed = {name: [float(prompts - run.counts["cached_tokens"])] for name, run in runs.items()}
    yield from (Row("tiers", "prompt tokens found", name, "%", share) for name, share in hits.items())
    yield from rows_of("tiers", "prompt tokens computed", "tokens", computed, references=(OFF,))
    latencies = {name: spans(run) for name, run in runs.items()}
    for span in ("TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"):
        values = {name: [1e3 * found[span]] for name, found in latencies.items()}
        yield from rows_of("tiers", span, "ms", values, references=(OFF,))
    seconds = {name: [run.seconds] for name, run in runs.items()}
    yield from rows_of("tiers", "all requests", "s", seconds, references=(OFF,))
