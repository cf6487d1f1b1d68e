"""The controller against simulated engines: never much below the better of always guessing and never
guessing."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from duetto.serve.speculation.controller import SWITCH_MARGIN, TRIAL_SHARE, Acceptance, Controller

KS = (0, 2, 4)
STEPS = 3000  # of one row without guesses, in the time that a simulation lasts


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

    def seconds(self, rows: int, k: int, waits: bool) -> float:
        device = self.fixed + max(self.weights, self.token * rows * (k + 1)) + self.draft * k
        return device + self.host if waits else max(device, self.host)


MACHINES = {
    "accelerator": Machine(weights=8e-3, token=6e-5, fixed=1e-3, host=5e-4),
    "accelerator with a draft model": Machine(weights=8e-3, token=6e-5, fixed=1e-3, draft=9e-4, host=1e-3),
    "accelerator with a slow host": Machine(weights=2e-3, token=2e-5, fixed=5e-4, host=2e-3),
    "accelerator with n-grams": Machine(weights=8e-3, token=6e-5, fixed=1e-3, host=2e-3, found=0.2),
    "processor": Machine(weights=1e-3, token=2.5e-4, fixed=5e-4, host=2e-4),
    "processor with n-grams": Machine(weights=1e-3, token=2.5e-4, fixed=5e-4, host=6e-4, found=0.3),
}
Load = Callable[[float], int]  # rows at a time; a simulation lasts from 0 to 1
Text = Callable[[float], tuple[float, ...]]  # acceptance of each place at a time

LOADS: dict[str, Load] = {
    **{f"{rows} rows": (lambda now, rows=rows: rows) for rows in (1, 8, 64)},
    "a ramp up and down": lambda now: 2 ** round(8 * math.sin(math.pi * now)),
    "busy now and then": lambda now: 256 if int(20 * now) % 4 == 3 else 2,
}
TEXTS: dict[str, Text] = {
    "easy": lambda now: (0.9,) * 4,
    "fading": lambda now: (0.8, 0.6, 0.4, 0.2),
    "hard": lambda now: (0.25,) * 4,
    "hopeless": lambda now: (0.0,) * 4,
    "changing": lambda now: ((0.85,) * 4, (0.15,) * 4)[int(4 * now) % 2],
}


@dataclass(frozen=True)
class Fixed:
    """A policy that never changes."""

    k: int

    def asks(self, rows: int) -> bool:
        return self.k > 0

    def choose(self, rows: int, offered: Sequence[int]) -> int:
        return self.k

    def timed(self, rows: int, k: int | None, seconds: float) -> None: ...

    def judged(self, offered: int, accepted: int) -> None: ...


def simulate(policy: Fixed | Controller, machine: Machine, load: Load, text: Text) -> float:
    """Tokens of a run of fixed length. Every policy meets the same load at the same time; step times vary by
    5 %."""
    rng, tokens, clock, length = np.random.default_rng(0), 0, 0.0, STEPS * machine.seconds(1, 0, False)
    while clock < length:
        rows, shares = load(clock / length), text(clock / length)
        waits = policy.asks(rows)
        offered = np.where(rng.random(rows) < machine.found, KS[-1], 0)
        k = policy.choose(rows, offered.tolist()) if waits else 0
        k = min(k, int(offered.max()))
        right = rng.random((rows, len(shares))) < shares
        accepted = np.cumprod(right[:, :k], axis=1).sum(1).astype(int) * (offered > 0)
        took = machine.seconds(rows, k, waits) * float(rng.lognormal(0, 0.05))
        tokens, clock = tokens + rows + int(accepted.sum()), clock + took
        policy.timed(rows, k if waits else None, took)
        for n in accepted[offered > 0][:32].tolist() if k else ():
            policy.judged(k, n)
    return tokens


def warmed_up(machine: Machine) -> Controller:
    """A controller with the table of a warm-up: every shape once, alone, on a short context, wrong by a
    fifth."""
    rng, shapes = np.random.default_rng(2), [(2**i, k) for i in range(9) for k in KS]
    device = replace(machine, host=0.0)
    times = {s: device.seconds(*s, True) * float(rng.uniform(0.75, 1.15)) for s in shapes}
    return Controller.of_times(KS, times)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_never_much_below_the_better_of_always_and_never(machine: Machine, load: Load, text: Text):
    always, never = (simulate(Fixed(k), machine, load, text) for k in (KS[-1], 0))
    assert simulate(warmed_up(machine), machine, load, text) >= 0.97 * max(always, never)


def test_it_beats_both_where_the_load_changes():
    machine, load, text = MACHINES["accelerator"], LOADS["busy now and then"], TEXTS["easy"]
    always, never = (simulate(Fixed(k), machine, load, text) for k in (KS[-1], 0))
    assert simulate(warmed_up(machine), machine, load, text) > 1.05 * max(always, never)


def test_without_a_table_every_shape_is_tried_once():
    controller, machine = Controller(KS), MACHINES["processor"]
    tried = []
    for _ in KS:
        tried.append(controller.choose(64, [4] * 64))
        controller.timed(64, tried[-1], machine.seconds(64, tried[-1], True))
    assert sorted(tried) == list(KS)
    assert [controller.choose(64, [4] * 64) for _ in range(10)] == [0] * 10


def settled(times: dict[tuple[int, int], float], acceptance: float) -> Controller:
    """A controller that knows its step times and has seen many guesses."""
    controller, rng = Controller.of_times(KS, times), np.random.default_rng(1)
    for right in rng.random((2000, KS[-1])) < acceptance:
        controller.judged(KS[-1], int(np.cumprod(right).sum()))
    return controller


def test_the_batch_decides():
    times = {(1, 0): 1.0, (1, 2): 1.0, (1, 4): 1.05, (64, 0): 1.0, (64, 2): 3.0, (64, 4): 5.0}
    controller = settled(times, 0.8)
    assert controller.choose(1, [4]) == 4 and controller.choose(64, [4] * 64) == 0


def test_guesses_at_hand_decide():
    """With guesses for one row of eight the gain is small; without any there is nothing to verify."""
    controller = settled({(8, 0): 1.0, (8, 2): 1.4, (8, 4): 1.8}, 0.9)
    assert controller.choose(8, [4] * 8) == 4
    assert controller.choose(8, [4] + [0] * 7) == 0
    assert controller.choose(8, [0] * 8) == 0
    assert controller.choose(8, [1] * 8) <= 2


def test_about_as_fast_is_no_reason_to_change():
    controller = settled({(1, 0): 1.0, (1, 2): 1.0, (1, 4): 1.0}, 0.5)
    first = controller.choose(1, [4])
    gain = controller.acceptance.expected()
    even = gain[first] / controller.times[1, first].seconds
    for k in KS:
        if k != first:
            controller.times[1, k].seconds = gain[k] / (even * (1 + SWITCH_MARGIN / 2))
    assert controller.choose(1, [4]) == first


def test_trials_cost_no_more_than_their_share():
    controller = settled({(1, 0): 1.0, (1, 2): 3.0, (1, 4): 5.0}, 0.0)
    chosen = [controller.choose(1, [4]) for _ in range(20_000)]
    assert 0 < sum(k > 0 for k in chosen) < 0.005 * len(chosen)
    assert controller.spent <= TRIAL_SHARE * controller.elapsed


def test_the_same_story_gives_the_same_choices():
    def choices() -> list[int | None]:
        controller, found = Controller(KS), []
        for step in range(500):
            rows = 1 + step // 100
            k = controller.choose(rows, [4] * rows) if controller.asks(rows) else None
            controller.timed(rows, k, 1e-3 * (1 + (k or 0) * (step % 7) / 10))
            controller.judged(k or 0, min(k or 0, step % 3))
            found.append(k)
        return found

    assert choices() == choices()


def test_one_slow_step_is_not_believed():
    controller = Controller.of_times(KS, {(1, 0): 1e-3, (1, 2): 1e-3, (1, 4): 1e-3})
    for _ in range(20):
        controller.timed(1, 4, 1e-3)
    controller.timed(1, 4, 10.0)
    assert controller.times[1, 4].seconds < 1.2e-3


def test_expected_tokens_of_a_pass():
    acceptance = Acceptance([1.0, 1.0, 1.0], [0.5, 0.5, 0.2])
    assert acceptance.expected() == pytest.approx([1.0, 1.5, 1.75, 1.8])


def test_a_guess_after_a_wrong_one_is_not_judged():
    acceptance = Acceptance.of_places(3)
    before = acceptance.judged[2]
    acceptance.learn(offered=3, accepted=1)
    assert acceptance.judged[1] > before and acceptance.judged[2] == before
    acceptance.learn(offered=1, accepted=1)
    assert acceptance.judged[2] == before
