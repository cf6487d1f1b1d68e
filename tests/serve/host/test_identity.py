"""Facts that decide whether something is reused: which ones each use compares."""

from pathlib import Path

import jax
import pytest

from duetto.serve.host import identity
from duetto.serve.host.identity import FACTS, REUSE, gather_facts, hash_facts
from duetto.serve.options.engine import EngineOptions
from duetto.serve.runtime.multihost.rendezvous import rank_facts


def test_each_fact_is_made_once_and_used():
    assert {name for names in REUSE.values() for name in names} == FACTS.keys()


def test_a_fact_of_another_value_has_another_hash():
    assert hash_facts({"jax": "1"}, 2) == hash_facts({"jax": "1"}, 2) != hash_facts({"jax": "2"}, 2)


@pytest.mark.parametrize("use", ["program", "exact realm", "job", "audit", "rank"])
def test_the_content_of_a_file_of_flags_counts(use, monkeypatch, tmp_path: Path):
    """XLA reads XLA_FLAGS as a path unless it begins with a dash."""
    (file := tmp_path / "flags").write_text("--xla_cpu_enable_fast_math=false")
    monkeypatch.setenv("XLA_FLAGS", str(file))
    before = gather_facts(use, jax.devices()[0])
    file.write_text("--xla_cpu_enable_fast_math=true")
    assert gather_facts(use, jax.devices()[0]) != before
    file.unlink()
    assert gather_facts(use, jax.devices()[0])["XLA_FLAGS"] == str(file)


@pytest.mark.parametrize("use", ["program", "exact realm", "job", "audit", "rank"])
@pytest.mark.parametrize("name", ["NPROC", "PJRT_NPROC"])
def test_the_number_of_xlas_threads_counts(use, name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    before = gather_facts(use, jax.devices()[0])
    monkeypatch.setenv(name, "3")
    assert gather_facts(use, jax.devices()[0]) == before | {name: "3"}


@pytest.mark.parametrize("use", ["program", "exact realm", "job", "audit", "rank"])
def test_a_setting_by_which_xla_compiles_otherwise_counts(use):
    name = "jax_disable_most_optimizations"
    usual, facts = jax.config.values[name], list[str | None]()
    try:
        for is_off in (False, True):
            jax.config.update(name, is_off)
            facts.append(gather_facts(use, jax.devices()[0]).get(name))
    finally:
        jax.config.update(name, usual)
    assert facts[0] in (None, "False") and facts[1] == "True"


def test_an_accelerators_host_does_not_count():
    class Device:
        device_kind, platform, client = "NVIDIA H100", "gpu", type("Client", (), {"platform_version": "cuda"})

    for use in ("program", "job", "rank device"):
        assert not {"cores", "processor", "instructions"} & gather_facts(use, Device()).keys()


def test_ranks_compare_xlas_flags_and_not_its_dumps(monkeypatch):
    facts = []
    for flags in ("--x=1 --xla_dump_to=/tmp/0", "--xla_dump_to=/tmp/1 --x=1", "--x=2"):
        monkeypatch.setenv("XLA_FLAGS", flags)
        facts.append(rank_facts(EngineOptions()))
    assert facts[0] == facts[1] and facts[0]["XLA_FLAGS"] == "--x=1" and facts[2]["XLA_FLAGS"] == "--x=2"


def test_ranks_may_differ_in_cores_and_not_in_instructions(monkeypatch):
    device = jax.devices()[0]
    before = gather_facts("rank device", device)
    monkeypatch.setattr(identity, "num_cores", lambda: 97)
    assert gather_facts("rank device", device) == before
    monkeypatch.setattr(identity, "processor_flags", lambda: "none")
    assert gather_facts("rank device", device) == before | {"instructions": "none"}
