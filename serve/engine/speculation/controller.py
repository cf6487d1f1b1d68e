"""Number of draft tokens that a step verifies for each row: the fastest choice by the times of recent steps.

A pass over k draft tokens gives 1 + a1 + a1 a2 + ... tokens a row (Leviathan et al., arXiv 2211.17192), with
an acceptance of its own for each place and for the row's last results. A compiled verification computes a
fixed number of tokens: its places go to the draft tokens that are likeliest to be kept, of any row.

A speculative step needs the last step's tokens, so it waits for them, and its time has the host's work on
them. A plain step overlaps with that work, which makes it the cheaper way to verify nothing. Its time is
stored in units of the pace of speculative steps, since contexts and the load of the machine slow both alike.
What speculative steps lost against plain ones is recorded, and bounds how often they are tried while they do
not pay. Choices follow from the calls of this class, in their order.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from .acceptance import Acceptance, Offer

TIME_WEIGHT = 0.05  # weight of the newest time of a shape
PLAIN_WEIGHT = 0.1  # the same for plain steps, which are measured seldom
USUAL_WEIGHT, PACE_WEIGHT = 0.02, 0.3  # the same for a shape's usual time, and for the pace
MOST_TIMES_EXPECTED = 2.0  # a time counts as at most this many times what was expected
ASKING_SHARE = 0.003  # of the time may be lost by speculative steps that do not pay
MOST_FAILURES = 2  # times in a row that they did not, each of which halves that share
LOAN = 0.5  # plain steps' time that may be lost at a stretch before steps are plain
LEAST_WAIT = 0.1  # least loss of a speculative step without draft tokens, in plain steps
FIRST_LOAN = 4.0  # the same before any measurement
CREDIT = 4.0  # plain steps' time that was won and may be lost again
CREDIT_OF_ONE = 60.0  # the same for one row, whose gain varies most
TRIAL_SHARE = 0.002  # of all time may be spent on trying what does not look best
STEPS_BETWEEN_TRIALS = 20  # steps between two trials
MARGIN = 0.06  # gain that a speculative step must have, in plain steps: times are not exact
STEPS_BETWEEN_PLAIN = 100  # speculative steps after which plain ones are measured in any case
FIRST_PLAIN, MEASURED_PLAIN = 16.0, 4.0  # plain steps measured before the first speculative one, and later
SHORTEST = 1e-6  # seconds that a step takes at least: a coarse clock measures 0
UNMEASURED = 0.25  # counts as this much of a measured plain step if it could not be measured

Key = tuple[int, int]  # tokens of a step or call, and the most draft tokens of a row, 0 in a decode


@dataclass
class StepTime:
    """Running average of the time of one kind of step. `age` is the number of speculative steps since it was
    measured."""

    seconds: float
    measured: int = 0
    age: int = 0

    def learn(self, seconds: float, least: float) -> None:
        self.measured, self.age = self.measured + 1, 0
        weight = max(least, 1 / self.measured)
        self.seconds += weight * (min(seconds, MOST_TIMES_EXPECTED * self.seconds) - self.seconds)


@dataclass
class Times:
    """Seconds of steps of one kind. A key without a measurement has the warm-up's time, plus what its nearest
    measured neighbour took longer than the warm-up's."""

    warmup: Mapping[Key, float]
    weight: float = TIME_WEIGHT
    found: dict[Key, StepTime] = field(default_factory=dict)

    def of(self, key: Key) -> float:
        if key in self.found:
            return self.found[key].seconds
        near = min(self.found, key=lambda other: distance(key, other), default=None)
        more = 0.0 if near is None else self.found[near].seconds - self.warmed_up(near)
        return self.warmed_up(key) + max(more, 0.0)

    def warmed_up(self, key: Key) -> float:
        """Return the warm-up's time; more tokens than the largest shape has take several calls."""
        if key in self.warmup:
            return self.warmup[key]
        largest = max(shape for shape in self.warmup if shape[1] == key[1])
        return self.warmup[largest] + self.warmed_up((key[0] - largest[0], key[1]))

    def learn(self, key: Key, seconds: float) -> None:
        self.found.setdefault(key, StepTime(self.of(key))).learn(seconds, self.weight)

    def age(self, key: Key) -> float:
        return self.found[key].age if key in self.found else float("inf")


def computed(sizes: Sequence[int], tokens: int) -> int:
    """Return the tokens that a step of `tokens` computes in calls of these sizes, padding included."""
    full, rest = divmod(tokens, sizes[-1])
    return full * sizes[-1] + (next(size for size in sizes if size >= rest) if rest else 0)


