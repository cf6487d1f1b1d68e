"""Log-probabilities on their way from a step's results to the requests that asked for them."""

import jax
import numpy as np

from ...kvcache.pages import Batch
from ...sampling.sample import Sampled, Scores
from ..programs.scoring import NEVER
from ..programs.step import Output
from .page_scores import PageScores
from .plan import Work
from .request import Request


def score_fields(x: Sampled | Scores) -> tuple[jax.Array, ...]:
    """The arrays of scores in the order in which a ScoreLog takes them."""
    return x.logprob, x.rank, x.top_ids, x.top_logprobs


def scored_from(request: Request) -> np.int32:
    """What a seat is told: the position from which on the prompt's scores are wanted."""
    return np.int32(request.unscored if request.scored else NEVER)


def tell_following(batch: Batch, row: int, work: Work) -> None:
    """Tell a row of prefill the prompt's token behind it, whose score its last hidden state gives."""
    end, prompt = work.start + work.count, work.request.prompt
    if batch.after is not None and end < len(prompt):
        batch.after[row] = prompt[end]


def take_prompt_scores(request: Request, output: Output, row: int, work: Work, kept: PageScores) -> None:
    """Column i of a row's scores is the prompt's token start + i + 1; those of whole pages are kept."""
    if not request.scored or output.prompt is None:
        return
    first, end = request.unscored, min(work.start + work.count + 1, len(request.prompt))
    if first < end:
        assert first > work.start, f"position {first} of request {request.id} has no score"
        columns = slice(first - work.start - 1, end - work.start - 1)
        request.prompt_scores.extend(*(np.asarray(x)[row, columns] for x in score_fields(output.prompt)))
        kept.keep(request, first)
