"""How many guesses of each row a step verifies, none included: what the last steps say is fastest now.

A pass over k guesses gives 1 + a1 + a1 a2 + ... tokens a row (Leviathan et al., arXiv 2211.17192), with an
acceptance of its own for each place and for how the row's last guesses did. A compiled verification computes
so many tokens, whosever they are: its places go to the guesses that are likeliest to be kept.

Guesses need the last step's tokens, so a step that is asked for them waits for those, and the host's work on
them is in its time. A plain step overlaps with that work: it is the cheaper way to verify nothing, and has a
time of its own, in units of the pace that asked steps have at the moment: contexts and the machine change
both alike. What asked steps lost against plain ones is written down, and bounds how often steps are
asked where that does not pay. Plain Python; its choices follow from what it was told, in that order.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from .acceptance import Acceptance, Offer

TIME_WEIGHT = 0.05  # weight of the newest time of a shape
PLAIN_WEIGHT = 0.1  # the same of plain steps, which are measured seldom
USUAL_WEIGHT, PACE_WEIGHT = 0.02, 0.3  # of a shape's usual time, and of the pace beside it
MOST_TIMES_EXPECTED = 2.0  # a time counts as at most this many times what was expected
ASKING_SHARE = 0.003  # of the time may be lost by asking where it does not pay
LOAN = 0.5  # plain steps' time that may be lost at a stretch before steps are plain
LEAST_WAIT = 0.1  # of a plain step's time is lost at least by one that was asked and had nothing to verify
FIRST_LOAN = 4.0  # the same before anything is known
CREDIT = 4.0  # plain steps' time that was won and may be lost again
CREDIT_OF_ONE = 60.0  # the same of one row, which is given now much and now nothing
TRIAL_SHARE = 0.002  # of all time may be spent on trying what does not look best
STEPS_BETWEEN_TRIALS = 20  # steps between two trials
MARGIN = 0.06  # of a plain step's time is to be won by an asked one: no time is known exactly
STEPS_BETWEEN_PLAIN = 100  # asked steps after which plain ones are measured, whatever these seem to cost
FIRST_PLAIN, MEASURED_PLAIN = 16.0, 4.0  # plain steps that are measured before the first asked one, and then
UNMEASURED = 0.25  # what a plain step counts of these that could not be measured

Key = tuple[int, int]  # tokens that a step or call computes, and the most guesses of a row, 0 in a decode


@dataclass
class StepTime:
    """The time of one kind of step, an average in which the newest counts most. `age` is the number of asked
    steps since it was measured."""

    seconds: float
    measured: int = 0
    age: int = 0

    def learn(self, seconds: float, least: float) -> None:
        self.measured, self.age = self.measured + 1, 0
        weight = max(least, 1 / self.measured)
        self.seconds += weight * (min(seconds, MOST_TIMES_EXPECTED * self.seconds) - self.seconds)


@dataclass
class Times:
    """Seconds of steps of one kind: measured ones, and for others what the warm-up says, with what the next
    measured one took longer than it says of that one."""

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
        """What the warm-up says; more tokens than the largest shape has take several calls."""
        if key in self.warmup:
            return self.warmup[key]
        largest = max(shape for shape in self.warmup if shape[1] == key[1])
        return self.warmup[largest] + self.warmed_up((key[0] - largest[0], key[1]))

    def learn(self, key: Key, seconds: float) -> None:
        self.found.setdefault(key, StepTime(self.of(key))).learn(seconds, self.weight)

    def age(self, key: Key) -> float:
        return self.found[key].age if key in self.found else float("inf")


def computed(sizes: Sequence[int], tokens: int) -> int:
    """Tokens that a step of so many computes, in calls of shapes of these sizes: padding counts."""
    full, rest = divmod(tokens, sizes[-1])
    return full * sizes[-1] + (next(size for size in sizes if size >= rest) if rest else 0)


def distance(a: Key, b: Key) -> float:
    return max(a[0], b[0]) / min(a[0], b[0]) + abs(a[1] - b[1])


@dataclass
class Ledger:
    """What asked steps have lost against plain ones of the same tokens, in seconds; below zero what they have
    won."""

    debt: float = 0.0
    limit: float = FIRST_LOAN  # debt, in plain steps, up to which steps are asked
    left: float = FIRST_PLAIN  # plain steps to measure in any case
    asked: int = 0  # steps since a plain one
    awake: bool = True

    def learn(self, lost: float, plain: float, rows: int) -> None:
        """An asked step of so many rows: the fewer, the more what it gives varies."""
        most = CREDIT + (CREDIT_OF_ONE - CREDIT) / rows
        self.debt = max(self.debt + lost + MARGIN * plain, -most * plain)
        self.asked += 1
        if self.asked == STEPS_BETWEEN_PLAIN:
            self.left = MEASURED_PLAIN
        if self.debt > self.limit * plain:
            first = self.limit == FIRST_LOAN  # which is never paid back in full
            self.debt, self.awake = LOAN * plain if first else self.debt, False
            self.left = MEASURED_PLAIN

    def rest(self, plain: float) -> None:
        """A plain step: time in which a debt is paid off."""
        self.debt = self.debt - ASKING_SHARE * plain if self.debt > 0 else self.debt
        self.left, self.asked = max(self.left - UNMEASURED, 0.0), 0
        if self.debt <= 0 and not self.awake:
            self.awake, self.limit = True, LOAN

    def wake(self, plain: float) -> None:
        """There is reason to think that asking pays: some more may be lost to see."""
        if not self.awake and self.debt < 2 * LOAN * plain:
            self.awake, self.limit = True, self.debt / plain + LOAN / 2


class Choice(NamedTuple):
    """A kind of step, the tokens that it is expected to give, and the row of each guess."""

    key: Key
    tokens: float
    places: Sequence[int] = ()


@dataclass
class Controller:
    """Chooses the guesses of each row of a step.

    seconds: of a call by its `Key`, as the warm-up measured them; a step takes as many calls as it needs.
    unit: places that a guess takes beside the one of its row: 1, or 0 where each row is computed with all
    guesses that it may have.
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

    def asks(self, rows: int) -> bool:
        """Whether the next step of `rows` rows may verify guesses, and waits for the last tokens; otherwise
        it is plain."""
        ledger, plain = self._ledger(rows), self._plain(rows)
        if ledger.awake and not ledger.left:
            return True
        ledger.rest(plain)
        self.elapsed += plain
        return False

    def choose(self, offers: Sequence[Offer]) -> list[int]:
        """How many guesses of each row a step verifies that was asked."""
        choices = self._choices(offers)
        best = max(choices, key=self._rate)
        chosen = self._trial(choices, best)
        for time in self.asked.found.values():
            time.age += 1
        self.elapsed += self.asked.of(chosen.key)
        guesses = Counter(chosen.places)
        return [guesses[row] for row in range(len(offers))]

    def glance(self, rows: int, offers: Sequence[Offer]) -> None:
        """While steps are plain: what some of the `rows` rows would have been offered."""
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
        """The kinds of steps that hold the rows; places go to the guesses that are likeliest to be kept."""
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
        """Tokens that a step may compute which holds at least `least` and needs no more than `most`."""
        size = computed(self.sizes[k], least)
        while size < most:
            yield size
            size = computed(self.sizes[k], size + 1)
        yield size

    def _rate(self, choice: Choice) -> float:
        return choice.tokens / self.asked.of(choice.key)

    def _trial(self, choices: list[Choice], best: Choice) -> Choice:
        """Now and then another than the best, the one not seen for longest, if the time that it loses is
        within the share."""
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
        """Whether a trial that loses `lost` seconds is within the share; if so it is taken."""
        if self.spent + lost > TRIAL_SHARE * self.elapsed:
            return False
        self.spent += lost
        return True

    # ------------------------------------------------------------ what came of it

    def verified(self, guesses: Sequence[int], tokens: int, seconds: float, prompts: bool = False) -> None:
        """A step that was asked took so long, with so many guesses of each row, and gave so many tokens.

        Host work on `prompts` is in its time: it is charged, but says nothing about other steps.
        """
        rows, key = len(guesses), self._key(guesses)
        if not prompts:
            self.usual.learn(key, seconds)
            self._learn_pace(seconds / self.usual.of(key))
            self.asked.learn(key, seconds)
        plain = self._plain(rows)
        expected = self.asked.of(key)
        lost = min(seconds, MOST_TIMES_EXPECTED * expected) - tokens / rows * plain
        self._ledger(rows).learn(lost if key[1] else max(lost, LEAST_WAIT * plain), plain, rows)

    def plainly(self, rows: int, seconds: float) -> None:
        """A plain step took so long."""
        key, ledger = (self._width(rows), 0), self._ledger(rows)
        if ledger.left:  # asked steps have just told the pace
            self.plain.learn(key, seconds / self.pace)
            ledger.left = max(ledger.left - (1 - UNMEASURED), 0.0)
        else:
            self._learn_pace(seconds / self.plain.of(key))

    def _learn_pace(self, found: float) -> None:
        self.pace += PACE_WEIGHT * (min(found, MOST_TIMES_EXPECTED * self.pace) - self.pace)

    def _plain(self, rows: int) -> float:
        """Seconds of a plain step at the present pace."""
        return self.pace * self.plain.of((self._width(rows), 0))

    def judged(self, form: int, offered: int, accepted: int) -> None:
        """Of a row's guesses the first `accepted` were right."""
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
