"""Results of dispatched steps: sampled tokens and scores, appended to the requests of their rows."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ....sampling.params import NAN_TOKEN, NO_TOKEN
from ....sampling.sample import Sampled, Scores
from ...runtime.compiled.futures import PendingSample, wait_result
from ...runtime.compiled.shapes import Shape
from ...runtime.steps.output import Output
from ...text.outputs import Pass
from ..metrics.stats import EngineStats
from .request import Request
from .scheduler_output import RowResult, ScheduledTokens


class DispatchedCall(NamedTuple):
    """Call of a step that was dispatched.

    shape: compiled shape of the call.
    rows: scheduled tokens by row number.
    output: results, which may be futures.
    """

    shape: Shape
    rows: Mapping[int, ScheduledTokens]
    output: Any


class InFlightSteps:
    """Queue of dispatched steps whose results have not been read. A step is the list of its calls.

    group_of: returns the group of a request's slot.
    """

    def __init__(self, group_of: Callable[[Request], int | None]):
        self._group_of = group_of
        self._steps: deque[list[DispatchedCall]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def must_await_results(self, may_defer: bool) -> bool:
        """Return True if the next step needs the results of these first.

        That is so if a call verifies draft tokens, or samples under a grammar and may not be deferred.
        """
        verify = any(call.shape.phase == "verify" for call in self.calls)
        return verify or not may_defer and any(scheduled.is_constrained for scheduled in self.rows)

    @property
    def calls(self) -> Iterator[DispatchedCall]:
        return (call for step in self._steps for call in step)

    @property
    def rows(self) -> Iterator[ScheduledTokens]:
        return (scheduled for call in self.calls for scheduled in call.rows.values())

    @property
    def unsampled_calls(self) -> Iterator[tuple[PendingSample, Iterable[ScheduledTokens]]]:
        """Calls whose sampling was deferred and is not dispatched yet, each with its rows."""
        outputs = ((call.output, call.rows.values()) for call in self.calls)
        return (
            (out, scheduled_rows)
            for out, scheduled_rows in outputs
            if isinstance(out, PendingSample) and out.output is None
        )

    def add(self, step: list[DispatchedCall]) -> None:
        if step:
            self._steps.append(step)

    def clear(self) -> None:
        self._steps.clear()

    def pop_excess(self, max_steps: int) -> Iterator[list[DispatchedCall]]:
        """Remove and yield the oldest steps until at most `max_steps` are left."""
        while len(self._steps) > max(max_steps, 0):
            yield self._steps.popleft()

    def pop_until_group(self, group: int | None) -> Iterator[list[DispatchedCall]]:
        """Remove and yield steps until none is left with a row of a group, or of a request without a slot.

        None removes all steps.
        """
        while self._steps and (group is None or self._has_group(group)):
            yield self._steps.popleft()

    def _has_group(self, group: int) -> bool:
        return any(self._group_of(scheduled.request) in (None, group) for scheduled in self.rows)


def await_and_append_results(
    calls: list[DispatchedCall], stats: EngineStats, shards: int = 1
) -> list[RowResult]:
    """Wait for a step's calls in order, and append their results to the requests."""
    results, host_parts = [], stats.host_parts
    for call in calls:
        with host_parts.wait:
            call = call._replace(output=wait_result(call.output))
            tokens = np.asarray(call.output.sampled.token).tolist()
        stats.on_result()
        samples = call.output.sample_indices(call.shape.rows, shards)
        with host_parts.detokenize:
            for row, scheduled in call.rows.items():
                sample = row if samples is None else samples[row]
                row_tokens = tokens[sample] if sample >= 0 else []
                results.append(append_row_results(scheduled, call, row, sample, row_tokens))
    stats.on_tokens(results)
    return results


def append_row_results(
    scheduled: ScheduledTokens, call: DispatchedCall, row: int, sample: int, tokens: list[int]
) -> RowResult:
    """Append the sampled tokens and the prompt scores of a row to its request. `sample` is the index of the
    row among the samples.

    A request for which the model computed NaN ends with an error.
    """
    request, known, prompt = scheduled.request, len(scheduled.request.tokens), call.shape.phase == "prefill"
    if request.is_finished:  # aborted, or stopped by its text, while this step was on its way
        return RowResult(scheduled, 0, [], prompt)
    append_prompt_scores(request, call.output, row, scheduled)
    if request.pooler is not None and call.output.pooled is not None:
        request.pooler.add_chunk(call.output.pooled, row, scheduled.start, scheduled.start + scheduled.count)
    if request.has_nan:
        request.fail_with_nan()
    if request.token_record is not None and call.output.observed is not None:
        request.token_record.store_row(call.output.observed, row, scheduled.start, scheduled.count)
    emitted = [i for i, token in enumerate(tokens) if token not in (NO_TOKEN, NAN_TOKEN)]
    if call.shape.phase == "verify":
        request.num_computed_tokens = scheduled.start + max(1, len(emitted))
    for i in emitted:
        if request.is_finished:
            break
        if request.params.logprobs is not None:
            request.scores.extend(*row_scores(call.output.sampled, sample, slice(i, i + 1)))
        request.append(tokens[i])
    if NAN_TOKEN in tokens and not request.is_finished:
        request.fail_with_nan()
    request.advance_grammar()
    return RowResult(scheduled, len(emitted), request.tokens[known:], prompt)


def append_prompt_scores(request: Request, output: Output, row: int, scheduled: ScheduledTokens) -> None:
    """Append the prompt scores of a row to its request."""
    if (positions := scheduled.scored_positions) and output.prompt is not None:
        first = request.first_unscored
        assert first == positions.start, f"position {first} of request {request.id} has no score"
        columns = scheduled.score_columns(positions)
        request.prompt_scores.extend(*row_scores(output.prompt, row, columns))


def row_scores(x: Sampled | Scores, row: int, columns: slice) -> list[np.ndarray]:
    """Return a row's scores in the order of a ScoreLog's arguments."""
    return [np.asarray(field)[row, columns] for field in (x.logprob, x.rank, x.top_ids, x.top_logprobs)]


def record_verify_passes(results: list[RowResult]) -> None:
    """Record for each request the draft tokens that a step verified, and the number of tokens it got."""
    for result in results:
        if result.tokens:
            result.scheduled.request.passes.append(Pass(result.scheduled.draft_tokens, len(result.tokens)))
