"""What a cold engine compiles beside serving: what the steps at hand lack, where the work to come is worth
it."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from duetto import LLM, SamplingParams
from duetto.serve.engine.core import compile_planner as needs
from duetto.serve.engine.core.compile_planner import (
    COMPARE_EVERY_STEPS,
    MIN_COMPARED_STEPS,
    CompilePlanner,
    estimate_work_seconds,
)
from duetto.serve.engine.core.scheduler_output import ScheduledTokens, SchedulerOutput
from duetto.serve.engine.metrics.stats import EngineStats
from duetto.serve.planner.roofline.report import render_compilations
from duetto.serve.runtime.compiled import executable_cache
from duetto.serve.runtime.compiled.program_table import ProgramTable
from duetto.serve.runtime.compiled.shapes import Shape, Sizes
from duetto.serve.runtime.equal_bits.classes import ShapeClasses
from duetto.serve.runtime.equal_bits.warmup import WARMUP_THREAD_PREFIX, Warmup

FIRST = ShapeClasses.from_shapes([Shape("prefill", 1, 64), Shape("decode", 8, 1)], same_bits=True)
MISSING = [
    Shape("decode", 32, 1),
    Shape("prefill", 1, 512),
    Shape("decode", 16, 1),
    Shape("prefill", 16, 32),
    Shape("prefill", 8, 32),
]
SIZES = {
    "max_num_seqs": 16, "max_prefill_tokens": 128, "max_model_len": 256, "page_size": 16,
    "cpu_kernels": False,
}  # fmt: skip
ALIKE = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def works(count: int, tokens: int) -> list[ScheduledTokens]:
    return [ScheduledTokens(cast(Any, SimpleNamespace(constraint=None)), 0, tokens) for _ in range(count)]


def need_of(plan: SchedulerOutput, prefill: float = 1.0, decode: float = 1.0) -> CompilePlanner:
    """After some steps of one kind, of whose time so much was each phase's."""
    meter = EngineStats()
    meter.phase_seconds |= {"prefill": prefill, "decode": decode}
    need = CompilePlanner(Sizes(1024, 32, (512,), 64), meter, FIRST)
    for _ in range(COMPARE_EVERY_STEPS * MIN_COMPARED_STEPS):
        assert need.next_shape(MISSING, seconds_left=1000.0, compile_seconds=1.0) is None
        need.record_savings(FIRST, MISSING, plan)
    return need


@pytest.mark.parametrize(
    "plan, expected",
    [
        (SchedulerOutput(prefill=works(8, 25)), "prefill[8,32]"),
        (SchedulerOutput(prefill=works(16, 25)), "prefill[16,32]"),
        (SchedulerOutput(prefill=works(1, 500)), "prefill[1,512]"),
        (SchedulerOutput(decode=works(32, 1)), "decode[32,1]"),
        (SchedulerOutput(decode=works(16, 1)), "decode[16,1]"),
    ],
    ids=["short prompts", "more of them", "a long one", "all seats", "half of them"],
)
def test_programs_that_steps_lack_are_compiled_first(plan, expected):
    assert str(need_of(plan).next_shape(MISSING, seconds_left=1000.0, compile_seconds=1.0)) == expected


def test_the_slowest_phase_is_compiled_first():
    plan = SchedulerOutput(prefill=works(8, 25), decode=works(32, 1))
    assert need_of(plan, prefill=9.0, decode=1.0).next_shape(MISSING, 1000.0, 1.0) == Shape("prefill", 8, 32)
    assert need_of(plan, prefill=1.0, decode=9.0).next_shape(MISSING, 1000.0, 1.0) == Shape("decode", 32, 1)


def test_work_that_ends_too_soon_compiles_nothing():
    """A shape that spares a share s of L seconds, once c of them have gone into it, pays if s (L - c) > c."""
    need, best, cost = need_of(SchedulerOutput(decode=works(32, 1))), Shape("decode", 32, 1), 4.0
    enough = cost + cost / need.saved_share(best)
    assert need.next_shape(MISSING, enough - 0.01, cost) is None
    assert need.next_shape(MISSING, enough + 0.01, cost) == best


def test_programs_that_slow_steps_are_never_compiled(monkeypatch):
    need = need_of(SchedulerOutput(decode=works(32, 1)))
    assert need.next_shape(MISSING, seconds_left=1e6, compile_seconds=1.0) is not None
    monkeypatch.setattr(need, "saved_share", lambda _: -0.1)
    assert need.next_shape(MISSING, seconds_left=1e6, compile_seconds=1.0) is None
    assert need.next_shape(MISSING, seconds_left=0.0, compile_seconds=1.0) is None


