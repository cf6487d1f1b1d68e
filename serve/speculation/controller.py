"""How many guesses a step verifies, none included: what the last steps say is fastest now.

A pass over k guesses gives 1 + a1 + a1 a2 + ... tokens a row (Leviathan et al., arXiv 2211.17192, with an
acceptance of its own for each place), and costs what passes of its shape have cost. At a full batch a pass is
bound by arithmetic, k + 1 tokens cost k + 1 times one, and the answer is none.

Guesses need the last step's tokens, so a step that is asked for them waits for those, and the host's work on
them is in its time. A plain step overlaps with that work: it is the cheaper way to verify nothing, and has a
time of its own. Where asking does not pay, most steps are plain. Plain Python; its choices follow from what
it was told, in that order.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

HALF_LIFE_GUESSES = 256  # judged guesses of a place after which their weight is halved
PRIOR, PRIOR_WEIGHT = 0.6, 4.0  # acceptance before anything is known, in judged guesses
TIME_WEIGHT = 0.05  # weight of the newest time of a shape
MOST_TIMES_EXPECTED = 2.0  # a time counts as at most this many times what was expected
SWITCH_MARGIN = 0.005  # another k must promise so much more before it is taken
TRIAL_SHARE = 0.004  # of all time may be spent on trying what does not look best
STEPS_BETWEEN_TRIALS = 20  # steps between two trials
FOUND_WEIGHT = 0.02  # weight of the newest step among those that were asked
LOSS_WEIGHT = 0.4  # the same among those that had guesses
ASKING_SHARE = 0.007  # of the time may be lost by asking where it does not pay
MOST_PLAIN_STEPS = 75  # plain steps in a row
MEASURED_PLAIN_STEPS = 4  # plain steps in which their time is measured


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
        keep = 0.5 ** (1 / HALF_LIFE_GUESSES)
        for i in range(min(accepted + 1, offered, len(self.judged))):
            self.judged[i] = self.judged[i] * keep + 1
            self.right[i] = self.right[i] * keep + (i < accepted)

    def expected(self) -> list[float]:
        """Tokens of a pass for 0, 1, 2, ... guesses."""
        shares = [right / judged for right, judged in zip(self.right, self.judged, strict=True)]
        return list(accumulate(accumulate(shares, mul), initial=1.0))


@dataclass
class StepTime:
    """The time of one kind of step, an average in which the newest counts most. `age` is the number of steps
    since it was measured."""

    seconds: float
    measured: int = 0
    age: int = 0

    def learn(self, seconds: float) -> None:
        self.measured, self.age = self.measured + 1, 0
        weight = max(TIME_WEIGHT, 1 / self.measured)
        self.seconds += weight * (min(seconds, MOST_TIMES_EXPECTED * self.seconds) - self.seconds)


@dataclass
class Asking:
    """What asking for guesses is worth: how often there were some, and by how much slower than plain steps
    those were."""

    lost: float  # seconds of a step with guesses, less those of plain steps for the same tokens
    found: float = 1.0
    asked: float = PRIOR_WEIGHT

    def learn(self, found: bool, lost: float) -> None:
        self.asked += 1
        self.found += max(FOUND_WEIGHT, 1 / self.asked) * (found - self.found)
        if found:
            self.lost += LOSS_WEIGHT * (lost - self.lost)

    def mean(self, idle: float) -> float:
        """Seconds lost by a step that is asked, where one without guesses loses `idle`."""
        return self.found * self.lost + (1 - self.found) * idle


@dataclass
class Controller:
    """Chooses among `ks` (0 and the numbers of guesses whose verification is compiled), for each number of
    rows by itself.

    `times` are seconds of a step that is asked for guesses by (rows, k), `plain` those of one that is not by
    rows, first as the warm-up measured them; a kind without a time is tried when it first comes up.
    """

    ks: tuple[int, ...]
    times: dict[tuple[int, int], StepTime] = field(default_factory=dict)
    plain: dict[int, StepTime] = field(default_factory=dict)
    chosen: dict[int, int] = field(default_factory=dict)  # by rows, what was last taken for the best
    asking: dict[int, Asking] = field(default_factory=dict)  # by rows
    asleep: dict[int, int] = field(default_factory=dict)  # by rows, plain steps to come
    spent: float = 0.0  # seconds lost by trials
    elapsed: float = 0.0
    since: int = 0  # steps since the last trial

    def __post_init__(self):
        assert self.ks and list(self.ks) == sorted({0, *self.ks}), f"ks {self.ks} must ascend from 0"
        self.acceptance = Acceptance.of_places(self.ks[-1])

    @classmethod
    def of_times(cls, ks: Sequence[int], seconds: Mapping[tuple[int, int], float]) -> "Controller":
        plain = {rows: StepTime(t) for (rows, k), t in seconds.items() if k == 0}
        return cls(tuple(ks), {shape: StepTime(t) for shape, t in seconds.items()}, plain)

    def asks(self, rows: int) -> bool:
        """Whether the next step of `rows` rows may verify guesses, and waits for the last tokens; otherwise
        it is plain."""
        left = self.asleep.setdefault(rows, MEASURED_PLAIN_STEPS)
        if not left:
            return True
        self.asleep[rows] = left - 1
        self.since += 1
        self.elapsed += self.plain[rows].seconds if rows in self.plain else 0.0
        for cost in [self.times[rows, k] for k in self.ks if (rows, k) in self.times]:
            cost.age += 1
        return False

    def choose(self, rows: int, offered: Sequence[int]) -> int:
        """The most guesses a row may have in a step of a shape with `rows` rows that was asked.

        `offered` are the guesses that each of its requests has.
        """
        useful = max(offered, default=0)
        ks = [k for i, k in enumerate(self.ks) if i == 0 or self.ks[i - 1] < useful]
        if untried := [k for k in ks if (rows, k) not in self.times]:
            return untried[-1]
        expected, costs = self.acceptance.expected(), {k: self.times[rows, k] for k in ks}
        gains = {k: sum(expected[min(k, n)] for n in offered) for k in ks}
        best = self._best(rows, {k: gains[k] / costs[k].seconds for k in ks})
        trial = self._trial(ks, gains, costs, best)
        self._rest(rows, useful > 0, costs[best].seconds, gains[best] / len(offered))
        for cost in costs.values():
            cost.age += 1
        self.elapsed += costs[trial].seconds
        return trial

    def timed(self, rows: int, k: int | None, seconds: float) -> None:
        """A step that was asked has taken so long with k guesses, or a plain one; None stands for that."""
        if k is None:
            self.plain.setdefault(rows, StepTime(seconds)).learn(seconds)
        else:
            self.times.setdefault((rows, k), StepTime(seconds)).learn(seconds)

    def judged(self, offered: int, accepted: int) -> None:
        """Of a row's guesses the first `accepted` were right."""
        self.acceptance.learn(offered, accepted)

    def _best(self, rows: int, rates: dict[int, float]) -> int:
        """The fastest, but the last one as long as it is about as fast."""
        best, last = max(rates, key=lambda k: rates[k]), self.chosen.get(rows, 0)
        if last in rates and rates[best] <= rates[last] * (1 + SWITCH_MARGIN):
            return last
        self.chosen[rows] = best
        return best

    def _trial(self, ks: list[int], gains: dict[int, float], costs: dict[int, StepTime], best: int) -> int:
        """Now and then another than the best, the one not seen for longest, if the time that it loses is
        within the share."""
        self.since += 1
        others = [k for k in ks if k != best]
        if self.since <= STEPS_BETWEEN_TRIALS or not others:
            return best
        other = max(others, key=lambda k: costs[k].age)
        lost = max(0.0, costs[other].seconds - gains[other] / gains[best] * costs[best].seconds)
        if not self._afford(lost):
            return best
        self.since = 0
        return other

    def _rest(self, rows: int, found: bool, seconds: float, tokens: float) -> None:
        """Plain steps to come after a step that was asked and is expected to yield `tokens` tokens a row.

        Where asking does not pay, enough that it costs its share of the time at most; where it does, a few
        when it is long since one was measured.
        """
        plain = self.plain.get(rows) or self.times[rows, 0]
        lost = seconds - tokens * plain.seconds
        asking = self.asking.setdefault(rows, Asking(-plain.seconds))
        asking.learn(found, lost)
        mean = asking.mean(self.times[rows, 0].seconds - plain.seconds)
        plain.age += 1
        if lost > 0 and mean > 0:
            self.asleep[rows] = min(MOST_PLAIN_STEPS, math.ceil(mean / (ASKING_SHARE * plain.seconds)))
        elif plain.age > MOST_PLAIN_STEPS and self._afford(MEASURED_PLAIN_STEPS * max(0.0, -mean)):
            self.asleep[rows] = MEASURED_PLAIN_STEPS

    def _afford(self, lost: float) -> bool:
        """Whether a trial that loses `lost` seconds is within the share; if so it is taken."""
        if self.spent + lost > TRIAL_SHARE * self.elapsed:
            return False
        self.spent += lost
        return True
