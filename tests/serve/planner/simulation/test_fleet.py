"""Engines that serve together in simulated time: where requests go, and prompts that one computes for
others."""

import pytest
from cases.simulated import Even, simulation

from benchmarks.studies.router import in_turn
from duetto.serve.kv.routing.placement import choose_replica
from duetto.serve.planner.simulation.fleet import Fleet, fleet_outcome
from duetto.serve.planner.simulation.offload import SimulatedLink
from duetto.serve.planner.workloads.slo_stats import SLO, SLOStats
from duetto.serve.planner.workloads.traces import TraceEntry


def conversations(count: int = 24) -> list[TraceEntry]:
    """Requests of three conversations in an order of which no two in turn are alike."""
    return [TraceEntry(12.0 * i, 600, 4, (i * i % 7,)) for i in range(count)]


def fleet(count: int, prefills: int = 0, token_seconds: float = 0.0, choose=choose_replica) -> Fleet:
    own = [
        simulation(Even(), pages=200, longest=1200, max_prefill_tokens=512) for _ in range(count + prefills)
    ]
    return Fleet(own[:count], own[count:], token_seconds, choose)


def test_a_prompt_is_routed_to_its_cached_prefix():
    there, anywhere = (fleet(3, choose=choose).serve(conversations()) for choose in (choose_replica, in_turn))
    assert there["requests"] == anywhere["requests"] == 24
    assert there["prefix_hit_rate"] > anywhere["prefix_hit_rate"]
    assert there["ttft"]["p50"] < anywhere["ttft"]["p50"]


def test_engines_share_the_load():
    entries = [TraceEntry(0.0, 100, 20) for _ in range(32)]
    one, four = (fleet(count).serve(entries) for count in (1, 4))
    assert one["generated_tokens"] == four["generated_tokens"] == 32 * 20
    assert four["seconds"] < 0.4 * one["seconds"]


def test_prompts_are_prefilled_remotely_and_transferred():
    own = fleet(2, prefills=1, token_seconds=0.01)
    found = own.serve([TraceEntry(i * 20.0, 100, 5) for i in range(6)])
    assert found["requests"] == 6 and found["generated_tokens"] == 30
    # the prompt in a call, 96 tokens of its pages over the link, the rest of it in a call
    assert found["ttft"]["p50"] == pytest.approx(1 + 0.96 + 1)
    assert own.prefill_simulations[0].engine.stats.computed_tokens["prefill"] == 6 * 100
    assert sum(one.engine.stats.computed_tokens["prefill"] for one in own.simulations) == 6 * 4


def test_decode_is_not_delayed_by_remote_prefills():
    entries = [TraceEntry(float(i), 500, 30) for i in range(30)]
    mixed, apart = fleet(2).serve(entries), fleet(1, prefills=1).serve(entries)
    assert apart["tpot"]["p99"] < mixed["tpot"]["p99"]


def test_pages_are_transferred_one_after_the_other():
    link = SimulatedLink(0.5)
    assert [link.send(1.0, 4), link.send(2.0, 2), link.send(9.0, 2)] == [3.0, 4.0, 10.0]


def test_simulations_of_an_overload_end_early():
    found = fleet(2).serve([TraceEntry(0.0, 100, 40) for _ in range(60)], SLO(ttft=2.0), max_late=5)
    assert found["given_up"] and found["requests"] < 30


def test_engines_that_have_done_nothing_have_an_outcome():
    found = fleet_outcome(fleet(2).simulations, (), SLOStats(SLO()))
    assert found["padding"] == found["prefix_hit_rate"] == found["generated_tokens"] == 0
