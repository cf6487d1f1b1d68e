"""Acceptance rates of draft tokens, by their position in the draft and by the row's last results.

Draft tokens that copy other text are right in runs: a row whose last ones were right is likely in the middle
of one.
"""

from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

HALF_LIFE = 256  # judged draft tokens of a position after which their weight is halved
PRIOR, PRIOR_WEIGHT = 0.5, 4.0  # acceptance before any is judged, and its weight in judged tokens
MIN_STREAKS = (1, 4)  # minimum right tokens in succession, for each class above WRONG
UNKNOWN, WRONG = 0, 1  # classes of rows without judged draft tokens, and with a last one that was wrong
NUM_STREAK_CLASSES = WRONG + 1 + len(MIN_STREAKS)


class Offer(NamedTuple):
    """Draft tokens on offer for a row.

    num_draft_tokens: number of draft tokens.
    streak_class: class of the row by its latest draft tokens (`classify_streak`).
    """

    num_draft_tokens: int
    streak_class: int = UNKNOWN


def classify_streak(streak: int) -> int:
    """Return the class of a row by the `streak` of its latest right draft tokens: WRONG plus one per limit in
    MIN_STREAKS."""
    return WRONG + sum(streak >= limit for limit in MIN_STREAKS)


@dataclass
class Acceptance:
    """Share of judged draft tokens that were right, by streak class and by position in the draft. Old ones
    count less.

    The prior of a class is the share over all classes. There, the prior of a position is the share of the
    position before.

    judged: weight of judged draft tokens, [classes][positions].
    right: weight of right ones, [classes][positions].
    """

    judged: list[list[float]]
    right: list[list[float]]

    @classmethod
    def make_empty(cls, depth: int) -> "Acceptance":
        """Return a record without judged draft tokens, for drafts of at most `depth` tokens."""
        zeros = [[[0.0] * depth for _ in range(NUM_STREAK_CLASSES)] for _ in range(2)]
        return cls(zeros[0], zeros[1])

    def learn(self, streak_class: int, offered: int, accepted: int) -> None:
        """Record a row's step: a draft token is judged if all before it were right."""
        decay, judged, right = 0.5 ** (1 / HALF_LIFE), self.judged[streak_class], self.right[streak_class]
        for i in range(min(accepted + 1, offered, len(judged))):
            judged[i] = judged[i] * decay + 1
            right[i] = right[i] * decay + (i < accepted)

    def expected_gains(self) -> list[list[float]]:
        """Return the expected tokens that each further draft token gives, for each streak class."""
        right, judged = (list(map(sum, zip(*known, strict=True))) for known in (self.right, self.judged))
        known, share = [], PRIOR
        for r, j in zip(right, judged, strict=True):
            share = blend_with_prior(r, j, share)
            known.append(share)
        return [
            list(accumulate(map(blend_with_prior, right, judged, known), mul))
            for right, judged in zip(self.right, self.judged, strict=True)
        ]


def blend_with_prior(right: float, judged: float, prior: float) -> float:
    """Return the share of judged tokens that were right, blended with a prior."""
    return (right + prior * PRIOR_WEIGHT) / (judged + PRIOR_WEIGHT)
