"""Acceptance rates of draft tokens, by their place and by the row's last results.

Draft tokens that copy other text are right in runs: a row whose last ones were right is likely in the middle
of one.
"""

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

HALF_LIFE = 256  # judged draft tokens of a place after which their weight is halved
PRIOR, PRIOR_WEIGHT = 0.5, 4.0  # acceptance before any is judged, and its weight in judged tokens
RUNS = (1, 4)  # least tokens right in a row of each form
UNKNOWN, WRONG = 0, 1  # forms of rows without judged guesses, and of those whose last was wrong
FORMS = WRONG + 1 + len(RUNS)


class Offer(NamedTuple):
    """Draft tokens on offer for a row, and the form of its last ones."""

    guesses: int
    form: int = UNKNOWN


def form_of(run: int) -> int:
    """Return the form of a row whose last `run` tokens were drafted right."""
    return WRONG + sum(run >= least for least in RUNS)


@dataclass
class Acceptance:
    """Share of judged draft tokens that were right, for each form and place; old ones fade.

    The prior of a form is the share of all forms, and that of a place is the place before it.
    """

    judged: list[list[float]]  # [forms][places]
    right: list[list[float]]

    @classmethod
    def of_places(cls, places: int) -> "Acceptance":
        nothing = [[[0.0] * places for _ in range(FORMS)] for _ in range(2)]
        return cls(nothing[0], nothing[1])

    def learn(self, form: int, offered: int, accepted: int) -> None:
        """Record a row's step: a draft token is judged if all before it were right."""
        keep, judged, right = 0.5 ** (1 / HALF_LIFE), self.judged[form], self.right[form]
        for i in range(min(accepted + 1, offered, len(judged))):
            judged[i] = judged[i] * keep + 1
            right[i] = right[i] * keep + (i < accepted)

    def gains(self) -> list[list[float]]:
        """Return, for each form, the tokens that each further draft token is expected to give."""
        right, judged = (list(map(sum, zip(*known, strict=True))) for known in (self.right, self.judged))
        known, share = [], PRIOR
        for r, j in zip(right, judged, strict=True):
            share = blended(r, j, share)
            known.append(share)
        return [
            list(accumulate(map(blended, right, judged, known), mul))
            for right, judged in zip(self.right, self.judged, strict=True)
        ]


def blended(right: float, judged: float, prior: float) -> float:
    """Return the share of judged tokens that were right, blended with a prior."""
    return (right + prior * PRIOR_WEIGHT) / (judged + PRIOR_WEIGHT)
