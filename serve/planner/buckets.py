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
from ...model.tree import shapes_from_specs
from ..options.checks import BUCKET_MULTIPLE_TOKENS, SMALLEST_CHUNK_TOKENS, round_up
from ..options.engine import EngineOptions
from ..runtime.compiled.shapes import Sizes
from .roofline.presets import PRESETS
from .simulation.engine_simulation import Simulation
from .simulation.step_times import StepCall
from .workloads.traces import TraceEntry

EdgePath = tuple[int, tuple[int, ...]]  # tokens of padding, and the edges that lead to them


class StepTokens(NamedTuple):
    """Token counts of one step.

    tokens: prompt tokens.
    shared_areas: padded tokens of each prefill, if the step has several prompts; else empty.
    rows: rows of decode.
    """

    tokens: int
    shared_areas: tuple[int, ...]
    rows: int


def choose_edges(
    lengths: Iterable[int], max_programs: int, last_edge: int, min_edge: int = BUCKET_MULTIPLE_TOKENS
) -> tuple[int, ...]:
    """Return at most `max_programs` bucket edges, `last_edge` and SMALLEST_CHUNK_TOKENS among them, with the
    least padding for chunks of these lengths.

    Edges are multiples of BUCKET_MULTIPLE_TOKENS, `min_edge` or more. Exact, by a dynamic programme over the
    edges that a length rounds up to: O(n^2) for each program. Raises ValueError for lengths beyond
    `last_edge`, and for fewer programs than the edges that every table has.
    """
    counts = Counter(max(round_up(n, BUCKET_MULTIPLE_TOKENS), min_edge) for n in lengths)
    required = {SMALLEST_CHUNK_TOKENS, last_edge}
    if max(counts, default=0) > last_edge:
        raise ValueError(f"lengths up to {max(counts)} are not allowed: the last edge is {last_edge}")
    if max_programs < len(required):
        raise ValueError(
            f"programs {max_programs} is not allowed: {sorted(required)} are edges of every table"
        )
    edges = sorted({*counts, *required})
    paths: list[EdgePath | None] = [(0, ()), *[None] * len(edges)]  # paths[j + 1]: for lengths up to edge j
    best: EdgePath | None = None
    for _ in range(max_programs):
        paths = [None, *(_extend_path(paths, edges, counts, required, j) for j in range(len(edges)))]
        last_path = paths[-1]
        if last_path is not None and (best is None or last_path[0] < best[0]):
            best = last_path
    assert best is not None
    return best[1]


def _extend_path(
    paths: list[EdgePath | None], edges: list[int], counts: Counter[int], required: set[int], j: int
) -> EdgePath | None:
    """Return the least padding for all lengths up to edge j, and its edges. Edge j ends one bucket behind the
    edges of an entry of `paths`. Return None if no such path exists."""
    best: EdgePath | None = None
    added = 0
    for i in range(j, -1, -1):  # the bucket holds the lengths of edges i to j
        added += counts[edges[i]] * (edges[j] - edges[i])
        previous = paths[i]
        if previous is not None and (best is None or previous[0] + added < best[0]):
            best = previous[0] + added, (*previous[1], edges[j])
        if i > 0 and edges[i - 1] in required:
            break
    return best


def lone_chunk_lengths(steps: Iterable[StepTokens]) -> list[int]:
    """Return the length in tokens of each chunk that was the only one in its step."""
    return [step.tokens for step in steps if step.tokens and not step.shared_areas]


def padding_share(steps: Iterable[StepTokens], edges: Sequence[int]) -> float:
    """Return the padding's share of the tokens computed for the prompts of these steps. The last edge holds
    every chunk."""
    steps = list(steps)
    computed = sum(min(edge for edge in edges if edge >= n) for n in lone_chunk_lengths(steps))
    return 1 - sum(step.tokens for step in steps) / max(computed + sum(sum(s.shared_areas) for s in steps), 1)


class CallLog(list[StepCall]):
    """Step times of a device that takes no time: a list of the calls."""

    num_stages = 1

    def __call__(self, call: StepCall) -> Sequence[float]:
        self.append(call)
        return (0.0,)


def simulate_steps(
    request_lengths: Sequence[tuple[int, int]], options: EngineOptions
) -> Iterator[StepTokens]:
    """Yield the steps in which an engine serves requests of (prompt, output) tokens that all wait at once.

    No prefix is shared, and no prompt is held back. The cache has a page for every token. All shapes serve;
    the reproducibility contract may forbid some of them on a device.
    """
    longest, W = max(options.prefill_tokens, *(p + n for p, n in request_lengths)), options.page_size
    sizes = Sizes(longest, options.num_slots, (options.num_slots * (1 - -longest // W),), W)
    options, calls = replace(options, max_model_len=longest, max_prefill_delay=0.0), CallLog()
    params = shapes_from_specs(decoder_spec(PRESETS["135m"]), jnp.bfloat16)
    simulation = Simulation(PRESETS["135m"], params, options, sizes, calls, "cpu")
    for prompt, output in request_lengths:
        simulation.submit_at(simulation.make_request(TraceEntry(0.0, prompt, output)), 0.0)
    while not simulation.is_idle:
        simulation.engine.step()
        simulation.engine.take_ended()
        if calls:
            yield summarise_step(calls)
        calls.clear()


def summarise_step(calls: Sequence[StepCall]) -> StepTokens:
    """Sum up the calls of one step."""
    prefills = [call for call in calls if call.shape.phase == "prefill"]
    is_alone = len(prefills) == 1 and prefills[0].rows == 1
    shared_areas = () if is_alone else tuple(call.shape.area for call in prefills)
    rows = sum(call.rows for call in calls if call.shape.phase != "prefill")
    return StepTokens(sum(call.tokens for call in prefills), shared_areas, rows)
