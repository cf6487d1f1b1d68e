"""Log-probabilities on their way from a step's results to the requests that asked for them; those of prompts'
tokens are kept by the names of their pages.

A prompt that is scored takes the pages that it finds, as others do, and the scores of their tokens come from
here, bit for bit.
"""

from collections import OrderedDict
from typing import NamedTuple

import jax
import numpy as np

from ....sampling.sample import Sampled, Scores
from ...runtime.steps.scoring import NEVER
from ...runtime.steps.step import Output
from .plan import ScheduledTokens
from .request import Request

MOST_BYTES = 64 << 20  # of scores that are kept: about 390,000 tokens with 20 alternatives each


class Kept(NamedTuple):
    """Scores of the tokens behind each token of a page: W of them, the last is the next page's first."""

    logprob: np.ndarray
    rank: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self)


class PageScores:
    """Kept scores in bounded memory, found by a page's name and the token behind it; those that were used
    least recently go first.

    Page i of W tokens scores the prompt's positions i * W + 1 to (i + 1) * W.
    """

    def __init__(self, page_size: int, most_bytes: int = MOST_BYTES):
        self.page_size, self.most_bytes = page_size, most_bytes
        self.nbytes = 0
        self._kept: OrderedDict[tuple[bytes, int], Kept] = OrderedDict()

    def are_wanted(self, request: Request, page: int) -> bool:
        """Whether a request lacks scores of a page."""
        first, last = page * self.page_size + 1, min((page + 1) * self.page_size, len(request.prompt) - 1)
        return request.scored and max(first, request.unscored) <= last

    def known(self, request: Request, pages: int) -> int:
        """As many of a request's first pages, `pages` at most, as it lacks no scores of that are not kept."""
        for page in range(pages if request.scored else 0):
            if self.are_wanted(request, page) and self._key(request, page) not in self._kept:
                return page
        return pages

    def are_coming(self, request: Request, page: int, other: Request) -> bool:
        """Whether another request is about to score a page that a request lacks."""
        first, last = page * self.page_size + 1, (page + 1) * self.page_size
        return (
            other.scored
            and other.score_from <= first
            and other.unscored <= last < len(other.prompt)
            and page < len(other.names)
            and self._key(other, page) == self._key(request, page)
        )

    def take(self, request: Request) -> None:
        """Give a request the scores that it lacks of the pages that it has found."""
        for page in range(request.computed // self.page_size):
            if self.are_wanted(request, page):
                key, before = self._key(request, page), page * self.page_size + 1
                self._kept.move_to_end(key)
                lacking = slice(request.unscored - before, len(request.prompt) - before)
                request.prompt_scores.extend(*(x[lacking] for x in self._kept[key]))

    def keep(self, request: Request, since: int) -> None:
        """Keep the scores of the pages that a request has scored as a whole, the last from position `since`
        on."""
        W, log = self.page_size, request.prompt_scores
        for page in range((since - 1) // W, min((request.unscored - 1) // W, len(request.names))):
            if page * W + 1 >= request.score_from and (key := self._key(request, page)) not in self._kept:
                own = slice(page * W + 1 - request.score_from, (page + 1) * W + 1 - request.score_from)
                scores = log.logprob, log.rank, log.top_ids, log.top_logprobs
                self._put(key, Kept(*(np.array(of[own]) for of in scores)))

    def forget(self) -> None:
        self._kept.clear()
        self.nbytes = 0

    def _put(self, key: tuple[bytes, int], new: Kept) -> None:
        self._kept[key] = new
        self.nbytes += new.nbytes
        while self.nbytes > self.most_bytes:
            _, old = self._kept.popitem(last=False)
            self.nbytes -= old.nbytes

    def _key(self, request: Request, page: int) -> tuple[bytes, int]:
        return request.names[page], request.tokens[(page + 1) * self.page_size]


def score_fields(x: Sampled | Scores) -> tuple[jax.Array, ...]:
    """The arrays of scores in the order in which a ScoreLog takes them."""
    return x.logprob, x.rank, x.top_ids, x.top_logprobs


def scored_from(request: Request) -> np.int32:
    """What a seat is told: the position from which on the prompt's scores are wanted."""
    return np.int32(request.unscored if request.scored else NEVER)


def take_prompt_scores(
    request: Request, output: Output, row: int, work: ScheduledTokens, kept: PageScores
) -> None:
    """Column i of a row's scores is the prompt's token start + i + 1; those of whole pages are kept."""
    if not request.scored or output.prompt is None:
        return
    first, end = request.unscored, min(work.start + work.count + 1, len(request.prompt))
    if first < end:
        assert first > work.start, f"position {first} of request {request.id} has no score"
        columns = slice(first - work.start - 1, end - work.start - 1)
        request.prompt_scores.extend(*(np.asarray(x)[row, columns] for x in score_fields(output.prompt)))
        kept.keep(request, first)
