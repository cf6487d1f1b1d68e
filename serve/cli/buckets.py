"""`duetto buckets`: padding buckets made for a workload: the edges with the least padding that a number of
compiled programs allows.

    duetto buckets prompts.jsonl --programs 6      # edges for --prefill-buckets

Prompts are read in chunks, and a chunk that is alone in its step is computed by the smallest prefill program
that holds it. Which chunks a workload is cut into is known before anything runs: the scheduler decides, and
it needs no device.
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ...checkpoints.hub import resolve
from ...kvcache.tables import PageTables
from ...sampling.params import SamplingParams
from ..engine.core.plan import ScheduledTokens, SchedulerConfig
from ..engine.core.request import Request
from ..engine.core.rows import calls, prompt_rows
from ..engine.core.scheduler import Scheduler
from ..engine.startup.folder import DEMO
from ..host.signals import raise_on_interrupt
from ..options.checks import EDGE, SMALLEST_CHUNK, round_up
from ..options.engine import EngineOptions
from ..options.flags import positive
from ..runtime.compiled.shapes import Shape, doublings, least_row, prefills

CONTRACT_EDGE = 48  # rows from which on float32 products on CPUs have the bits of all larger ones
Way = tuple[int, tuple[int, ...]]  # tokens of padding, and the edges that lead to them


class StepTokens(NamedTuple):
    """What one step computes: prompt tokens, the areas of its prefills if several prompts come together, rows
    of decode."""

    tokens: int
    shared: tuple[int, ...]
    rows: int


def best_edges(lengths: Iterable[int], programs: int, last: int, smallest: int = EDGE) -> tuple[int, ...]:
    """At most `programs` bucket edges, `last` and SMALLEST_CHUNK among them, with the least padding for
    chunks of these lengths.

    Edges are multiples of EDGE, `smallest` or more. Exact, by a dynamic programme over the edges that a
    length rounds up to: O(n^2) for each program. Raises ValueError for lengths beyond `last`, and for fewer
    programs than the edges that every table has.
    """
    counts = Counter(max(round_up(n, EDGE), smallest) for n in lengths)
    must = {SMALLEST_CHUNK, last}
    if max(counts, default=0) > last:
        raise ValueError(f"lengths up to {max(counts)} are not allowed: the last edge is {last}")
    if programs < len(must):
        raise ValueError(f"programs {programs} is not allowed: {sorted(must)} are edges of every table")
    edges = sorted({*counts, *must})
    found: list[Way | None] = [(0, ()), *[None] * len(edges)]  # found[j + 1]: for lengths up to edge j
    best: Way | None = None
    for _ in range(programs):
        found = [None, *(_extended(found, edges, counts, must, j) for j in range(len(edges)))]
        last_way = found[-1]
        if last_way is not None and (best is None or last_way[0] < best[0]):
            best = last_way
    assert best is not None
    return best[1]


def _extended(
    found: list[Way | None], edges: list[int], counts: Counter[int], must: set[int], j: int
) -> Way | None:
    """The best way to cover all up to edge j by one bucket that ends there after a way found before; None if
    there is none."""
    best: Way | None = None
    added = 0
    for i in range(j, -1, -1):  # the bucket holds the lengths of edges i to j
        added += counts[edges[i]] * (edges[j] - edges[i])
        before = found[i]
        if before is not None and (best is None or before[0] + added < best[0]):
            best = before[0] + added, (*before[1], edges[j])
        if i > 0 and edges[i - 1] in must:
            break
    return best


def alone(steps: Iterable[StepTokens]) -> list[int]:
    """Lengths of the chunks that were alone in their steps."""
    return [step.tokens for step in steps if step.tokens and not step.shared]


def padding(steps: Iterable[StepTokens], edges: Sequence[int]) -> float:
    """Share of what is computed for the prompts of these steps that is padding. The last edge holds every
    chunk."""
    steps = list(steps)
    computed = sum(min(edge for edge in edges if edge >= n) for n in alone(steps))
    return 1 - sum(step.tokens for step in steps) / max(computed + sum(sum(s.shared) for s in steps), 1)


def rehearse(work: Sequence[tuple[int, int]], options: EngineOptions) -> Iterator[StepTokens]:
    """The steps in which an engine would serve requests of these (prompt, output) lengths that all wait at
    once.

    Nothing is computed and no prefix is shared; the cache has a page for every token, and all shapes are
    allowed, which the reproducibility contract may forbid on a device.
    """
    shapes = tuple(prefills(options, options.prefill_tokens, shared=True, platform="cpu"))
    scheduler, flight = rehearsal(work, options, shapes), []
    while scheduler.has_work:
        plan = scheduler.plan(settled=not flight)
        assert plan is not None
        scheduler.dispatched(plan)
        if plan:
            several = calls(shapes, prompt_rows(shapes, plan.prefill)) if len(plan.prefill) > 1 else []
            yield StepTokens(
                sum(w.count for w in plan.prefill),
                tuple(shape.area for shape, _ in several),
                len(plan.decode),
            )
        before, flight = flight, [*plan.prefill, *plan.decode]
        _commit(scheduler, before)


def _commit(scheduler: Scheduler, flight: list[ScheduledTokens]) -> None:
    """Give a token to each request whose last known one was computed: a step is taken in when the next is on
    its way."""
    for work in flight:
        request = work.request
        if work.start + work.count == len(request.tokens):
            request.append(0)
        if request.finished:
            scheduler.release(request)


def rehearsal(work: Sequence[tuple[int, int]], options: EngineOptions, shapes: Iterable[Shape]) -> Scheduler:
    """A scheduler to which all requests were submitted."""
    seats, chunk, W = options.seats, options.prefill_tokens, options.page_size
    pages = seats * (1 - -max(p + n for p, n in work) // W)
    limits = SchedulerConfig(seats, chunk, least_row(shapes), decode_steps=1)
    tables = PageTables((None,), (pages,), W, limits.most_tokens)
    scheduler = Scheduler(limits, tables, root=None, recompute_outputs=True)
    greedy = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)
    for i, (p, n) in enumerate(work):
        scheduler.add(Request(str(i), [0] * p, greedy, seed=0, end=p + n, arrival=i))
    return scheduler


# ---------------------------------------------------------------- the command


def lengths_of(file: str, folder: Path) -> list[tuple[int, int]]:
    """Prompt and output tokens of the lines of a batch. Raises ValueError for one that is not allowed,
    OSError."""
    from ..jobs.batch.job import BatchOptions
    from ..jobs.batch.lines import decode, task_of
    from ..jobs.batch.source import JobInput
    from ..text.tokenizer.chat import apply_chat
    from ..text.tokenizer.tokenizer import Tokenizer

    limit = BatchOptions().max_line_bytes
    tokenizer = Tokenizer.from_folder(folder)
    found = []
    with JobInput.open(file, limit) as source:
        for line in source.lines():
            task = task_of(decode(line, limit), {}, seed=0)
            if isinstance(task.prompt, list):
                ids = task.prompt
            elif tokenizer is None:
                raise ValueError(f"{folder} has no tokenizer: give prompts as token ids")
            elif task.messages is not None:
                ids = apply_chat(tokenizer, task.messages, **task.template_variables)
            else:
                ids = tokenizer.encode(task.prompt or "")
            found.append((len(ids), task.params.max_tokens or 256))
    return found


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help="JSON lines as `duetto batch` takes them")
    parser.add_argument("--model", default=str(DEMO), help="the tokenizer's folder, or an id on the hub")
    parser.add_argument("--programs", type=positive, default=6, help="prefill programs at most (default: 6)")
    parser.add_argument(
        "--smallest",
        type=positive,
        default=CONTRACT_EDGE,
        help=f"the smallest edge: {CONTRACT_EDGE} (default), or {EDGE} in bfloat16 with AMX, "
        "whose products have the same bits from 3 rows on",
    )
    parser.add_argument("--max-prefill-tokens", type=positive, default=512)
    parser.add_argument("--max-num-seqs", type=positive, default=32)


def run(args: argparse.Namespace) -> int:
    """Prints edges and their padding. Raises ValueError for an input without requests."""
    raise_on_interrupt()
    options = EngineOptions(max_prefill_tokens=args.max_prefill_tokens, max_num_seqs=args.max_num_seqs)
    work = lengths_of(args.input, resolve(args.model, weights=False))
    if not work:
        raise ValueError(f"{args.input}: there is no request in it")
    steps = list(rehearse(work, options))
    last = round_up(args.max_prefill_tokens, SMALLEST_CHUNK)
    best = best_edges(alone(steps), args.programs, last, args.smallest)
    for name, edges in {"powers of two": doublings(SMALLEST_CHUNK, last), "best": best}.items():
        flag = f"--prefill-buckets {','.join(map(str, edges))}"
        print(f"{name:<14}{padding(steps, edges):>7.1%} padding  {flag}")
    return 0
