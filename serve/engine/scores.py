"""Log-probabilities on their way from a step's results to the requests that asked for them."""

import jax
import numpy as np

from ...sampling.sample import Sampled, Scores
from ..programs.step import Output
from .request import Request
from .scheduler import Work


def score_fields(x: Sampled | Scores) -> tuple[jax.Array, ...]:
    """The arrays of scores in the order in which a ScoreLog takes them."""
    return x.logprob, x.rank, x.top_ids, x.top_logprobs


def take_prompt_scores(request: Request, output: Output, row: int, work: Work) -> None:
    """Column i of a row's scores is the prompt's token start + i + 1; a row may repeat one that was
    scored."""
    if request.params.prompt_logprobs is None or output.prompt is None:
        return
    fields = [np.asarray(x)[row] for x in score_fields(output.prompt)]
    for position in range(work.start + 1, min(work.start + work.count, len(request.prompt))):
        if position > len(request.prompt_scores.logprob):
            request.prompt_scores.append(*(x[position - work.start - 1] for x in fields))
