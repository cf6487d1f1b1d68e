"""The controller against simulated engines: never much below the better of always guessing and never guessing."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from duetto.serve.controller import MARGIN, SHARE, Acceptance, Controller

KS = (0, 2, 4)
STEPS = 3000  # of one row without guesses, in the time that a simulation lasts


@dataclass(frozen=True)
class Machine:
    """Step times of a device: reading the weights, or arithmetic, whichever is slower; and a fixed part. Seconds."""

    weights: float
    token: float  # of arithmetic
    fixed: float = 0.0
    draft: float = 0.0  # one guess of the whole batch

    def seconds(self, rows: int, k: int) -> float:
        return self.fixed + max(self.weights, self.token * rows * (k + 1)) + self.draft * k


MACHINES = {
    "accelerator": Machine(weights=8e-3, token=6e-5, fixed=1e-3),
    "accelerator with a draft model": Machine(weights=8e-3, token=6e-5, fixed=1e-3, draft=9e-4),
    "processor": Machine(weights=1e-3, token=2.5e-4, fixed=5e-4),
}
Load = Callable[[float], int]  # rows at a time; a simulation lasts from 0 to 1
Text = Callable[[float], tuple[float, ...]]  # acceptance of each place at a time

LOADS: dict[str, Load] = {
    **{f"{rows} rows": (lambda now, rows=rows: rows) for rows in (1, 4, 16, 64, 256)},
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


def simulate(
    choose: Callable[[int], int], machine: Machine, load: Load, text: Text, learn: Controller | None
) -> float:
    """Tokens of a run of fixed length. Every policy meets the same load at the same time; step times vary by 5 %."""
    rng, tokens, clock, length = np.random.default_rng(0), 0, 0.0, STEPS * machine.seconds(1, 0)
    while clock < length:
        rows, shares = load(clock / length), text(clock / length)
        k = choose(rows)
        right = rng.random((rows, len(shares))) < shares
        accepted = np.cumprod(right[:, :k], axis=1).sum(1).astype(int)
        took = machine.seconds(rows, k) * float(rng.lognormal(0, 0.05))
        tokens, clock = tokens + rows + int(accepted.sum()), clock + took
        if learn is not None:
            learn.timed(rows, k, took)
            for n in accepted[:32].tolist() if k else ():
                learn.judged(k, n)
    return tokens


def warmed_up(machine: Machine) -> Controller:
    """A controller with the table of a warm-up: every shape once, on a short context, wrong by a fifth."""
    rng, shapes = np.random.default_rng(2), [(2**i, k) for i in range(9) for k in KS]
    return Controller.of_times(KS, {s: machine.seconds(*s) * float(rng.uniform(0.75, 1.15)) for s in shapes})


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_never_much_below_the_better_of_always_and_never(machine: Machine, load: Load, text: Text):
    always, never = (simulate(lambda rows, k=k: k, machine, load, text, None) for k in (KS[-1], 0))
    controller = warmed_up(machine)
    found = simulate(controller.choose, machine, load, text, controller)
    assert found >= 0.97 * max(always, never)


def test_it_beats_both_where_the_load_changes():
    machine, load, text = MACHINES["accelerator"], LOADS["busy now and then"], TEXTS["easy"]
    always, never = (simulate(lambda rows, k=k: k, machine, load, text, None) for k in (KS[-1], 0))
    controller = warmed_up(machine)
    assert simulate(controller.choose, machine, load, text, controller) > 1.05 * max(always, never)


def test_without_a_table_every_shape_is_tried_once():
    controller, machine = Controller(KS), MACHINES["processor"]
    tried = []
    for _ in KS:
        tried.append(controller.choose(64))
        controller.timed(64, tried[-1], machine.seconds(64, tried[-1]))
    assert sorted(tried) == list(KS)
    assert [controller.choose(64) for _ in range(10)] == [0] * 10


def settled(times: dict[tuple[int, int], float], acceptance: float) -> Controller:
    """A controller that knows its step times and has seen many guesses."""
    controller, rng = Controller.of_times(KS, times), np.random.default_rng(1)
    for right in rng.random((2000, KS[-1])) < acceptance:
        controller.judged(KS[-1], int(np.cumprod(right).sum()))
    return controller


def test_the_batch_decides():
    times = {(1, 0): 1.0, (1, 2): 1.0, (1, 4): 1.05, (64, 0): 1.0, (64, 2): 3.0, (64, 4): 5.0}
    controller = settled(times, 0.8)
    assert controller.choose(1) == 4 and controller.choose(64) == 0


def test_guesses_at_hand_decide():
    """With guesses for one row of eight the gain is small; without any there is nothing to verify."""
    controller = settled({(8, 0): 1.0, (8, 2): 1.4, (8, 4): 1.8}, 0.9)
    assert controller.choose(8, [4] * 8) == 4
    assert controller.choose(8, [4] + [0] * 7) == 0
    assert controller.choose(8, [0] * 8) == 0
    assert controller.choose(8, [1] * 8) <= 2


def test_about_as_fast_is_no_reason_to_change():
    controller = settled({(1, 0): 1.0, (1, 2): 1.0, (1, 4): 1.0}, 0.5)
    first = controller.choose(1)
    gain = controller.acceptance.expected()
    even = gain[first] / controller.times[1, first].seconds
    for k in KS:
        if k != first:
            controller.times[1, k].seconds = gain[k] / (even * (1 + MARGIN / 2))
    assert controller.choose(1) == first


def test_trials_cost_no_more_than_their_share():
    controller = settled({(1, 0): 1.0, (1, 2): 3.0, (1, 4): 5.0}, 0.0)
    chosen = [controller.choose(1) for _ in range(20_000)]
    assert 0 < sum(k > 0 for k in chosen) < 0.005 * len(chosen)
    assert controller.spent <= SHARE * controller.elapsed


def test_the_same_story_gives_the_same_choices():
    def choices() -> list[int]:
        controller, found = Controller(KS), []
        for step in range(500):
            k = controller.choose(1 + step // 100)
            controller.timed(1 + step // 100, k, 1e-3 * (1 + k * (step % 7) / 10))
            controller.judged(k, min(k, step % 3))
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
