"""The share of guesses that are right: for each place, and for how the row's last guesses did.

Guesses that copy what stands elsewhere are right in runs: a row whose last guesses were right is likely in
the middle of one.
"""

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

HALF_LIFE = 256  # judged guesses of a place after which their weight is halved
PRIOR, PRIOR_WEIGHT = 0.5, 4.0  # acceptance before anything is known, in judged guesses
RUNS = (1, 4)  # tokens right in a row that a form has at least
UNKNOWN, WRONG = 0, 1  # forms of rows without judged guesses, and of those whose last was wrong
FORMS = WRONG + 1 + len(RUNS)


class Offer(NamedTuple):
    """How many guesses there are for a row, and how its last ones did."""

    guesses: int
    form: int = UNKNOWN


def form_of(run: int) -> int:
    """The form of a row whose last `run` tokens were guessed."""
    return WRONG + sum(run >= least for least in RUNS)


@dataclass
class Acceptance:
    """Of the guesses for each form and place that were judged, the share that was right; old ones fade.

    What is known of all forms is where one starts from, and a place from the place before it.
    """

    judged: list[list[float]]  # [forms][places]
    right: list[list[float]]

    @classmethod
    def of_places(cls, places: int) -> "Acceptance":
        nothing = [[[0.0] * places for _ in range(FORMS)] for _ in range(2)]
        return cls(nothing[0], nothing[1])

    def learn(self, form: int, offered: int, accepted: int) -> None:
        """One row's step: a guess is judged when all before it were right."""
        keep, judged, right = 0.5 ** (1 / HALF_LIFE), self.judged[form], self.right[form]
        for i in range(min(accepted + 1, offered, len(judged))):
            judged[i] = judged[i] * keep + 1
            right[i] = right[i] * keep + (i < accepted)

    def gains(self) -> list[list[float]]:
        """For each form the tokens that each more guess is expected to give."""
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
    """The share right, of judged ones and a few that are right as often as is thought before."""
    return (right + prior * PRIOR_WEIGHT) / (judged + PRIOR_WEIGHT)
