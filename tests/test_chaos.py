"""The simulated fleet: seeds without a violation, the same course each time, planted faults that are found
and shrunk. `python -m benchmarks.chaos` plays more seeds."""

import json
import subprocess
import sys
from collections import Counter

import pytest
from suite.fixtures import ROOT
from suite.marks import full, full_if

from benchmarks.chaos.__main__ import main
from benchmarks.chaos.planted import PLANTED, found_by, planted
from benchmarks.chaos.run import run, shrunk

SEEDS = 12
WITHIN = 200  # seeds within which a planted fault is found


@pytest.mark.parametrize("seeds", [6, full(SEEDS)])
def test_seeds_find_no_violation(seeds):
    outcomes = [run(seed) for seed in range(seeds)]
    assert [outcome.log for outcome in outcomes if outcome.error] == []
    kinds = {outcome.kind for outcome in outcomes}
    assert kinds == {"engine", "fleet", "prefill"}
    assert sum(len(outcome.faults) for outcome in outcomes) > seeds
    assert all(outcome.asks and outcome.events for outcome in outcomes)


@pytest.mark.parametrize("seed", [478])  # found a request that waited for no replica that was up
def test_seeds_that_failed_before_pass(seed):
    assert run(seed).error == ""


def test_a_seed_runs_the_same_in_another_process():
    program = "from benchmarks.chaos.run import run; print([run(seed).trace for seed in (3, 4)])"
    env = {"PYTHONPATH": "src:.", "PYTHONHASHSEED": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == f"{[run(seed).trace for seed in (3, 4)]}\n"


@pytest.mark.full
def test_a_run_goes_on_where_its_figures_end(tmp_path, monkeypatch):
    file = tmp_path / "figures.json"
    for seeds in (2, 5, 5):
        monkeypatch.setattr(sys, "argv", ["chaos", "--seeds", str(seeds), "--output", str(file)])
        assert main() == 0
    found = json.loads(file.read_text())
    outcomes = [run(seed) for seed in range(5)]
    assert sum(found["seeds"].values()) == 5 and found["seeds"]["engine"] == 2 and not found["failed"]
    assert found["requests"] == sum(outcome.asks for outcome in outcomes)
    assert found["faults"] == Counter(fault.kind for outcome in outcomes for fault in outcome.faults)


@full_if(lambda name: name not in ("lost admission", "realm of pages"))
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name):
    assert found_by(name, range(WITHIN)) is not None, f"no seed finds that {PLANTED[name].about}"


def test_a_failing_seed_is_shrunk_to_its_needed_faults():
    seed = found_by("torn page", range(WITHIN))
    assert seed is not None
    with planted("torn page"):
        whole, least = run(seed), shrunk(seed)
    assert least.error and 0 < len(least.faults) <= 3 and len(least.faults) <= len(whole.faults)
    assert set(least.faults) <= set(whole.faults)
    assert not run(seed).error