def distance(a: Key, b: Key) -> float:
    return max(a[0], b[0]) / min(a[0], b[0]) + abs(a[1] - b[1])


@dataclass
class Ledger:
    """Seconds that speculative steps have lost against plain ones of the same tokens; negative if they
    won. `failures` counts the stretches of them that have lost since the last one that won."""

    debt: float = 0.0
    limit: float = FIRST_LOAN  # debt, in plain steps, up to which steps are speculative
    left: float = FIRST_PLAIN  # plain steps to measure in any case
    asked: int = 0  # steps since a plain one
    failures: int = 0
    awake: bool = True

    def learn(self, lost: float, plain: float, rows: int) -> None:
        """Record the loss of a speculative step. Its gain varies more with few rows, which may lose more
        credit."""
        most = CREDIT + (CREDIT_OF_ONE - CREDIT) / rows
        self.debt = max(self.debt + lost + MARGIN * plain, -most * plain)
        self.asked += 1
        if self.asked == STEPS_BETWEEN_PLAIN:
            self.left = MEASURED_PLAIN
        if self.debt > self.limit * plain:
            first = self.limit == FIRST_LOAN  # which is never paid back in full
            self.debt, self.awake = LOAN * plain if first else self.debt, False
            self.failures, self.left = min(self.failures + 1, MOST_FAILURES), MEASURED_PLAIN
        elif self.debt < 0:
            self.failures = 0

    def rest(self, plain: float) -> None:
        """Record a plain step, in which a part of the debt is paid off."""
        if self.debt > 0:
            self.debt -= ASKING_SHARE / 2**self.failures * plain
        self.left, self.asked = max(self.left - UNMEASURED, 0.0), 0
        if self.debt <= 0 and not self.awake:
            self.awake, self.limit = True, LOAN

    def wake(self, plain: float) -> None:
        """Allow a small loss again, as draft tokens look likely to pay."""
        if not self.awake and self.debt < 2 * LOAN * plain:
            self.awake, self.limit = True, self.debt / plain + LOAN / 2


class Choice(NamedTuple):
    """A kind of step, its expected tokens, and the row of each draft token."""

    key: Key
    tokens: float
    places: Sequence[int] = ()


