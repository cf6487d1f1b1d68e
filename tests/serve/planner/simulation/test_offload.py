"""Pages in the host's memory in simulated time: prompts are found there, when the link has carried them."""

import pytest
from cases.simulated import Even, simulation

from duetto.serve.planner.simulation.engine_simulation import Simulation
from duetto.serve.planner.simulation.fleet import Fleet
from duetto.serve.planner.simulation.offload import attach_host_pages
from duetto.serve.planner.workloads.traces import TraceEntry

PAGE_BYTES = 1000


class ByTokens(Even):
    """A call takes a second for 16 tokens, a page's."""

    def __call__(self, call):
        return [call.tokens / 16]


def swapping(most_bytes: int = 10**6, bandwidth: float = 10_000.0) -> Simulation:
    own = simulation(ByTokens(), pages=70, longest=1200, max_prefill_tokens=512)
    attach_host_pages(own, most_bytes, [PAGE_BYTES], bandwidth)
    return own


def visits(prompts: int = 4, rounds: int = 5) -> list[TraceEntry]:
    """Prompts that begin with a block of their own, in turn; two of them fill the pools."""
    return [TraceEntry(200.0 * i, 520, 2, (i % prompts,)) for i in range(prompts * rounds)]


def hit_rate(own: Simulation) -> float:
    return Fleet([own]).serve(visits())["prefix_hit_rate"]


def test_evicted_prompts_are_found_in_host_memory():
    without = simulation(ByTokens(), pages=70, longest=1200, max_prefill_tokens=512)
    assert hit_rate(without) == 0
    own = swapping()
    assert hit_rate(own) > 0.6  # all but the first round, and pages that are tried before rates are known
    report = own.engine.report()["tiers"]
    assert report["fetched"] > 300 and report["late"] == 0
    assert own.is_idle and all(pool.num_free == 70 for pool in own.engine.tables.pools)


def test_pages_that_are_not_in_memory_are_computed():
    assert hit_rate(swapping(most_bytes=40 * PAGE_BYTES)) < 0.3


def test_pages_arrive_after_the_transfer_time():
    own, fetched, waited = swapping(), [0], [0.0]
    for i in range(12):
        found = Fleet([own]).serve([TraceEntry(own.clock() + 1, 520, 2, (i % 3,))])
        waited.append(found["ttft"]["p50"])
        fetched.append(own.engine.report()["tiers"]["fetched"])
    pages = fetched[-1] - fetched[-2]
    assert 20 < pages <= 32
    # pages over the link at 0.1 s, then the 8 tokens behind them; the others are in the pools
    assert waited[-1] == pytest.approx(pages * 0.1 + 0.5)


@pytest.mark.full
def test_what_takes_longer_than_computing_is_not_fetched():
    own = swapping(bandwidth=500.0)  # two seconds a page
    assert hit_rate(own) < 0.4 and own.engine.report()["tiers"]["refused"] > 0
