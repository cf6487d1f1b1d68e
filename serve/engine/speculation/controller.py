"""Number of draft tokens that a step verifies for each row: the fastest choice by the times of recent steps.

A pass over k draft tokens gives 1 + a1 + a1 a2 + ... tokens a row (Leviathan et al., arXiv 2211.17192). Each
acceptance a depends on the position in the draft and on the row's last results. A compiled verification
computes a fixed number of tokens. They go to the draft tokens of any row that are likeliest to be accepted.

A speculative step waits for the last step's tokens, so its time contains the host's work on them. A plain
step overlaps with that work: to verify nothing, it is cheaper. The time of a plain step is stored in units of
the pace of speculative steps, since contexts and other load slow both alike. The ledger records the time that
speculative steps lost against plain ones. It bounds how often they are tried while they do not pay. Choices
depend only on the calls of this class and their order.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from .acceptance import Acceptance, Offer

TIME_WEIGHT = 0.02  # weight of the newest time of a shape
PLAIN_WEIGHT = 0.1  # weight of the newest time of plain steps, which are measured seldom
PACE_WEIGHT = 0.3  # weight of the newest pace
MAX_TIMES_EXPECTED = 2.0  # a time counts as at most this multiple of the expected time
MAX_LOSS_SHARE = 0.003  # share of the time that speculative steps may lose while they do not pay
MAX_DEBT = 0.5  # debt, in times of a plain step, at which steps become plain
MIN_WAIT_LOSS = 0.1  # minimum loss of a speculative step without draft tokens, in times of a plain step
FIRST_MAX_DEBT = 4.0  # debt at which steps become plain for the first time
MAX_CREDIT = 4.0  # time won that may be lost again, in times of a plain step
MAX_CREDIT_ONE_ROW = 60.0  # MAX_CREDIT for one row, whose gain varies most
MAX_TRIAL_SHARE = 0.002  # share of all time that trials of other choices may lose
STEPS_BETWEEN_TRIALS = 20  # steps between two trials
MIN_GAIN = 0.06  # minimum gain of a speculative step, in times of a plain step: times are not exact
STEPS_BETWEEN_PLAIN = 100  # speculative steps after which plain steps are measured again
FIRST_PLAIN_STEPS = 16.0  # plain steps to measure at the start
MEASURED_PLAIN_STEPS = 4.0  # plain steps to measure each time after
MIN_SECONDS = 1e-6  # minimum seconds of a step: a coarse clock measures 0
UNMEASURED_WEIGHT = 0.25  # part of a measured plain step that a plain step without a measurement counts

StepKey = tuple[int, int]  # tokens of a step or call, and maximum draft tokens of a row (0: decode)


@dataclass
class StepTime:
    """Running average of the time of one kind of step.

    seconds: the average.
    measured: number of measurements.
    age: speculative steps since the last one.
    """

    seconds: float
    measured: int = 0
    age: int = 0

    def learn(self, seconds: float, min_weight: float) -> None:
        self.measured, self.age = self.measured + 1, 0
        weight = max(min_weight, 1 / self.measured)
        self.seconds += weight * (min(seconds, MAX_TIMES_EXPECTED * self.seconds) - self.seconds)


@dataclass
class StepTimeTable:
    """Seconds of steps by key, from the warm-up and from measurements.

    A key without a measurement has the warm-up's time. If its nearest measured key has become slower since
    the warm-up, the difference is added.

    warmup_seconds: seconds by key, measured at the warm-up.
    weight: weight of the newest measurement.
    measured: measured times by key.
    """

    warmup_seconds: Mapping[StepKey, float]
    weight: float = TIME_WEIGHT
    measured: dict[StepKey, StepTime] = field(default_factory=dict)

    def seconds_for(self, key: StepKey) -> float:
        """Return the seconds of a step with this key, measured or estimated."""
        if key in self.measured:
            return self.measured[key].seconds
        nearest = min(self.measured, key=lambda measured_key: key_distance(key, measured_key), default=None)
        excess = 0.0 if nearest is None else self.measured[nearest].seconds - self.seconds_in_warmup(nearest)
        return self.seconds_in_warmup(key) + max(excess, 0.0)

    def seconds_in_warmup(self, key: StepKey) -> float:
        """Return the warm-up's seconds for a key. More tokens than the largest shape holds take several
        calls."""
        if key in self.warmup_seconds:
            return self.warmup_seconds[key]
        largest = max(shape for shape in self.warmup_seconds if shape[1] == key[1])
        return self.warmup_seconds[largest] + self.seconds_in_warmup((key[0] - largest[0], key[1]))

    def learn(self, key: StepKey, seconds: float) -> None:
        self.measured.setdefault(key, StepTime(self.seconds_for(key))).learn(seconds, self.weight)

    def measurement_age(self, key: StepKey) -> float:
        return self.measured[key].age if key in self.measured else float("inf")


def count_padded_tokens(sizes: Sequence[int], tokens: int) -> int:
    """Return the tokens that a step of `tokens` computes in calls of these sizes, padding included."""
    full, rest = divmod(tokens, sizes[-1])
    return full * sizes[-1] + (next(size for size in sizes if size >= rest) if rest else 0)


def key_distance(a: StepKey, b: StepKey) -> float:
    return max(a[0], b[0]) / min(a[0], b[0]) + abs(a[1] - b[1])


@dataclass
class Ledger:
    """Account of the time that speculative steps lose against plain ones of the same tokens.

    debt: seconds lost; negative if they won.
    limit: debt at which steps become plain, in times of a plain step.
    plain_steps_left: plain steps to measure in any case.
    speculative_steps: speculative steps since a plain one.
    is_speculative: True while steps may be speculative.
    """

    debt: float = 0.0
    limit: float = FIRST_MAX_DEBT
    plain_steps_left: float = FIRST_PLAIN_STEPS
    speculative_steps: int = 0
    is_speculative: bool = True

    def record_speculative(self, lost_seconds: float, plain_seconds: float, rows: int) -> None:
        """Record a speculative step that lost `lost_seconds` seconds; a plain one takes `plain_seconds`
        seconds.

        With few rows the gain varies more, so they may have more credit.
        """
        max_credit = MAX_CREDIT + (MAX_CREDIT_ONE_ROW - MAX_CREDIT) / rows
        self.debt = max(self.debt + lost_seconds + MIN_GAIN * plain_seconds, -max_credit * plain_seconds)
        self.speculative_steps += 1
        if self.speculative_steps == STEPS_BETWEEN_PLAIN:
            self.plain_steps_left = MEASURED_PLAIN_STEPS
        if self.debt > self.limit * plain_seconds:
            is_first = self.limit == FIRST_MAX_DEBT  # the first debt is never paid back in full
            self.debt, self.is_speculative = MAX_DEBT * plain_seconds if is_first else self.debt, False
            self.plain_steps_left = MEASURED_PLAIN_STEPS

    def record_plain(self, plain_seconds: float) -> None:
        """Record a plain step of `plain_seconds` seconds, which pays off a part of the debt."""
        if self.debt > 0:
            self.debt -= MAX_LOSS_SHARE * plain_seconds
        self.plain_steps_left, self.speculative_steps = max(self.plain_steps_left - UNMEASURED_WEIGHT, 0.0), 0
        if self.debt <= 0 and not self.is_speculative:
            self.is_speculative, self.limit = True, MAX_DEBT

    def allow_loss(self, plain_seconds: float) -> None:
        """Allow speculative steps a small loss again, because draft tokens look likely to pay."""
        if not self.is_speculative and self.debt < 2 * MAX_DEBT * plain_seconds:
            self.is_speculative, self.limit = True, self.debt / plain_seconds + MAX_DEBT / 2


class StepChoice(NamedTuple):
    """A kind of step.

    key: tokens of the step, and maximum draft tokens of a row.
    tokens: expected tokens that it gives.
    rows: row of each draft token.
    """

    key: StepKey
    tokens: float
    rows: Sequence[int] = ()


@dataclass
class Controller:
    """Chooses the number of draft tokens of each row.

    call_seconds: seconds of a call by its `StepKey`, measured at the warm-up. A step takes the calls that it
        needs.
    unit: tokens that a draft token adds to a step: 1, or 0 if every row has all draft tokens that it may
        have.
    ledgers: accounts of lost time, by tokens of a decode.
    trial_seconds: seconds lost by trials.
    elapsed_seconds: seconds of all steps.
    steps_since_trial: steps since the last trial.
    """

    call_seconds: Mapping[StepKey, float]
    unit: int = 1
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    trial_seconds: float = 0.0
    elapsed_seconds: float = 0.0
    steps_since_trial: int = 0

    def __post_init__(self):
        self.depths = sorted({k for _, k in self.call_seconds if k})
        self.sizes = {k: sorted(n for n, depth in self.call_seconds if depth == k) for k in (0, *self.depths)}
        self.acceptance = Acceptance.make_empty(self.depths[-1])
        self.speculative_times = StepTimeTable(self.call_seconds)
        self.plain_times = StepTimeTable(self.call_seconds, PLAIN_WEIGHT)
        self.pace = 1.0

    # ------------------------------------------------------------ choice of the next step

    def should_speculate(self, rows: int) -> bool:
        """Return True if the next step of `rows` rows is speculative, and waits for the last tokens.

        A plain step is recorded in the ledger.
        """
        ledger, plain_seconds = self._ledger(rows), self._plain_seconds(rows)
        if ledger.is_speculative and not ledger.plain_steps_left:
            return True
        ledger.record_plain(plain_seconds)
        self.elapsed_seconds += plain_seconds
        return False

    def choose_draft_counts(self, offers: Sequence[Offer]) -> list[int]:
        """Return the number of draft tokens of each row of a speculative step."""
        choices = self._list_choices(offers)
        best_choice = max(choices, key=self._tokens_per_second)
        choice = self._choose_best_or_trial(choices, best_choice)
        for time in self.speculative_times.measured.values():
            time.age += 1
        self.elapsed_seconds += self.speculative_times.seconds_for(choice.key)
        counts = Counter(choice.rows)
        return [counts[row] for row in range(len(offers))]

    def learn_shadow_offers(self, rows: int, offers: Sequence[Offer]) -> None:
        """Learn from draft tokens that plain steps of `rows` rows could have verified; they may allow
        speculation again."""
        if self._ledger(rows).is_speculative or not offers:
            return
        steps = [
            [offers[(first + i) % len(offers)] for i in range(rows)] for first in range(0, len(offers), rows)
        ]
        best_choices = [max(self._list_choices(step), key=self._tokens_per_second) for step in steps]
        plain_seconds = self.plain_times.seconds_for((self._padded_decode_tokens(rows), 0))
        seconds = sum(self.speculative_times.seconds_for(choice.key) for choice in best_choices)
        if (
            any(choice.rows for choice in best_choices)
            and seconds / plain_seconds < sum(c.tokens for c in best_choices) / rows
        ):
            self._ledger(rows).allow_loss(self._plain_seconds(rows))

    def _list_choices(self, offers: Sequence[Offer]) -> list[StepChoice]:
        """Return the kinds of steps that hold the rows. Each verifies the draft tokens that are likeliest
        to be accepted."""
        rows, gains = len(offers), self.acceptance.expected_gains()
        choices = [StepChoice((self._padded_decode_tokens(rows), 0), float(rows))]
        for k in self.depths:
            ranked = sorted(
                (
                    (gain, row)
                    for row, o in enumerate(offers)
                    for gain in gains[o.streak_class][: min(k, o.num_draft_tokens)]
                ),
                reverse=True,
            )
            tokens = list(accumulate((gain for gain, _ in ranked), initial=float(rows)))
            draft_rows = [row for _, row in ranked]
            for size in self._step_sizes(k, rows, rows + self.unit * len(draft_rows)):
                count = min(size - rows, len(draft_rows)) if self.unit else len(draft_rows)
                if count:
                    choices.append(StepChoice((size, k), tokens[count], draft_rows[:count]))
        return choices

    def _step_sizes(self, k: int, min_tokens: int, max_tokens: int) -> Iterator[int]:
        """Yield the token counts of steps that hold at least `min_tokens` and need no more than
        `max_tokens`."""
        size = count_padded_tokens(self.sizes[k], min_tokens)
        while size < max_tokens:
            yield size
            size = count_padded_tokens(self.sizes[k], size + 1)
        yield size

    def _tokens_per_second(self, choice: StepChoice) -> float:
        return choice.tokens / self.speculative_times.seconds_for(choice.key)

    def _choose_best_or_trial(self, choices: list[StepChoice], best_choice: StepChoice) -> StepChoice:
        """Return the best choice, or once in STEPS_BETWEEN_TRIALS another one, measured longest ago.

        The trial is charged, and happens only if its loss is within the share.
        """
        self.steps_since_trial += 1
        others = [choice for choice in choices if choice is not best_choice]
        if self.steps_since_trial <= STEPS_BETWEEN_TRIALS or not others:
            return best_choice
        other = max(others, key=lambda choice: self.speculative_times.measurement_age(choice.key))
        lost_seconds = self.speculative_times.seconds_for(other.key) - other.tokens / self._tokens_per_second(
            best_choice
        )
        if not self._charge_trial(lost_seconds):
            return best_choice
        self.steps_since_trial = 0
        return other

    def _charge_trial(self, lost_seconds: float) -> bool:
        """Charge a trial that loses `lost_seconds` seconds; returns False, and charges nothing, if that
        exceeds MAX_TRIAL_SHARE."""
        if self.trial_seconds + lost_seconds > MAX_TRIAL_SHARE * self.elapsed_seconds:
            return False
        self.trial_seconds += lost_seconds
        return True

    # ------------------------------------------------------------ results of a step

    def record_speculative(
        self, draft_counts: Sequence[int], tokens: int, seconds: float, has_prompts: bool = False
    ) -> None:
        """Record a speculative step: the draft tokens of each row, the tokens that it gave and its seconds.

        Host work on `has_prompts` is in its time: it is charged, but not used to predict other steps.
        """
        rows, key, seconds = len(draft_counts), self._step_key(draft_counts), max(seconds, MIN_SECONDS)
        if not has_prompts:
            self.speculative_times.learn(key, seconds)
            self._learn_pace(seconds / self.speculative_times.seconds_for(key))
        plain_seconds = self._plain_seconds(rows)
        expected = self.speculative_times.seconds_for(key)
        lost_seconds = min(seconds, MAX_TIMES_EXPECTED * expected) - tokens / rows * plain_seconds
        self._ledger(rows).record_speculative(
            lost_seconds if key[1] else max(lost_seconds, MIN_WAIT_LOSS * plain_seconds), plain_seconds, rows
        )

    def record_plain(self, rows: int, seconds: float) -> None:
        """Record the seconds of a plain step."""
        key, ledger, seconds = (
            (self._padded_decode_tokens(rows), 0),
            self._ledger(rows),
            max(seconds, MIN_SECONDS),
        )
        if ledger.plain_steps_left:  # the pace is fresh from speculative steps
            self.plain_times.learn(key, seconds / self.pace)
            ledger.plain_steps_left = max(ledger.plain_steps_left - (1 - UNMEASURED_WEIGHT), 0.0)
        else:
            self._learn_pace(seconds / self.plain_times.seconds_for(key))

    def _learn_pace(self, pace: float) -> None:
        self.pace += PACE_WEIGHT * (min(pace, MAX_TIMES_EXPECTED * self.pace) - self.pace)

    def _plain_seconds(self, rows: int) -> float:
        """Return the seconds of a plain step at the present pace."""
        return self.pace * self.plain_times.seconds_for((self._padded_decode_tokens(rows), 0))

    def record_acceptance(self, streak_class: int, offered: int, accepted: int) -> None:
        """Record that the first `accepted` of a row's draft tokens were right."""
        self.acceptance.learn(streak_class, offered, accepted)

    def _step_key(self, draft_counts: Sequence[int]) -> StepKey:
        if not any(draft_counts):
            return self._padded_decode_tokens(len(draft_counts)), 0
        k = next((depth for depth in self.depths if depth >= max(draft_counts)), self.depths[-1])
        return count_padded_tokens(self.sizes[k], len(draft_counts) + self.unit * sum(draft_counts)), k

    def _padded_decode_tokens(self, rows: int) -> int:
        return count_padded_tokens(self.sizes[0], rows)

    def _ledger(self, rows: int) -> Ledger:
        first = FIRST_MAX_DEBT if not self.ledgers else MAX_DEBT
        return self.ledgers.setdefault(self._padded_decode_tokens(rows), Ledger(limit=first))
