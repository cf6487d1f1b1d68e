"""The real engine in simulated time: times are those of the model of time, and nothing is kept of requests
that have ended."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import pytest
from cases.models import RANDOM, TINY
from cases.simulated import Even, simulation
from suite.marks import full

from benchmarks.measured_times import MeasuredTimes
from duetto.kvcache.pool import PagePool
from duetto.model.config import Dense, GroupedQuery, LayerKind
from duetto.model.sharding import Layout
from duetto.model.transformer import decoder_spec
from duetto.model.tree import shapes_from_specs
from duetto.serve.planner.roofline.bubbles import steady_bubbles
from duetto.serve.planner.roofline.floor import program_demand
from duetto.serve.planner.roofline.targets import GPUS
from duetto.serve.planner.simulation.device import SimulatedStages
from duetto.serve.planner.simulation.engine_simulation import Simulation
from duetto.serve.planner.simulation.fleet import Fleet
from duetto.serve.planner.simulation.step_times import Demands, Efficiency, RooflineTimes, StepCall
from duetto.serve.planner.workloads.slo_stats import SLO
from duetto.serve.planner.workloads.traces import TraceEntry, draw_requests
from duetto.serve.runtime.compiled.shapes import Shape

# CPU kernels read the keys of its layers
READ_BY_KERNELS = replace(TINY, layers=(LayerKind(GroupedQuery(6, 2, 16), Dense(96)),))

PERFECT = Efficiency(compute=1, memory=1, call=0, exchange=0)
SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3}


def served(own: Simulation, *asked, **limits) -> dict[str, Any]:
    return Fleet([own]).serve(*asked, **limits)


def workload(count: int = 60) -> list[TraceEntry]:
    """Requests of which some begin alike, more than the pages hold at once."""
    entries = draw_requests(count, rate=0.5, prompt=70, output=50)
    fits = (
        replace(e, prompt_tokens=min(e.prompt_tokens, 140), output_tokens=min(e.output_tokens, 110))
        for e in entries
    )
    return [replace(e, blocks=(i % 3,) if i % 2 else ()) for i, e in enumerate(fits)]


@pytest.mark.parametrize(
    "name, pages, shards, cpu_kernels",
    [
        ("tiny", 18, 1, False),
        full("windows", 99, 1, False),
        ("tiny", 17, 2, False),
        ("tiny", 99, 1, True),  # which take several steps of few rows
    ],
)
def test_a_workload_ends_and_returns_its_pages(name, pages, shards, cpu_kernels):
    config = READ_BY_KERNELS if cpu_kernels else RANDOM[name]
    own = simulation(pages=pages, config=config, host=0.01, shards=shards, cpu_kernels=cpu_kernels)
    found = served(own, workload(), SLO(1.5, 1))
    assert all(pool.num_free == pages for pool in first_pools(own.engine.tables))
    assert any(name.endswith(",4]") for name in found["steps"]) == cpu_kernels
    assert found["requests"] == 60 and 0 < found["in_time"] < 1 and found["prefix_hit_rate"] > 0
    assert (found["preemptions"] > 0) == (pages < 20)


def first_pools(tables) -> list[PagePool]:
    return [part.pools[0] for part in tables.shards]


def test_times_of_a_lone_request_are_those_of_its_calls():
    found = served(simulation(Even()), [TraceEntry(5.0, 100, 11)])
    # a chunk of 128 tokens in one call, then a step for each further token
    assert found["ttft"]["p50"] == pytest.approx(1) and found["tpot"]["p50"] == pytest.approx(1)
    assert found["e2e"]["p50"] == pytest.approx(11) == found["seconds"] and found["busy"] == pytest.approx(1)
    assert found["steps"] == {"decode[8,1]": 10, "prefill[1,128]": 1}


def test_simulated_prompts_share_prefills_as_with_cpu_kernels():
    def rows(cpu_kernels: bool) -> set[int]:
        own = simulation(config=READ_BY_KERNELS, cpu_kernels=cpu_kernels).engine.classes.prefill
        return {shape.tokens for shape in own if shape.rows > 1}

    assert [rows(cpu_kernels) for cpu_kernels in (False, True)] == [{32}, {2}]


def test_host_work_overlaps_the_device_until_it_takes_longer():
    quick = served(simulation(Even(), host=0.4), [TraceEntry(0.0, 100, 41)])
    slow = served(simulation(Even(), host=1.5), [TraceEntry(0.0, 100, 41)])
    assert quick["tpot"]["p50"] == pytest.approx(1.0, rel=0.02)
    assert slow["tpot"]["p50"] == pytest.approx(1.5, rel=0.02)


def test_a_processor_that_runs_its_own_calls_hides_nothing():
    def between(inline: bool) -> float:
        own = simulation(Even(), host=0.4)
        own.executor._inline = inline
        return served(own, [TraceEntry(0.0, 100, 41)])["tpot"]["p50"]

    assert between(True) == pytest.approx(1.4, rel=0.05)
    assert between(False) == pytest.approx(1.0, rel=0.05)


def test_simulated_times_are_outliers_as_often_as_measured_ones():
    shape = Shape("decode", 8, 1)
    times = MeasuredTimes.of([(shape, 0, 1.0)] * 9 + [(shape, 0, 11.0)])
    found = [times(StepCall(shape, 8, 8, 0))[0] for _ in range(2000)]
    assert sum(seconds == pytest.approx(11) for seconds in found) == pytest.approx(200, rel=0.2)
    assert sum(found) / 2000 == pytest.approx(2, rel=0.1)


def test_an_admitted_request_waits_for_the_host():
    quick = served(simulation(Even()), [TraceEntry(0.0, 100, 11)])
    slow = served(simulation(Even(), seat=0.7), [TraceEntry(0.0, 100, 11)])
    assert slow["ttft"]["p50"] - quick["ttft"]["p50"] == pytest.approx(0.7)
    assert slow["tpot"] == quick["tpot"]


def test_draft_tokens_are_accepted_at_the_given_rate():
    def tokens_per_step(acceptance: float) -> float:
        own = simulation(Even(), acceptance=acceptance, speculative_config=SPECULATIVE)
        found = served(own, [TraceEntry(0.0, 20, 200)])
        return 199 / sum(n for name, n in found["steps"].items() if not name.startswith("prefill"))

    assert tokens_per_step(0.0) == pytest.approx(1, rel=0.02)
    assert tokens_per_step(1.0) == pytest.approx(4, rel=0.05)
    expected = 1 + 0.7 + 0.7**2 + 0.7**3
    assert tokens_per_step(0.7) == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_bubbles_of_a_pipeline_are_those_of_the_formula(micro_batches):
    own = simulation(Even(stages=2), pages=200, pipeline_parallel_size=2, micro_batches=micro_batches)
    found = served(own, [TraceEntry(0.0, 10, 200) for _ in range(8)])
    assert found["bubbles"] == pytest.approx(steady_bubbles([1.0, 1.0], micro_batches), abs=0.05)
    cycle = max(1, 2 / micro_batches) * micro_batches  # of all groups
    assert found["tpot"]["p50"] == pytest.approx(cycle, rel=0.1)


def test_stages_do_one_call_at_a_time():
    stages = SimulatedStages(2)
    assert [stages.run(0.0, (1, 3)), stages.run(0.5, (1, 3)), stages.run(9.0, (1, 3))] == [4, 7, 13]
    assert stages.in_flight_seconds == 7 + 4 and stages.bubbles == pytest.approx(1 - 12 / 22)


def test_simulations_of_an_overload_end_early():
    entries = [TraceEntry(0.0, 100, 40) for _ in range(60)]
    found = served(simulation(Even()), entries, SLO(ttft=2.0), max_late=5)
    assert found["given_up"] and found["requests"] < 20


def test_requests_that_are_too_long_count_as_late():
    found = served(simulation(Even()), [TraceEntry(0.0, 250, 10), TraceEntry(0.0, 10, 10)])
    assert (found["left_out"], found["requests"], found["in_time"]) == (1, 1, 0.5)


def test_trace_entries_are_read_at_their_arrivals():
    seen = []

    def entries():
        for entry in draw_requests(300, rate=0.02, prompt=40, output=10):
            seen.append(len(own.engine.scheduler.running) + len(own.engine.scheduler.waiting))
            yield replace(
                entry, prompt_tokens=min(entry.prompt_tokens, 150), output_tokens=min(entry.output_tokens, 40)
            )

    own = simulation()
    assert served(own, entries())["requests"] == 300
    assert max(seen) < 30


def test_measured_times_grow_with_what_rows_have_in_the_cache():
    shape, wide = Shape("decode", 8, 1), Shape("decode", 16, 1)
    times = MeasuredTimes.of([(shape, 100, 2.0), (shape, 300, 3.0), (shape, 200, 2.5)])
    assert times(StepCall(shape, 8, 8, 500)) == pytest.approx((4.0,))
    assert times(StepCall(wide, 9, 9, 0)) == pytest.approx((3.0,))  # in proportion
    assert MeasuredTimes.of([(shape, 5, 2.0), (shape, 6, 1.0)]).table[shape] == (1.5, 0.0)  # it never falls
    with pytest.raises(ValueError, match="no time of prefill"):
        times(StepCall(Shape("prefill", 1, 64), 1, 64, 0))


def test_the_roofline_is_the_floor_where_nothing_is_lost():
    params = shapes_from_specs(decoder_spec(TINY), jnp.dtype("bfloat16"))
    demands, peaks, shape = Demands(TINY, params, "bfloat16"), GPUS["h200"], Shape("decode", 8, 1)

    def seconds(cached: int, **layout: int) -> list[float]:
        return list(RooflineTimes(demands, peaks, Layout(**layout), PERFECT)(StepCall(shape, 8, 8, cached)))

    (own,) = seconds(8 * 256)
    assert own == pytest.approx(
        program_demand(shape, TINY, "bfloat16", 256).floor_seconds(peaks.flops16, peaks.bandwidth)
    )
    assert all(a < b for a, b in pairwise(seconds(8 * n)[0] for n in (0, 100, 200, 300, 5000)))
    assert own / 2 < seconds(8 * 256, tensor=2)[0] < own
    assert sum(seconds(8 * 256, stages=2)) == pytest.approx(own, rel=0.05)
