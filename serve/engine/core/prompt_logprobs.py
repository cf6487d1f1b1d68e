"""Log-probabilities of a prompt's tokens, on their way from a step's results to the request that wants them.

A scored prompt takes only those cached pages whose tokens' scores it does not need: a page has keys and no
scores.
"""

import jax
import numpy as np

from ....sampling.sample import Sampled, Scores
from ...runtime.steps.scoring import NEVER
from ...runtime.steps.step import Output
from .plan import ScheduledTokens
from .request import Request


def score_fields(x: Sampled | Scores) -> tuple[jax.Array, ...]:
    """Return the arrays of scores in the order of a ScoreLog's arguments."""
    return x.logprob, x.rank, x.top_ids, x.top_logprobs


def scored_from(request: Request) -> np.int32:
    """Return the first position of the prompt whose score is wanted."""
    return np.int32(request.unscored if request.scored else NEVER)


def take_prompt_scores(request: Request, output: Output, row: int, work: ScheduledTokens) -> None:
    """Append a row's scores to its request's: column i is of the prompt's token start + i + 1."""
    if not request.scored or output.prompt is None:
        return
    first, end = request.unscored, min(work.start + work.count + 1, len(request.prompt))
    if first < end:
        assert first > work.start, f"position {first} of request {request.id} has no score"
        columns = slice(first - work.start - 1, end - work.start - 1)
        request.prompt_scores.extend(*(np.asarray(x)[row, columns] for x in score_fields(output.prompt)))
