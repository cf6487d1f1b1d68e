"""Seconds of the host's parts of a step."""

import time

import pytest
from cases.requests import SIZES

from duetto import LLM, SamplingParams
from duetto.serve.engine.metrics import host_parts
from duetto.serve.engine.metrics.host_parts import PART_NAMES, HostParts
from duetto.serve.planner.roofline.report import render_engine_report

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that parts read: a list of one number."""
    now = [0.0]
    monkeypatch.setattr(host_parts, "perf_counter", lambda: now[0])
    return now


def counted(parts: HostParts) -> dict[str, float]:
    return {name: seconds for name, seconds in parts.report().items() if seconds}


def test_a_part_inside_of_another_is_not_counted_twice(clock: list[float]):
    parts = HostParts()
    with parts.commit:
        clock[0] = 1.0
        with parts.wait:
            clock[0] = 3.0
        with parts.commit:
            clock[0] = 7.0
        clock[0] = 15.0
    clock[0] = 100.0
    assert counted(parts) == {"commit": 1 + 4 + 8, "wait": 2}


def test_a_part_that_raises_ends(clock: list[float]):
    parts = HostParts()
    with parts.other:
        with pytest.raises(OSError), parts.dispatch:
            clock[0] = 2.0
            raise OSError
        clock[0] = 5.0
    assert counted(parts) == {"dispatch": 2, "other": 3}


def test_recorded_spans_fill_the_time_of_the_steps(clock: list[float]):
    parts = HostParts()
    with parts.record() as spans, parts.other:
        clock[0] = 1.0
        with parts.commit:
            clock[0] = 6.0
        clock[0] = 7.0
    with parts.wait:
        clock[0] = 8.0
    assert spans == [("other", 0.0, 1.0), ("commit", 1.0, 6.0), ("other", 6.0, 7.0)]


def test_an_engine_reports_the_seconds_of_all_parts(tiny):
    with LLM.from_params(tiny.config, tiny.params, **SIZES, background_compilation=False) as llm:
        begin = time.perf_counter()
        llm.generate([[1, 2, 3]] * 2, PARAMS, use_tqdm=False)
        wall, report = time.perf_counter() - begin, llm.report()
        seconds = report["host_seconds"]
        assert tuple(seconds) == PART_NAMES and all(seconds.values())
        assert sum(seconds.values()) == pytest.approx(report["seconds"], rel=0.2)
        assert sum(seconds.values()) <= wall
        assert "host         schedule " in render_engine_report(report)
        llm.engine.stats.host_parts.reset()
        assert not any(llm.report()["host_seconds"].values())
        llm.generate([[1, 2, 3]], PARAMS, use_tqdm=False)
        assert all(llm.report()["host_seconds"].values())
