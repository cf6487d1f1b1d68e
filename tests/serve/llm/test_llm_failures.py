"""Failed steps and interrupts: the tokens stay the same, and the engine stays usable."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import jax
import pytest
from cases.requests import GREEDY, IDS, PARAMS, PROMPTS, exact

from duetto import LLM

pytestmark = pytest.mark.usefixtures("nothing_is_left")


@contextmanager
def disturbed(llm: LLM, monkeypatch: pytest.MonkeyPatch, after: Callable[[int], None]) -> Iterator[list[int]]:
    """Calls `after` with the number of each step once the device has consumed the step's arguments."""
    calls: list[int] = []
    run = llm.engine.executor.run

    def disturb(*arguments):
        result = run(*arguments)
        calls.append(len(calls))
        after(calls[-1])
        return result

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.executor, "run", disturb)
        yield calls


def fail(steps: set[int]) -> Callable[[int], None]:
    def after(step: int) -> None:
        if step in steps:
            raise jax.errors.JaxRuntimeError(f"INTERNAL: step {step} failed")

    return after


@pytest.mark.parametrize("steps", [{0}, {3}, {6}, {2, 3}, {1, 8}], ids=str)
def test_a_failed_step_does_not_change_the_tokens(llm, monkeypatch, expected, steps):
    with disturbed(llm, monkeypatch, fail(steps)) as calls:
        found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert exact(found) == expected
    assert len(calls) > max(steps)


def test_a_device_that_always_fails(start, monkeypatch, expected):
    llm = start()
    always, error = fail(set(range(100))), jax.errors.JaxRuntimeError
    with disturbed(llm, monkeypatch, always) as calls, pytest.raises(error, match="step 2 failed"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert len(calls) == 3
    assert exact(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected  # it is back
    llm.close()


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own handler, which test runners replace."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(*steps: int) -> Callable[[int], None]:
    def after(step: int) -> None:
        for _ in range(steps.count(step)):
            signal.raise_signal(signal.SIGINT)

    return after


@pytest.mark.parametrize("steps", [(0,), (3,), (4, 4)], ids=["first step", "later", "twice in one step"])
def test_an_interrupt_leaves_a_usable_engine(llm, monkeypatch, ctrl_c, expected, steps):
    with disturbed(llm, monkeypatch, interrupt(*steps)) as calls, pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert len(calls) <= steps[0] + 4  # those of one dispatch
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not llm.session.subscriptions
    assert exact(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected


def test_an_interrupt_waits_until_the_step_is_recorded(llm, monkeypatch, ctrl_c, expected):
    release = llm.engine.tables.release

    def interrupted(tables, end):
        release(tables, end)
        signal.raise_signal(signal.SIGINT)  # the request still holds what the pool has taken back

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine.tables, "release", interrupted)
        llm.generate(IDS, GREEDY, use_tqdm=False)
    assert llm.engine.tables.occupancy == 0
    assert exact(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected


def test_an_interrupted_stream_leaves_a_usable_engine(llm, monkeypatch, ctrl_c, expected):
    with disturbed(llm, monkeypatch, interrupt(2)), pytest.raises(KeyboardInterrupt):
        list(llm.stream(IDS, replace(GREEDY, max_tokens=100)))
    assert exact(llm.generate(PROMPTS, PARAMS, use_tqdm=False)) == expected