@dataclass
class Controller:
    """Chooses the number of draft tokens of each row.

    seconds: of a call by its `Key`, as the warm-up measured them; a step takes as many calls as it needs.
    unit: places that a draft token takes beside the one of its row: 1, or 0 if each row is computed with all
    the draft tokens that it may have.
    """

    seconds: Mapping[Key, float]
    unit: int = 1
    ledgers: dict[int, Ledger] = field(default_factory=dict)  # by width of decode
    spent: float = 0.0  # seconds lost by trials
    elapsed: float = 0.0
    since: int = 0  # steps since the last trial

    def __post_init__(self):
        self.depths = sorted({k for _, k in self.seconds if k})
        self.sizes = {k: sorted(n for n, depth in self.seconds if depth == k) for k in (0, *self.depths)}
        self.acceptance = Acceptance.of_places(self.depths[-1])
        self.asked, self.plain = Times(self.seconds), Times(self.seconds, PLAIN_WEIGHT)
        self.usual, self.pace = Times(self.seconds, USUAL_WEIGHT), 1.0

    # ------------------------------------------------------------ a step to come

    def should_speculate(self, rows: int) -> bool:
        """Return True if the next step of `rows` rows is speculative, and waits for the last tokens; else it
        is plain."""
        ledger, plain = self._ledger(rows), self._plain(rows)
        if ledger.awake and not ledger.left:
            return True
        ledger.rest(plain)
        self.elapsed += plain
        return False

    def choose(self, offers: Sequence[Offer]) -> list[int]:
        """Return the number of draft tokens of each row of a speculative step."""
        choices = self._choices(offers)
        best = max(choices, key=self._rate)
        chosen = self._trial(choices, best)
        for time in self.asked.found.values():
            time.age += 1
        self.elapsed += self.asked.of(chosen.key)
        guesses = Counter(chosen.places)
        return [guesses[row] for row in range(len(offers))]

    def glance(self, rows: int, offers: Sequence[Offer]) -> None:
        """While steps are plain, learn what some of the `rows` rows would have drafted."""
        if self._ledger(rows).awake or not offers:
            return
        steps = [
            [offers[(first + i) % len(offers)] for i in range(rows)] for first in range(0, len(offers), rows)
        ]
        best = [max(self._choices(step), key=self._rate) for step in steps]
        plain = self.plain.of((self._width(rows), 0))
        seconds = sum(self.usual.of(choice.key) for choice in best)
        if any(choice.places for choice in best) and seconds / plain < sum(c.tokens for c in best) / rows:
            self._ledger(rows).wake(self._plain(rows))

    def _choices(self, offers: Sequence[Offer]) -> list[Choice]:
        """Return the kinds of steps that hold the rows; places go to the draft tokens that are likeliest to
        be kept."""
        rows, gains = len(offers), self.acceptance.gains()
        choices = [Choice((self._width(rows), 0), float(rows))]
        for k in self.depths:
            ranked = sorted(
                ((gain, row) for row, o in enumerate(offers) for gain in gains[o.form][: min(k, o.guesses)]),
                reverse=True,
            )
            tokens = list(accumulate((gain for gain, _ in ranked), initial=float(rows)))
            places = [row for _, row in ranked]
            for size in self._sizes(k, rows, rows + self.unit * len(places)):
                taken = min(size - rows, len(places)) if self.unit else len(places)
                if taken:
                    choices.append(Choice((size, k), tokens[taken], places[:taken]))
        return choices

    def _sizes(self, k: int, least: int, most: int) -> Iterator[int]:
        """Yield the token counts of steps that hold at least `least` and need no more than `most`."""
        size = computed(self.sizes[k], least)
        while size < most:
            yield size
            size = computed(self.sizes[k], size + 1)
        yield size

    def _rate(self, choice: Choice) -> float:
        return choice.tokens / self.asked.of(choice.key)

    def _trial(self, choices: list[Choice], best: Choice) -> Choice:
        """Return now and then another choice than the best, the one measured longest ago, if its loss is
        affordable."""
        self.since += 1
        others = [choice for choice in choices if choice is not best]
        if self.since <= STEPS_BETWEEN_TRIALS or not others:
            return best
        other = max(others, key=lambda choice: self.asked.age(choice.key))
        lost = self.asked.of(other.key) - other.tokens / self._rate(best)
        if not self._afford(lost):
            return best
        self.since = 0
        return other

    def _afford(self, lost: float) -> bool:
        """Return True if a trial that loses `lost` seconds is within the share, and charge it."""
        if self.spent + lost > TRIAL_SHARE * self.elapsed:
            return False
        self.spent += lost
        return True

    # ------------------------------------------------------------ what came of it

    def record_verified(
        self, guesses: Sequence[int], tokens: int, seconds: float, prompts: bool = False
    ) -> None:
        """Record a speculative step: the draft tokens of each row, the tokens that it gave and its seconds.

        Host work on `prompts` is in its time: it is charged, but not used to predict other steps.
        """
        rows, key, seconds = len(guesses), self._key(guesses), max(seconds, SHORTEST)
        if not prompts:
            self.usual.learn(key, seconds)
            self._learn_pace(seconds / self.usual.of(key))
            self.asked.learn(key, seconds)
        plain = self._plain(rows)
        expected = self.asked.of(key)
        lost = min(seconds, MOST_TIMES_EXPECTED * expected) - tokens / rows * plain
        self._ledger(rows).learn(lost if key[1] else max(lost, LEAST_WAIT * plain), plain, rows)

    def record_plain(self, rows: int, seconds: float) -> None:
        """Record the seconds of a plain step."""
        key, ledger, seconds = (self._width(rows), 0), self._ledger(rows), max(seconds, SHORTEST)
        if ledger.left:  # the pace is fresh from speculative steps
            self.plain.learn(key, seconds / self.pace)
            ledger.left = max(ledger.left - (1 - UNMEASURED), 0.0)
        else:
            self._learn_pace(seconds / self.plain.of(key))

    def _learn_pace(self, found: float) -> None:
        self.pace += PACE_WEIGHT * (min(found, MOST_TIMES_EXPECTED * self.pace) - self.pace)

    def _plain(self, rows: int) -> float:
        """Return the seconds of a plain step at the present pace."""
        return self.pace * self.plain.of((self._width(rows), 0))

    def record_acceptance(self, form: int, offered: int, accepted: int) -> None:
        """Record that the first `accepted` of a row's draft tokens were right."""
        self.acceptance.learn(form, offered, accepted)

    def _key(self, guesses: Sequence[int]) -> Key:
        if not any(guesses):
            return self._width(len(guesses)), 0
        k = next((depth for depth in self.depths if depth >= max(guesses)), self.depths[-1])
        return computed(self.sizes[k], len(guesses) + self.unit * sum(guesses)), k

    def _width(self, rows: int) -> int:
        return computed(self.sizes[0], rows)

    def _ledger(self, rows: int) -> Ledger:
        first = FIRST_LOAN if not self.ledgers else LOAN
        return self.ledgers.setdefault(self._width(rows), Ledger(limit=first))
