"""Results of dispatched steps: sampled tokens and scores, appended to the requests of their rows."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ....sampling.params import NO_TOKEN
from ....sampling.sample import Sampled, Scores
from ...runtime.compiled.futures import PendingSample, arrived
from ...runtime.compiled.shapes import Shape
from ...runtime.steps.step import Output
from ...text.outputs import Pass
from ..metrics.meter import EngineStats
from .guessing import RowResult
from .plan import ScheduledTokens
from .request import Request


class DispatchedStep(NamedTuple):
    """Call in flight."""

    shape: Shape  # the compiled shape
    rows: Mapping[int, ScheduledTokens]  # work by row number
    output: Any  # results, which may be futures


class InFlightSteps:
    """Dispatched steps whose results have not been read, each as its calls. `group_of` returns the group of a
    request's slot."""

    def __init__(self, group_of: Callable[[Request], int | None]):
        self._group_of = group_of
        self._steps: deque[list[DispatchedStep]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def are_awaited(self, may_defer: bool) -> bool:
        """Return True if the next step of these rows needs their results: one of them verifies draft tokens,
        or samples under a grammar while no draw may be deferred."""
        verify = any(ran.shape.phase == "verify" for ran in self.calls)
        return verify or not may_defer and any(work.is_constrained for work in self.rows)

    @property
    def calls(self) -> Iterator[DispatchedStep]:
        return (ran for step in self._steps for ran in step)

    @property
    def rows(self) -> Iterator[ScheduledTokens]:
        return (work for ran in self.calls for work in ran.rows.values())

    @property
    def undrawn(self) -> Iterator[tuple[PendingSample, Iterable[ScheduledTokens]]]:
        """Calls whose tokens have yet to be drawn, and their rows."""
        outputs = ((ran.output, ran.rows.values()) for ran in self.calls)
        return (
            (out, works) for out, works in outputs if isinstance(out, PendingSample) and out.output is None
        )

    def add(self, step: list[DispatchedStep]) -> None:
        if step:
            self._steps.append(step)

    def clear(self) -> None:
        self._steps.clear()

    def oldest(self) -> list[DispatchedStep]:
        return self._steps.popleft()

    def beyond(self, most: int) -> Iterator[list[DispatchedStep]]:
        """Remove and yield the oldest steps until at most `most` are left."""
        while len(self._steps) > max(most, 0):
            yield self.oldest()

    def until(self, group: int | None) -> Iterator[list[DispatchedStep]]:
        """Remove and yield the steps up to the last with rows of a group, or of a request without a slot; all
        if it is None."""
        while self._steps and (group is None or self._has(group)):
            yield self.oldest()

    def _has(self, group: int) -> bool:
        return any(self._group_of(work.request) in (None, group) for work in self.rows)


def take_all(step: list[DispatchedStep], meter: EngineStats) -> list[RowResult]:
    """Wait for a step's calls in order, and append their results to the requests."""
    taken = []
    for ran in step:
        ran = ran._replace(output=arrived(ran.output))
        tokens = np.asarray(ran.output.sampled.token).tolist()
        meter.took()
        taken += [take(work, ran, row, tokens[row]) for row, work in ran.rows.items()]
    meter.brought(taken)
    return taken


def take(work: ScheduledTokens, ran: DispatchedStep, row: int, tokens: list[int]) -> RowResult:
    """Append a row's sampled tokens and the scores of its prompt's to its request."""
    request, known, prompt = work.request, len(work.request.tokens), ran.shape.phase == "prefill"
    if request.finished:  # aborted, or stopped by its text, while this step was on its way
        return RowResult(work, 0, [], prompt)
    take_prompt_scores(request, ran.output, row, work)
    if request.pool is not None and ran.output.pooled is not None:
        request.pool.take(ran.output.pooled, row, work.start, work.start + work.count)
    if request.record is not None and ran.output.observed is not None:
        request.record.take(ran.output.observed, row, work.start, work.count)
    emitted = [i for i, token in enumerate(tokens) if token != NO_TOKEN]
    if ran.shape.phase == "verify":
        request.computed = work.start + max(1, len(emitted))
    for i in emitted:
        if request.params.logprobs is not None:
            request.scores.extend(*score_fields(ran.output.sampled, row, slice(i, i + 1)))
        request.append(tokens[i])
        if request.finished:
            break
    request.obey()
    return RowResult(work, len(emitted), request.tokens[known:], prompt)


def take_prompt_scores(request: Request, output: Output, row: int, work: ScheduledTokens) -> None:
    """Append a row's scores to its request's: column i is of the prompt's token start + i + 1."""
    if not request.scored or output.prompt is None:
        return
    first, end = request.unscored, min(work.end + 1, len(request.prompt))
    if first < end:
        assert first > work.start, f"position {first} of request {request.id} has no score"
        columns = slice(first - work.start - 1, end - work.start - 1)
        request.prompt_scores.extend(*score_fields(output.prompt, row, columns))


def score_fields(x: Sampled | Scores, row: int, columns: slice) -> list[np.ndarray]:
    """Return a row's scores in the order of a ScoreLog's arguments."""
    return [np.asarray(field)[row, columns] for field in (x.logprob, x.rank, x.top_ids, x.top_logprobs)]


def note_passes(taken: list[RowResult]) -> None:
    """Append to each request what the step verified for it, and how many tokens that gave."""
    for row in taken:
        if row.tokens:
            row.work.request.passes.append(Pass(row.work.guesses, len(row.tokens)))