def test_programs_that_steps_do_not_lack_wait_for_idleness():
    need = need_of(SchedulerOutput(decode=works(8, 1)))
    assert need.next_shape(MISSING, seconds_left=1e6, compile_seconds=1.0) is None
    assert need.next_shape([], seconds_left=1e6, compile_seconds=1.0) is None


@pytest.mark.parametrize(
    "ended, to_come, expected",
    [(10, 0, 10.0), (10, 30, 40.0), (10, None, 10.0), (100, 0, 1.0), (100, None, 10.0), (1, 500, 10.0)],
)
def test_work_to_come_is_known_by_what_requests_have_taken(ended, to_come, expected):
    meter = EngineStats(seconds=10.0)
    for _ in range(ended):
        meter.e2e.add(1.0)
    queue = SimpleNamespace(waiting=[None] * 10, running={})
    if ended == 1:
        queue.running = {i: SimpleNamespace(num_computed_tokens=0, end=10) for i in range(2)}
    assert estimate_work_seconds(cast(Any, queue), meter, to_come) == pytest.approx(expected)


# ------------------------------------------------------------ engines


@pytest.fixture
def added(monkeypatch, early) -> Iterator[list[str]]:
    """Names of the shapes that are compiled beside serving."""
    found, add = list[str](), ProgramTable.add

    def noted(programs: ProgramTable, shape: Shape) -> None:
        found.append(str(shape))
        add(programs, shape)

    monkeypatch.setattr(ProgramTable, "add", noted)
    yield found
    for thread in threading.enumerate():  # what is begun would be kept where the next test looks
        if thread.name.startswith(WARMUP_THREAD_PREFIX):
            thread.join(600.0)


def test_a_short_job_compiles_no_further_program(one_layer, added, monkeypatch):
    monkeypatch.setattr(executable_cache.CompileTimes, "mean", 1e6)
    monkeypatch.setattr(needs, "IDLE_SECONDS", 1e6)
    with LLM.from_params(one_layer.config, one_layer.params, **SIZES) as llm:
        llm.expect(0)
        monkeypatch.setattr(needs, "IDLE_SECONDS", 0.0)
        outputs = llm.generate([[5, 6, 7]] * 16, ALIKE, use_tqdm=False)
        assert (
            not llm.session.warm_up_once() and llm.engine.warmup is not None and not llm.engine.warmup.is_idle
        )
        report = llm.report()
    assert len(outputs) == 16 and not added
    assert report["programs_missing"] == len(llm_missing(report)) > 2 and not report["programs_read"]
    assert report["steps_beside_compiling_seconds"] == 0 < report["compile_seconds"]
    assert f"{report['programs_missing']} not needed so far, 0 while requests waited" in render_compilations(
        report
    )


def llm_missing(report: dict[str, Any]) -> set[str]:
    """Names of the table's steps that were not there."""
    prefills = {"prefill[1,64]", "prefill[1,128]", "prefill[2,32]", "prefill[4,32]"}
    return {*prefills, "decode[8,1]", "decode[16,1]"} - report["compiled_at"].keys()


def test_an_engine_of_unknown_workload_compiles_while_idle(one_layer, early, monkeypatch):
    monkeypatch.setattr(executable_cache.CompileTimes, "mean", 1e6)
    monkeypatch.setattr(Warmup, "start_threads", lambda *_: None)  # or one has compiled when the test looks
    monkeypatch.setattr(needs, "IDLE_SECONDS", 1e6)
    with LLM.from_params(one_layer.config, one_layer.params, **SIZES) as llm:
        assert (
            not llm.session.warm_up_once() and llm.engine.warmup is not None and not llm.engine.warmup.is_idle
        )
        monkeypatch.setattr(needs, "IDLE_SECONDS", 0.0)
        assert not llm.session.warm_up_once() and llm.engine.warmup is not None and llm.engine.warmup.is_idle


def test_the_first_background_program_is_one_the_steps_lack(one_layer, added, monkeypatch):
    """Two prompts a step, and so few rows of decode that the narrow program holds them."""
    monkeypatch.setattr(needs, "IDLE_SECONDS", 1e6)  # a start may take longer than a second
    with LLM.from_params(one_layer.config, one_layer.params, **SIZES) as llm:
        llm.expect(0)
        while not added:
            llm.generate([[5, 6, 7]] * 8, ALIKE, use_tqdm=False)
    assert added[0] == "prefill[2,32]"
