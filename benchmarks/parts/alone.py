"""Parts that measure duetto against itself: against its floors, without a feature, and as work grows."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

from benchmarks.engines import OURS, OURS_NARROW, Served, Setting
from benchmarks.harness import Bench, Row, own_workers, rows_of
from benchmarks.traces import BLOCK_TOKENS, Request, at_once, conversations, read, with_prefixes

PREFIX_DIVISOR = 8  # a block of the trace is then a page of 64 tokens
PREFIX_LONGEST = 2048
PROGRAMS = (4, 6, 8, 10)
LAST_EDGE = 256  # on CPUs a prefill of 512 tokens has other bits: the contract leaves it out
POWERS = "powers of two"


def programs(bench: Bench) -> Iterator[Row]:
    """`duetto bench`: compiled programs against their floors, the host gap, and starts."""
    counts, amount = [str(max(2, bench.amount.steps))], bench.amount
    lists = {"--widths": amount.widths, "--contexts": amount.contexts, "--lengths": amount.lengths}
    flags = [word for flag, values in lists.items() for word in (flag, ",".join(map(str, values)))]
    for row in duetto_bench(bench, list(amount.programs), [*flags, "--repeats", *counts]):
        yield from shown(row)


def duetto_bench(bench: Bench, parts: list[str], flags: list[str]) -> list[dict]:
    """The rows of `duetto bench` for the model's folder."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.json"
        command = [
            sys.executable,
            "-m",
            "duetto.serve.cli.main",
            "bench",
            "--model",
            str(bench.folder),
            "--json",
            str(file),
        ]
        done = subprocess.run(
            [*command, "--parts", *parts, *flags], capture_output=True, text=True, check=False
        )
        if done.returncode:
            bench.note(f"duetto bench: {done.stderr.strip()[-500:]}")
            return []
        found = json.loads(file.read_text())
    bench.note(found["about"])
    bench.note(
        "peaks: {flops16:.3g} and {flops32:.3g} FLOP/s in 16 and 32 bits, {bandwidth:.3g} bytes/s".format(
            **found["peaks"]
        )
    )
    return found["rows"]


def shown(row: dict) -> Iterator[Row]:
    if row["part"] == "startup":
        yield Row("startup", row["what"], OURS, "s", [row["seconds"]])
        return
    what = f"{row['what']}, context {row['context']}"
    yield Row("programs", what, OURS, "ms", [1e3 * row["seconds"]])
    if row["floor"] is not None:
        yield Row("programs", f"{what}: share of the floor", OURS, "%", [100 * row["floor"] / row["seconds"]])
    if row["host_gap"] is not None:
        yield Row("programs", f"{what}: host gap", OURS, "%", [100 * row["host_gap"]])


# ---------------------------------------------------------------- prefixes


