"""How many guesses a step verifies, none included: what the last steps say is fastest now.

A pass over k guesses gives 1 + a1 + a1 a2 + ... tokens a row (Leviathan et al., arXiv 2211.17192, with an acceptance of its own
for each place), and costs what passes of its shape have cost. At a full batch a pass is bound by arithmetic, k + 1 tokens cost
k + 1 times one, and the answer is none. Plain Python; its choices follow from what it was told, in that order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

HALF_LIFE = 256  # judged guesses of a place after which their weight is halved
PRIOR, PRIOR_WEIGHT = 0.6, 4.0  # acceptance before anything is known, in judged guesses
SMOOTHING = 0.1  # weight of the newest time of a shape
OUTLIER = 2.0  # a time counts as at most so many times what was expected
MARGIN = 0.01  # another k must promise so much more before it is taken
SHARE = 0.005  # of all time may be spent on trying what does not look best
PATIENCE = 20  # choices between two trials


@dataclass
class Acceptance:
    """Of the guesses for each place that were judged, the share that was right; old ones fade."""

    judged: list[float]
    right: list[float]

    @classmethod
    def of_places(cls, places: int) -> "Acceptance":
        return cls([PRIOR_WEIGHT] * places, [PRIOR * PRIOR_WEIGHT] * places)

    def learn(self, offered: int, accepted: int) -> None:
        """One row's step: a guess is judged when all before it were right."""
        keep = 0.5 ** (1 / HALF_LIFE)
        for i in range(min(accepted + 1, offered, len(self.judged))):
            self.judged[i] = self.judged[i] * keep + 1
            self.right[i] = self.right[i] * keep + (i < accepted)

    def expected(self) -> list[float]:
        """Tokens of a pass for 0, 1, 2, ... guesses."""
        shares = [right / judged for right, judged in zip(self.right, self.judged, strict=True)]
        return list(accumulate(accumulate(shares, mul), initial=1.0))


@dataclass
class StepTime:
    """The time of one shape, an average in which the newest counts most. `age` is the number of choices since it was measured."""

    seconds: float
    measured: int = 1
    age: int = 0

    def learn(self, seconds: float) -> None:
        self.measured, self.age = self.measured + 1, 0
        weight = max(SMOOTHING, 1 / self.measured)
        self.seconds += weight * (min(seconds, OUTLIER * self.seconds) - self.seconds)


@dataclass
class Controller:
    """Chooses among `ks` (0 and the numbers of guesses whose verification is compiled), for each number of rows by itself.

    `times` are seconds of a step by (rows, k), as the warm-up measured them; a shape without one is tried when it first comes up.
    """

    ks: tuple[int, ...]
    times: dict[tuple[int, int], StepTime] = field(default_factory=dict)
    chosen: dict[int, int] = field(default_factory=dict)  # by rows, what was last taken for the best
    spent: float = 0.0  # seconds lost by trials
    elapsed: float = 0.0
    since: int = 0  # choices since the last trial

    def __post_init__(self):
        assert self.ks and list(self.ks) == sorted({0, *self.ks}), f"ks {self.ks} must ascend from 0"
        self.acceptance = Acceptance.of_places(self.ks[-1])

    @classmethod
    def of_times(cls, ks: Sequence[int], seconds: Mapping[tuple[int, int], float]) -> "Controller":
        return cls(tuple(ks), {shape: StepTime(t) for shape, t in seconds.items()})

    def choose(self, rows: int, offered: Sequence[int] | None = None) -> int:
        """The most guesses a row may have in this step of a shape with so many rows.

        `offered` are the guesses that each of its requests has, where they are known; otherwise all have enough.
        """
        useful = self.ks[-1] if offered is None else max(offered, default=0)
        ks = [k for i, k in enumerate(self.ks) if i == 0 or self.ks[i - 1] < useful]
        if untried := [k for k in ks if (rows, k) not in self.times]:
            return untried[-1]
        gains, costs = self._gains(ks, rows, offered), {k: self.times[rows, k] for k in ks}
        best = self._best(rows, {k: gains[k] / costs[k].seconds for k in ks})
        trial = self._trial(ks, gains, costs, best)
        for cost in costs.values():
            cost.age += 1
        self.elapsed += costs[trial].seconds
        return trial

    def passed(self, rows: int) -> None:
        """A step of so many rows went without guesses, unasked."""
        self.since += 1
        for k in self.ks:
            if (rows, k) in self.times:
                self.times[rows, k].age += 1
        self.elapsed += self.times[rows, 0].seconds

    def timed(self, rows: int, k: int, seconds: float) -> None:
        """A step of a shape took so long."""
        if (rows, k) in self.times:
            self.times[rows, k].learn(seconds)
        else:
            self.times[rows, k] = StepTime(seconds)

    def judged(self, offered: int, accepted: int) -> None:
        """Of a row's guesses the first `accepted` were right. Guesses that no step verified count as well, where the tokens
        that came instead are known: a drafter on the host learns while it is not used."""
        self.acceptance.learn(offered, accepted)

    def _gains(self, ks: list[int], rows: int, offered: Sequence[int] | None) -> dict[int, float]:
        """Tokens that a step is expected to give."""
        expected = self.acceptance.expected()
        if offered is None:
            return {k: rows * expected[k] for k in ks}
        return {k: sum(expected[min(k, n)] for n in offered) for k in ks}

    def _best(self, rows: int, rates: dict[int, float]) -> int:
        """The fastest, but the last one as long as it is about as fast."""
        best, last = max(rates, key=lambda k: rates[k]), self.chosen.get(rows, 0)
        if last in rates and rates[best] <= rates[last] * (1 + MARGIN):
            return last
        self.chosen[rows] = best
        return best

    def _trial(self, ks: list[int], gains: dict[int, float], costs: dict[int, StepTime], best: int) -> int:
        """Now and then another than the best, the one not seen for longest, if the time that it loses is within the share."""
        self.since += 1
        others = [k for k in ks if k != best]
        if self.since <= PATIENCE or not others:
            return best
        other = max(others, key=lambda k: costs[k].age)
        lost = max(0.0, costs[other].seconds - gains[other] / gains[best] * costs[best].seconds)
        if self.spent + lost > SHARE * self.elapsed:
            return best
        self.spent, self.since = self.spent + lost, 0
        return other
