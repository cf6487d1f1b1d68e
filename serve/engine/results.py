"""What dispatched steps bring: rows of sampled tokens and scores, for the requests that they belong to."""

from typing import NamedTuple

import numpy as np

from ...sampling.params import NO_TOKEN
from ..outputs import Pass
from ..programs.shapes import Shape
from ..programs.step import Output
from .guessing import Taken
from .page_scores import PageScores
from .plan import Work
from .scores import score_fields, take_prompt_scores


class Ran(NamedTuple):
    """A dispatched step: its shape, its rows' work and its results, which may still be on their way."""

    shape: Shape
    rows: list[Work]
    output: Output


def take(work: Work, ran: Ran, row: int, tokens: list[int], kept: PageScores) -> Taken:
    """Append a row's sampled tokens to its request; scores of whole pages are `kept`."""
    request, known, prompt = work.request, len(work.request.tokens), ran.shape.phase == "prefill"
    if request.finished:  # aborted, or stopped by its text, while this step was on its way
        return Taken(work, 0, [], prompt)
    take_prompt_scores(request, ran.output, row, work, kept)
    emitted = [i for i, token in enumerate(tokens) if token != NO_TOKEN]
    if ran.shape.phase == "verify":
        request.computed = work.start + max(1, len(emitted))
    for i in emitted:
        if request.params.logprobs is not None:
            request.scores.append(*(np.asarray(x)[row, i] for x in score_fields(ran.output.sampled)))
        request.append(tokens[i])
        if request.finished:
            break
    return Taken(work, len(emitted), request.tokens[known:], prompt)


def note_passes(taken: list[Taken]) -> None:
    """Let requests know what each step verified for them, and gave."""
    for row in taken:
        if row.tokens:
            row.work.request.passes.append(Pass(row.work.guesses, len(row.tokens)))