def prefix(bench: Bench) -> Iterator[Row]:
    """Conversations of the Mooncake trace with prefix caching on and off; both start with an empty cache."""
    longest = min(PREFIX_LONGEST, bench.config["max_position_embeddings"] // 2)
    entries = conversations(read(bench.mooncake), bench.amount.prefix_requests, longest * PREFIX_DIVISOR)
    requests = with_prefixes(entries, bench.vocabulary, PREFIX_DIVISOR)
    room = max(len(r.prompt) + r.output for r in requests)
    sizes = f"lengths and blocks of {BLOCK_TOKENS} tokens / {PREFIX_DIVISOR}"
    bench.note(f"{len(requests)} requests, {sum(len(r.prompt) for r in requests)} prompt tokens, {sizes}")
    seats = max(1, bench.seats // 2)
    memory = {"max_batched_token_mem": seats * room}
    settings = {
        name: Setting(seats, room, {**memory, "enable_prefix_caching": on})
        for name, on in (("caching", True), ("no caching", False))
    }
    with own_workers(bench, settings) as workers:
        found = runs(bench, workers, requests)
    spent = {name: [run.seconds for run in of] for name, of in found.items()}
    yield from rows_of("prefix", "all requests", "s", spent, references=("caching",))
    counts = found["caching"][0].counts
    yield Row(
        "prefix",
        "prompt tokens found",
        "caching",
        "%",
        [100 * counts["cached_tokens"] / counts["prompt_tokens"]],
    )


def runs(bench: Bench, workers: dict, requests: list[Request]) -> dict[str, list[Served]]:
    found: dict[str, list[Served]] = {name: [] for name in workers}
    for _ in range(bench.amount.runs):
        for name, worker in workers.items():
            found[name].append(worker.serve(requests))
    return found


# ---------------------------------------------------------------- padding


def best(programs: int, narrow: bool = False) -> str:
    return f"best {programs} edges{', bfloat16' if narrow else ''}"


def padding(bench: Bench) -> Iterator[Row]:
    """Padding by bucket edges: counted for each workload without computing anything, then timed for the
    first.

    The contract lets bfloat16 have smaller edges than float32 on CPUs.
    """
    from duetto.serve.cli.buckets import CONTRACT_EDGE_ROWS
    from duetto.serve.options.engine import EngineOptions
    from duetto.serve.planner.buckets import choose_edges, lone_chunk_lengths, simulate_steps
    from duetto.serve.planner.buckets import padding_share as share
    from duetto.serve.runtime.compiled.shapes import doublings

    plain = doublings(64, LAST_EDGE)
    options = EngineOptions(max_num_seqs=bench.seats, max_prefill_tokens=LAST_EDGE)
    chosen = []
    for name, work in workloads(bench).items():
        steps = list(simulate_steps(work, options))
        chunks = lone_chunk_lengths(steps)
        tables = {
            POWERS: tuple(plain),
            **{best(n): choose_edges(chunks, n, LAST_EDGE, CONTRACT_EDGE_ROWS) for n in PROGRAMS},
            **{best(n, narrow=True): choose_edges(chunks, n, LAST_EDGE) for n in PROGRAMS[-1:]},
        }
        chosen.append(tables[best(PROGRAMS[-1], narrow=True)])
        for table, edges in tables.items():
            bench.note(f"{name}, {table}: --prefill-buckets {','.join(map(str, edges))}")
            everything = padded_share(steps, share(steps, edges), doublings(8, bench.seats))
            yield Row("padding", f"{name}: prefill", table, "%", [100 * share(steps, edges)])
            yield Row("padding", f"{name}: prefill and decode", table, "%", [100 * everything])
    yield from padding_time(bench, chosen[0])


def padded_share(steps: list, prefill: float, widths: list[int]) -> float:
    """Padding of prefill and decode together, of which prefill's own share is known."""
    prompts = sum(step.tokens for step in steps)
    rows = [step.rows for step in steps if step.rows]
    computed = prompts / (1 - prefill) + sum(min(w for w in widths if w >= n) for n in rows)
    return 1 - (prompts + sum(rows)) / computed


def workloads(bench: Bench) -> dict[str, list[tuple[int, int]]]:
    """Tokens of prompts and outputs: the throughput part's, and the prefix part's without what is found in
    the cache."""
    azure = bench.entries(bench.amount.requests)
    mooncake = conversations(
        read(bench.mooncake), bench.amount.prefix_requests, PREFIX_LONGEST * PREFIX_DIVISOR
    )
    scaled = [replace(bench.scale, divisor=PREFIX_DIVISOR, prompt=PREFIX_LONGEST)(e) for e in mooncake]
    return {
        "Azure": [(e.prompt_tokens, e.output_tokens) for e in azure],
        "Mooncake, nothing cached": [(e.prompt_tokens, e.output_tokens) for e in scaled],
    }


def padding_time(bench: Bench, edges: tuple[int, ...]) -> Iterator[Row]:
    requests = at_once(bench.entries(bench.amount.requests), bench.vocabulary)
    own, chosen = bench.setting, best(PROGRAMS[-1], narrow=True)
    settings = {
        name: Setting(own.seats, own.longest, {"max_prefill_tokens": LAST_EDGE, "prefill_buckets": table})
        for name, table in ((POWERS, None), (chosen, edges))
    }
    with own_workers(bench, settings, OURS_NARROW) as workers:
        found = runs(bench, workers, requests)
    spent = {name: [run.seconds for run in of] for name, of in found.items()}
    yield from rows_of(
        "padding", f"{len(requests)} requests of Azure at once, bfloat16", "s", spent, references=(chosen,)
    )


# ---------------------------------------------------------------- growth


def growth(bench: Bench) -> Iterator[Row]:
    """Host work by requests waiting, a step by context, and tokens/s along a long run."""
    for waiting in bench.amount.waiting:
        yield Row(
            "growth", f"scheduler, {waiting} waiting", OURS, "ms", [1e3 * scheduler_seconds(bench, waiting)]
        )
    longest = bench.config["max_position_embeddings"] // 2
    contexts = [str(n) for n in (128, 512, 1024, 2048, 4096) if n <= longest]
    flags = ["--no-host-gap", "--widths", "8", "--contexts", ",".join(contexts)]
    flags += ["--repeats", str(max(2, bench.amount.steps))]
    for row in duetto_bench(bench, ["decode"], flags):
        yield Row("growth", f"{row['what']}, context {row['context']}", OURS, "ms", [1e3 * row["seconds"]])
    yield from steady(bench)


def scheduler_seconds(bench: Bench, waiting: int, steps: int = 200) -> float:
    """Median host seconds of an engine's step on a device that takes no time, while all seats decode and
    `waiting` requests wait."""
    from duetto.serve.options.engine import EngineOptions
    from duetto.serve.planner.buckets import simulate_steps

    prompt, before = 64, 2 * bench.seats  # steps before: in them all seats are taken and prompts read
    work = [(prompt, before + 2 * steps)] * (bench.seats + waiting)
    moments = []
    for _ in islice(simulate_steps(work, EngineOptions(max_num_seqs=bench.seats)), before + steps):
        moments.append(time.perf_counter())
    return statistics.median(b - a for a, b in pairwise(moments[before:]))


def steady(bench: Bench, parts: int = 5) -> Iterator[Row]:
    """Tokens/s of each part of a long run, by the requests that end in it; the beginning and the end are left
    out."""
    worker, entries = bench.worker(OURS), bench.entries(bench.amount.requests)
    first = worker.serve(at_once(entries, bench.vocabulary))
    again = max(1, round(60 * bench.amount.minutes / first.seconds))
    run = worker.serve(at_once(entries * again, bench.vocabulary))
    width = 0.8 * run.seconds / parts
    ended: Counter[int] = Counter()
    for answer in run.answers:
        ended[int((answer.e2e - 0.1 * run.seconds) // width)] += len(answer.tokens)
    for i in range(parts):
        what = f"tokens/s, part {i + 1} of {parts} of a run of {run.seconds:.0f} s"
        yield Row("growth", what, OURS, "tokens/s", [ended[i] / width])
