"""The page on reliability names faults of the simulation, how often they struck, and metrics that exist."""

import json
import re
from random import Random

from suite.fixtures import ROOT

from benchmarks.chaos.faults import ENGINE, FLEET, PREFILL
from benchmarks.chaos.machine import Machine, MachineConfig
from benchmarks.chaos.page import filled
from benchmarks.chaos.simulated.world import SimulatedLoop
from duetto.serve.kv.routing.placement import Replica
from duetto.serve.kv.routing.prefix_index import EventPrefixIndex
from duetto.serve.llm.metrics import engine_metrics
from duetto.serve.server.router.main import router_metric_families
from duetto.serve.server.service.exposition import EventLoopLag

PAGE = (ROOT / "docs" / "reliability.md").read_text()
FIGURES = json.loads((ROOT / "benchmarks" / "results" / "2026-11-26-chaos.json").read_text())
ROW = re.compile(r"\| .*?\((`\w+`(?:, `\w+`)*)\) \|.*\| ([\d,]+) \|")


class Idle:
    """What the families of a router read of its proxy."""

    num_resumed = num_retried = num_waiting = 0

    @property
    def queue(self) -> "Idle":
        return self


def test_each_simulated_fault_has_a_row_with_its_number():
    rows = [kind for kinds, _ in ROW.findall(PAGE) for kind in re.findall(r"\w+", kinds)]
    assert {*rows} == {*ENGINE, *FLEET, *PREFILL} and len(rows) == len({*rows})
    assert filled(PAGE, FIGURES) == PAGE


def test_each_row_names_a_test_that_exists():
    named = re.findall(r"\| `(tests/[\w/]+\.py)(?:: (\w+))?` \|", PAGE)
    assert len(named) == len([line for line in PAGE.splitlines() if "| `tests/" in line]) > 20
    assert [
        path
        for path, name in named
        if (f"def {name}(" if name else "def test_") not in (ROOT / path).read_text()
    ] == []


def test_the_metrics_of_the_runbook_exist():
    loop = SimulatedLoop(Random(0))
    machine = Machine(loop, "machine", MachineConfig(), Random(0))
    machine.start()
    machine.engine.kernels = {"attention": Check()}
    replica, idle = Replica("x", EventPrefixIndex()), Idle()
    names = {metric.name for metric in engine_metrics(machine.engine)}
    names |= {family.name for family in router_metric_families([replica], idle)}  # type: ignore[arg-type]
    names |= {family.name for family in EventLoopLag(loop).histogram.collect()}
    loop.close()
    named = {*re.findall(r"`((?:vllm|duetto):\w+)`", PAGE)}
    assert len(named) > 12
    assert {name for name in named if re.sub("_(total|bucket)$", "", name) not in names} == set()


class Check:
    reason = ""
