"""The host's own work is measured over programs that take no time."""

import pytest

from duetto.serve.cli.bench import hostwork
from duetto.serve.options.engine import EngineOptions

pytestmark = pytest.mark.usefixtures("unchecked")  # the programs take what is no array


@pytest.mark.parametrize("seats", [3, 32])
def test_an_engine_over_idle_programs_steps(tiny, monkeypatch, seats):
    monkeypatch.setattr(hostwork, "WARM", 20)
    monkeypatch.setattr(hostwork, "STEPS", 10)
    assert 0 < hostwork.step_seconds(tiny.config, tiny.params, None, EngineOptions(), seats) < 60
