"""What an engine remembers of requests that have ended does not grow with their number."""

import pickle
import random
from types import SimpleNamespace

import numpy as np
import pytest

from duetto import SamplingParams
from duetto.kvcache.tables import PageTables
from duetto.serve.engine.core.request import Request, RequestTimes
from duetto.serve.engine.core.scheduler import Scheduler
from duetto.serve.engine.core.scheduler_output import SchedulerConfig
from duetto.serve.engine.metrics.stats import MAX_SAMPLE_NUMBERS, EngineStats, Sample
from duetto.serve.text.outputs import RequestMetrics


def finished(ttft: float, tpot: float = 0.25) -> SimpleNamespace:
    metrics = RequestMetrics(arrival=0.0, queued=0.0, ttft=ttft, tpot=tpot, e2e=2 * ttft)
    return SimpleNamespace(prompt=[1, 2], num_output_tokens=3, finish_reason="stop", metrics=lambda: metrics)


def brought() -> list[SimpleNamespace]:
    """A prompt's step, and its first tokens."""
    work = SimpleNamespace(
        count=2, request=SimpleNamespace(times=RequestTimes(first_token=1.0, last_token=1.0))
    )
    return [SimpleNamespace(scheduled=work, is_prompt=True, tokens=[1, 2, 3])]


def test_a_meter_stays_as_large_as_it_is():
    meter = EngineStats()
    for i in range(MAX_SAMPLE_NUMBERS):
        meter.on_tokens(brought())
        meter.on_finish(finished(float(i)))
    size = len(pickle.dumps(meter))
    for i in range(2 * MAX_SAMPLE_NUMBERS):
        meter.on_tokens(brought())
        meter.on_finish(finished(float(i)))
    assert len(pickle.dumps(meter)) < 1.01 * size
    report = meter.report()
    assert (
        report["requests"] == 3 * MAX_SAMPLE_NUMBERS and report["generated_tokens"] == 9 * MAX_SAMPLE_NUMBERS
    )
    assert report["finish_reasons"] == {"stop": 3 * MAX_SAMPLE_NUMBERS}


def test_percentiles_are_exact_of_as_many_requests_as_are_kept():
    meter, draw = EngineStats(), random.Random(1)
    spans = [draw.expovariate(1.0) for _ in range(500)]
    for span in spans:
        meter.on_finish(finished(span, tpot=0.0))
    report = meter.report()
    assert report["ttft"] == {f"p{p}": float(np.percentile(spans, p)) for p in (50, 90, 99)}
    assert report["e2e"] == {f"p{p}": float(np.percentile([2 * s for s in spans], p)) for p in (50, 90, 99)}
    assert report["tpot"] == {}  # of requests of a single token


def test_a_sample_of_more_is_uniform_over_all_of_them():
    sample = Sample(size=1000)
    for i in range(50_000):
        sample.add(i / 50_000)
    found = sample.percentiles()
    assert sample.count == 50_000 and len(sample.numbers) == 1000
    assert found == pytest.approx({"p50": 0.5, "p90": 0.9, "p99": 0.99}, abs=0.05)
    again = Sample(size=1000)
    for i in range(50_000):
        again.add(i / 50_000)
    assert again.percentiles() == found


def test_aborted_requests_leave_a_queue_that_never_empties():
    tables = PageTables((None,), (4,), 16, 64)
    scheduler = Scheduler(SchedulerConfig(1, 64, 64, 1), tables, None, recompute_outputs=True)

    def request(arrival: int, priority: int) -> Request:
        return Request(str(arrival), [1], SamplingParams(), 0, end=2, priority=priority, arrival=arrival)

    first = [request(i, 0) for i in range(5)]  # wait in front of all others
    for ahead in first:
        scheduler.add(ahead)
    for i in range(10, 1000):
        behind = request(i, 1)
        scheduler.add(behind)
        behind.finish("abort")
        scheduler.abort(behind)
        assert len(scheduler.waiting) <= 2 * len(first) + 1
    assert [
        entry[1] for entry in sorted(scheduler.waiting, key=lambda e: e[0]) if not entry[1].is_finished
    ] == first
