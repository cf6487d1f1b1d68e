"""Padding buckets for a workload: the prefill lengths with the least padding that a number of compiled
programs allows.

Prompts are prefilled in chunks. A chunk that is alone in its step is computed by the smallest program that
holds it. The scheduler decides how prompts are cut, so the lengths of chunks follow from a simulation without
times.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp

from ...model.transformer import decoder_spec
from ...model.tree import abstract
from ..options.checks import EDGE, SMALLEST_CHUNK, round_up
from ..options.engine import EngineOptions
from ..runtime.compiled.shapes import Sizes
from .roofline.presets import PRESETS
from .simulation.run import Simulation
from .simulation.times import StepCall
from .workloads.traces import TraceEntry

Way = tuple[int, tuple[int, ...]]  # tokens of padding, and the edges that lead to them


class StepTokens(NamedTuple):
    """Tokens that one step computes.

    tokens: prompt tokens.
    shared: areas of its prefills, if several prompts share them.
    rows: rows of decode.
    """

    tokens: int
    shared: tuple[int, ...]
    rows: int


def best_edges(lengths: Iterable[int], programs: int, last: int, smallest: int = EDGE) -> tuple[int, ...]:
    """Return at most `programs` bucket edges, `last` and SMALLEST_CHUNK among them, with the least padding
    for chunks of these lengths.

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
    """The least padding of all lengths up to edge j, by one bucket that ends there after edges found before;
    None if there is none."""
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
    """Padding's share of the tokens that are computed for these steps' prompts. The last edge holds every
    chunk."""
    steps = list(steps)
    computed = sum(min(edge for edge in edges if edge >= n) for n in alone(steps))
    return 1 - sum(step.tokens for step in steps) / max(computed + sum(sum(s.shared) for s in steps), 1)


class CallLog(list[StepCall]):
    """Calls of a device that takes no time."""

    stages = 1

    def __call__(self, call: StepCall) -> Sequence[float]:
        self.append(call)
        return (0.0,)


def rehearse(work: Sequence[tuple[int, int]], options: EngineOptions) -> Iterator[StepTokens]:
    """The steps in which an engine serves requests of (prompt, output) tokens that all wait at once.

    No prefix is shared and no prompt held back, the cache has a page for every token, and all shapes serve,
    some of which the reproducibility contract may forbid on a device.
    """
    longest, W = max(options.prefill_tokens, *(p + n for p, n in work)), options.page_size
    sizes = Sizes(longest, options.seats, (options.seats * (1 - -longest // W),), W)
    options, calls = replace(options, max_model_len=longest, max_prefill_delay=0.0), CallLog()
    params = abstract(decoder_spec(PRESETS["135m"]), jnp.bfloat16)
    own = Simulation(PRESETS["135m"], params, options, sizes, calls, "cpu")
    for prompt, output in work:
        own.arrive(own.request_of(TraceEntry(0.0, prompt, output)), 0.0)
    while not own.is_idle:
        own.engine.step()
        if calls:
            yield step_of(calls)
        calls.clear()


def step_of(calls: Sequence[StepCall]) -> StepTokens:
    prefills = [call for call in calls if call.shape.phase == "prefill"]
    is_alone = len(prefills) == 1 and prefills[0].rows == 1
    shared = () if is_alone else tuple(call.shape.area for call in prefills)
    rows = sum(call.rows for call in calls if call.shape.phase != "prefill")
    return StepTokens(sum(call.tokens for call in prefills), shared, rows)
