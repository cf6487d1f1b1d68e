"""The host's own work is measured over programs that take no time."""

import pytest

from duetto.serve.cli.bench import host_work
from duetto.serve.options.engine import EngineOptions

pytestmark = pytest.mark.usefixtures("unchecked")  # the programs take what is no array


@pytest.mark.parametrize("seats", [3, 32])
def test_an_engine_over_idle_programs_steps(tiny, monkeypatch, seats):
    monkeypatch.setattr(host_work, "WARMUP_STEPS", 20)
    monkeypatch.setattr(host_work, "TIMED_STEPS", 10)
    assert 0 < host_work.measure_host_step(tiny.config, tiny.params, None, EngineOptions(), seats) < 60
