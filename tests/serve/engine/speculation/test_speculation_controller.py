"""The controller against simulated engines: never below not guessing, and near the best fixed number of
guesses."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from suite.marks import full_if

from duetto.serve.engine.speculation.acceptance import UNKNOWN, Acceptance, Offer, classify_streak
from duetto.serve.engine.speculation.controller import (
    FIRST_MAX_DEBT,
    MAX_CREDIT,
    MAX_CREDIT_ONE_ROW,
    MAX_LOSS_SHARE,
    MAX_TRIAL_SHARE,
    Controller,
    Ledger,
    StepTimeTable,
)

K = 7
STEPS = 1500  # that a simulation would take without guesses
WIDTHS, AREAS = (8, 16, 32, 64), (8, 16, 32, 64, 128, 256)
GLANCES = 16  # plain steps between two looks at some rows' guesses
LENGTH = 96  # tokens of a request: after each a prompt takes its seat


@dataclass(frozen=True)
class Machine:
    """Step times of a device: reading the weights, or arithmetic, whichever is slower; and a fixed part.
    Seconds."""

    weights: float
    token: float  # of arithmetic
    fixed: float = 0.0
    draft: float = 0.0  # one guess of the whole batch
    host: float = 0.0  # work between two steps, which a plain step overlaps with
    found: float = 1.0  # share of the rows that have guesses
    prompt: float = 0.0  # more work between two steps on each prompt
    widest: int = AREAS[-1]  # tokens of a call; more take several

    @property
    def areas(self) -> list[int]:
        return [area for area in AREAS if area <= self.widest]

    def device(self, tokens: int, k: int) -> float:
        return self.fixed + max(self.weights, self.token * tokens) + self.draft * k

    def step(self, rows: int, guesses: list[int], waits: bool, prompts: int = 0) -> float:
        """A step whose tokens take as many calls of compiled widths as it needs."""
        full, rest = divmod(rows + sum(guesses), self.widest)
        calls = [self.widest] * full + [area for area in self.areas if area >= rest > 0][:1]
        device = sum(self.device(area, max(guesses)) for area in calls)
        host = self.host + self.prompt * prompts
        return device + host if waits else max(device, host)


MACHINES = {
    "accelerator": Machine(weights=8e-3, token=6e-5, fixed=1e-3, host=5e-4),
    "accelerator with a draft model": Machine(weights=8e-3, token=6e-5, fixed=1e-3, draft=9e-4, host=1e-3),
    "accelerator with a slow host": Machine(weights=2e-3, token=2e-5, fixed=5e-4, host=1e-3, found=0.5),
    "processor": Machine(weights=1e-3, token=2.5e-4, fixed=5e-4, host=2e-4),
    "processor with n-grams": Machine(weights=1e-3, token=2.5e-4, fixed=5e-4, host=6e-4, found=0.3),
    "processor of narrow calls": Machine(
        weights=1e-3, token=1.6e-4, fixed=3e-4, host=1e-3, found=0.8, prompt=1.5e-3, widest=16
    ),
}
Load = Callable[[float], int]  # rows after a share of all tokens
# Shares accepted of the first draft token, and of those after an accepted one.
Text = Callable[[float], tuple[float, float]]

LOADS: dict[str, Load] = {
    **{f"{rows} rows": (lambda now, rows=rows: rows) for rows in (1, 32)},
    "a ramp up and down": lambda now: 2 ** round(6 * math.sin(math.pi * now)),
    "batches that end row by row": lambda now: min(32, round(100 * (1 - 5 * now % 1)) + 1),
}
TEXTS: dict[str, Text] = {
    "easy": lambda now: (0.9, 0.9),
    "copied in runs": lambda now: (0.3, 0.9),
    "hopeless": lambda now: (0.0, 0.0),
    "changing": lambda now: ((0.85, 0.85), (0.15, 0.15))[int(2 * now) % 2],
}


class Fixed:
    """Guesses so many tokens in every step, or takes plain steps."""

    def __init__(self, k: int):
        self.k = k

    def should_speculate(self, rows: int) -> bool:
        return self.k > 0

    def choose_draft_counts(self, offers: Sequence[Offer]) -> list[int]:
        return [min(self.k, offer.num_draft_tokens) for offer in offers]

    def record_speculative(
        self, draft_counts: Sequence[int], tokens: int, seconds: float, has_prompts: bool = False
    ) -> None: ...
    def record_plain(self, rows: int, seconds: float) -> None: ...
    def record_acceptance(self, streak_class: int, offered: int, accepted: int) -> None: ...
    def learn_shadow_offers(self, rows: int, offers: Sequence[Offer]) -> None: ...


class World:
    """Rows whose guesses are right in runs: the first after a wrong one seldom, those after a right one
    often."""

    def __init__(self, machine: Machine):
        self.machine, self.rng, self.runs = machine, np.random.default_rng(0), [0] * 64

    def offers(self, rows: int) -> list[Offer]:
        found = self.rng.random(rows) < self.machine.found
        host = not self.machine.draft
        return [
            Offer(K * bool(f), classify_streak(run) if host else UNKNOWN)
            for f, run in zip(found, self.runs[:rows], strict=True)
        ]

    def right(self, shares: tuple[float, float], offers: list[Offer]) -> list[int]:
        """How many guesses of each row would be right."""
        limits = np.full((len(offers), K), shares[1])
        limits[[self.runs[row] == 0 for row in range(len(offers))], 0] = shares[0]
        first = np.cumprod(self.rng.random(limits.shape) < limits, axis=1).sum(axis=1).tolist()
        return [n if offer.num_draft_tokens else 0 for n, offer in zip(first, offers, strict=True)]


def simulate(policy: Fixed | Controller, machine: Machine, load: Load, text: Text) -> float:
    """Tokens a second of a run of so many tokens; step times vary by 5 %."""
    world, tokens, clock, step, ended, before = World(machine), 0, 0.0, 0, 0.0, 0
    length = sum(load(i / STEPS) for i in range(STEPS))
    while (now := tokens / length) < 1:
        rows, shares, step = load(now), text(now), step + 1
        waits, offers = policy.should_speculate(rows), world.offers(rows)
        guesses = policy.choose_draft_counts(offers) if waits else [0] * rows
        right = world.right(shares, offers)
        given = [1 + min(n, r) for n, r in zip(guesses, right, strict=True)]
        prompts, ended = int(ended), ended % 1 + sum(given) / LENGTH
        took = machine.step(rows, guesses, waits, prompts) * float(world.rng.lognormal(0, 0.05))
        tokens, clock = tokens + sum(given), clock + took
        if waits:
            policy.record_speculative(guesses, sum(given), took, prompts > 0)
        elif not (prompts or before):
            policy.record_plain(rows, took)
        before = prompts
        known = range(rows) if waits else [(step + i) % rows for i in range(2)] * (step % GLANCES == 0)
        for row, offer in [(row, offers[row]) for row in known if offers[row].num_draft_tokens]:
            seen = min(given[row], K) if waits and not machine.draft else guesses[row] if waits else K
            if seen and (waits or not machine.draft):
                policy.record_acceptance(offer.streak_class, seen, min(seen, right[row]))
            world.runs[row] = min(seen, right[row]) + world.runs[row] * (right[row] >= seen)
        if not waits and not machine.draft and step % GLANCES == 0:
            policy.learn_shadow_offers(rows, [offers[row] for row in known])
    return tokens / clock


def warmed_up(machine: Machine) -> Controller:
    """A controller with the table of a warm-up: every shape once, alone, on a short context, wrong by a
    fifth."""
    rng, depths = np.random.default_rng(2), (1, 3, K) if machine.draft else (K,)
    widths = [n for n in WIDTHS if n <= machine.widest]
    shapes = [*((n, 0) for n in widths), *((n, k) for n in machine.areas for k in depths)]
    return Controller({s: machine.device(*s) * float(rng.uniform(0.85, 1.1)) for s in shapes})


# Every machine meets every text, every load every machine and every text.
CASES = [
    (machine, list(LOADS)[(i + j) % len(LOADS)], text)
    for i, machine in enumerate(MACHINES)
    for j, text in enumerate(TEXTS)
]
OF_EACH_KIND = (  # machines and loads whose cases are no repetitions
    ("accelerator", "32 rows"),
    ("processor with n-grams", "1 rows"),
    ("processor of narrow calls", "1 rows"),
    ("processor of narrow calls", "batches that end row by row"),
)


@full_if(lambda case: case[:2] not in OF_EACH_KIND)
@pytest.mark.parametrize("case", CASES, ids=", ".join)
def test_throughput_is_near_the_best_fixed_draft_count(case: tuple[str, str, str]):
    machine, load, text = MACHINES[case[0]], LOADS[case[1]], TEXTS[case[2]]
    none, *fixed = (simulate(Fixed(k), machine, load, text) for k in (0, 3, K))
    found = simulate(warmed_up(machine), machine, load, text)
    assert found >= 0.99 * none and found >= 0.93 * max(fixed)


SECONDS = {(8, 0): 1.0, (8, 4): 1.0, (16, 4): 1.5, (32, 4): 4.0}


def settled(seconds: dict[tuple[int, int], float], share: float, unit: int = 1) -> Controller:
    """A controller that has seen many guesses; those of a row that was wrong are never right."""
    controller, rng = Controller(seconds, unit), np.random.default_rng(1)
    for right in rng.random((1000, 4)) < share:
        controller.record_acceptance(UNKNOWN, 4, int(np.cumprod(right).sum()))
        controller.record_acceptance(classify_streak(0), 4, 0)
    return controller


def test_padding_of_a_decode_holds_the_likeliest_drafts():
    controller = settled(SECONDS, 0.9)
    assert controller.choose_draft_counts([Offer(4), Offer(4)]) == [3, 3]
    assert controller.choose_draft_counts([Offer(4), Offer(4, classify_streak(0)), Offer(1)])[::2] == [4, 1]
    assert controller.choose_draft_counts([Offer(0)] * 3) == [0, 0, 0]


def test_more_are_computed_where_that_is_faster():
    controller = settled(SECONDS, 0.95)
    assert sum(controller.choose_draft_counts([Offer(4)] * 6)) == 16 - 6
    assert controller.choose_draft_counts([Offer(4, classify_streak(0))] * 8) == [0] * 8


def test_a_tree_is_verified_whole():
    controller = settled({(8, 0): 1.0, (4, 4): 1.1, (8, 4): 2.0}, 0.9, unit=0)
    assert controller.choose_draft_counts([Offer(4)] * 3) == [4] * 3
    assert controller.choose_draft_counts([Offer(4)] * 8) == [4] * 8


def test_lost_time_of_speculation_is_bounded_by_a_share():
    """Whatever asked steps lose, no more is lost than the share of the time, a loan and what was won."""
    ledger, asked, lost = Ledger(plain_steps_left=0), 0, 0.0
    for _ in range(100_000):
        if ledger.is_speculative:
            ledger.record_speculative(0.3, 1.0, rows=8)
            asked, lost = asked + 1, lost + 0.3
        else:
            ledger.record_plain(1.0)
    assert 0 < lost <= MAX_LOSS_SHARE * 100_000 + FIRST_MAX_DEBT + 0.6
    assert lost >= 0.8 * MAX_LOSS_SHARE * 100_000


@pytest.mark.parametrize(("rows", "credit"), [(1, MAX_CREDIT_ONE_ROW), (1000, MAX_CREDIT)])
def test_time_saved_may_be_spent_up_to_the_credit(rows: int, credit: float):
    ledger = Ledger(plain_steps_left=0)
    for _ in range(1000):
        ledger.record_speculative(-1.0, 1.0, rows)
    steps = 0
    while ledger.is_speculative:
        ledger.record_speculative(1.0, 1.0, rows)
        steps += 1
    assert credit <= steps <= credit + FIRST_MAX_DEBT + 2


def test_plain_steps_are_measured_even_if_expected_slow():
    controller = settled({(8, 0): 9.0, (8, 4): 1.0}, 0.9)
    for _ in range(2000):
        if controller.should_speculate(1):
            guesses = controller.choose_draft_counts([Offer(4)])
            controller.record_speculative(guesses, 2, 1.0)
        else:
            controller.record_plain(1, 0.4)
    assert controller.plain_times.seconds_for((8, 0)) < 0.5 and not controller.should_speculate(1)


def test_plain_steps_are_expected_as_slow_as_verified_ones():
    """Long contexts and short ones come in turn, and asking always pays."""
    controller, asked = Controller({(8, 0): 1.0, (8, 4): 1.1}), 0
    for step in range(4000):
        slow = (1.0, 1.6)[step // 40 % 2]
        if controller.should_speculate(1):
            guesses = controller.choose_draft_counts([Offer(4)])
            controller.record_acceptance(UNKNOWN, 4, step % 2)
            controller.record_speculative(guesses, 1 + (step % 2 if any(guesses) else 0), 1.2 * slow)
            asked += 1
        else:
            controller.record_plain(1, slow)
    assert asked > 0.94 * 4000


def test_trials_cost_no_more_than_their_share():
    controller = settled({(8, 0): 1.0, (8, 4): 3.0, (16, 4): 5.0}, 0.0)
    chosen = [sum(controller.choose_draft_counts([Offer(4)])) for _ in range(20_000)]
    assert 0 < sum(n > 0 for n in chosen) < 0.005 * len(chosen)
    assert controller.trial_seconds <= MAX_TRIAL_SHARE * controller.elapsed_seconds


def test_steps_beyond_the_largest_shape_have_their_own_time():
    """32 rows take two calls of 16, and a plain step of 16 rows half of their time."""
    controller = Controller({(8, 0): 1.0, (16, 0): 2.0, (8, 4): 1.0, (16, 4): 2.0})
    assert (
        controller.plain_times.seconds_for((32, 0)) == 4.0
        and controller.plain_times.seconds_for((24, 0)) == 3.0
    )
    for rows in [32] * 100 + [16] * 100:
        if not controller.should_speculate(rows):
            controller.record_plain(rows, rows / 8)
    assert controller.plain_times.seconds_for((32, 0)) == pytest.approx(4.0)
    assert controller.plain_times.seconds_for((16, 0)) == pytest.approx(2.0)


def test_host_work_on_prompts_is_charged_to_verified_steps():
    """Guesses bring what they cost, but for prompts, whose work on the host a plain step would hide."""
    asked = {}
    for prompt in (0.0, 1.0):
        controller, asked[prompt] = settled({(8, 0): 1.0, (8, 4): 1.0}, 0.9), 0
        for step in range(2000):
            prompts = step % 2 == 0
            if controller.should_speculate(1):
                guesses = controller.choose_draft_counts([Offer(4)])
                controller.record_speculative(guesses, 1 + step // 2 % 2, 1.2 + prompt * prompts, prompts)
                asked[prompt] += 1
            elif not prompts:
                controller.record_plain(1, 1.0)
    assert asked[1.0] < 100 and asked[0.0] > 1500


def test_unmeasured_steps_are_scaled_like_measured_ones():
    times = StepTimeTable({(8, 0): 1.0, (8, 4): 1.2, (16, 4): 2.0})
    assert times.seconds_for((16, 4)) == 2.0
    for _ in range(200):
        times.learn((8, 4), 1.5)
    assert times.seconds_for((8, 4)) == pytest.approx(1.5) and times.seconds_for((16, 4)) == pytest.approx(
        2.3
    )
    times.learn((8, 4), 100.0)
    assert times.seconds_for((8, 4)) < 1.6, "one slow step is not believed"


def test_the_same_measurements_give_the_same_choices():
    def choices() -> list[list[int]]:
        controller, found = Controller(SECONDS), []
        for step in range(500):
            rows = 1 + step // 100
            guesses = (
                controller.choose_draft_counts([Offer(4)] * rows)
                if controller.should_speculate(rows)
                else [0] * rows
            )
            controller.record_speculative(guesses, rows + sum(guesses) // 2, 1 + step % 7 / 10)
            controller.record_acceptance(UNKNOWN, 4, step % 3)
            found.append(guesses)
        return found

    assert choices() == choices()


def test_draft_tokens_after_a_rejected_one_are_not_counted():
    acceptance = Acceptance.make_empty(3)
    acceptance.learn(UNKNOWN, offered=3, accepted=1)
    assert acceptance.judged[UNKNOWN] == [1, 1, 0] and acceptance.right[UNKNOWN] == [1, 0, 0]
    acceptance.learn(UNKNOWN, offered=1, accepted=1)
    assert acceptance.judged[UNKNOWN][1:] == [1, 0]


def test_acceptance_is_learned_for_each_streak_class():
    acceptance = Acceptance.make_empty(2)
    for _ in range(100):
        acceptance.learn(classify_streak(5), 2, 2)
        acceptance.learn(classify_streak(0), 2, 0)
    good, bad = (acceptance.expected_gains()[classify_streak(run)] for run in (5, 0))
    assert sum(good) > 1.8 and sum(bad) < 0.1 and good[0] >= good[1]


def test_steps_that_a_coarse_clock_measures_as_zero_are_steps():
    controller = settled({(8, 0): 1.0, (8, 4): 1.1}, 0.9)
    for _ in range(2000):
        if controller.should_speculate(1):
            controller.record_speculative(controller.choose_draft_counts([Offer(4)]), 2, 0.0)
        else:
            controller.record_plain(1, 0.0)
    assert controller.pace > 0
