"""Whether an engine uses CPU kernels with `cpu_kernels=None`."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from cases.models import RANDOM

from duetto.cpu_kernels.build import ARM, X86, BuildError
from duetto.cpu_kernels.library import KernelLibrary
from duetto.model.config import ModelConfig
from duetto.serve.engine.startup import cpu_kernels, dtype
from duetto.serve.engine.startup.cpu_kernels import (
    decide_cpu_kernels,
    explain_default_without_kernels,
    explain_unused_cpu_kernels,
    is_optimisation_off,
)
from duetto.serve.host.progress import progress_enabled
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.roofline.presets import PRESETS

CPU, GPU = SimpleNamespace(platform="cpu"), SimpleNamespace(platform="gpu")
UNDECIDED = EngineOptions(cpu_kernels=None)
CONFIG = PRESETS["135m"]  # with heads of a size that kernels read


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with kernels, whose library is built, in a process that compiles as users' do."""
    monkeypatch.setattr(cpu_kernels, "is_supported", lambda: True)
    monkeypatch.setattr(cpu_kernels, "ISAS", X86)
    monkeypatch.setattr(cpu_kernels, "build_missing_library", lambda: None)
    monkeypatch.setattr(cpu_kernels, "load_library", lambda: KernelLibrary(("avx512_bf16",)))
    monkeypatch.setattr(cpu_kernels, "is_optimisation_off", lambda: False)
    monkeypatch.setattr(cpu_kernels, "explain_default_without_kernels", explain_default_without_kernels)


@pytest.mark.usefixtures("usable")
def test_kernels_that_read_all_layers_keys_are_used():
    for name in ("auto", "float32", "half"):
        found = decide_cpu_kernels(UNDECIDED, CPU, CONFIG, name)
        assert found == replace(UNDECIDED, cpu_kernels=name != "half")
    assert decide_cpu_kernels(UNDECIDED, GPU, CONFIG, "auto").cpu_kernels is False
    assert decide_cpu_kernels(UNDECIDED, CPU, CONFIG, "auto", devices=2).cpu_kernels is False


@pytest.mark.usefixtures("usable")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (CONFIG, {"kv_cache_dtype": "int8"}),
        (CONFIG, {"tensor_parallel_size": 2}),
        (CONFIG, {"pipeline_parallel_size": 2}),
        (RANDOM["latent"], {}),
    ],
)
def test_kernels_are_off_where_xla_reads_some_keys(model: ModelConfig, options: dict):
    assert decide_cpu_kernels(replace(UNDECIDED, **options), CPU, model, "auto").cpu_kernels is False


@pytest.mark.usefixtures("usable")
def test_kernels_are_off_where_xla_may_be_faster(monkeypatch, capfd):
    monkeypatch.setattr(cpu_kernels, "ISAS", ARM)
    assert decide_cpu_kernels(UNDECIDED, CPU, CONFIG, "auto").cpu_kernels is False
    assert decide_cpu_kernels(replace(UNDECIDED, cpu_kernels=True), CPU, CONFIG, "auto").cpu_kernels is True
    assert "without CPU kernels: whether they are faster than XLA's products on ARM" in capfd.readouterr().err


@pytest.mark.usefixtures("usable")
def test_a_process_whose_programs_compile_quickly_builds_no_kernels(monkeypatch):
    monkeypatch.setattr(cpu_kernels, "is_optimisation_off", is_optimisation_off)
    monkeypatch.delattr(cpu_kernels, "build_missing_library")
    assert jax.config.values["jax_disable_most_optimizations"]  # as processes are that tests start
    assert decide_cpu_kernels(UNDECIDED, CPU, CONFIG, "auto").cpu_kernels is False


@pytest.mark.usefixtures("usable")
def test_an_engine_starts_without_kernels_that_cannot_be_built(monkeypatch, capfd):
    def fail() -> None:
        raise BuildError("there is no compiler")

    monkeypatch.setattr(cpu_kernels, "build_missing_library", fail)
    monkeypatch.setattr(cpu_kernels, "load_library", lambda: KernelLibrary((), "it was not built"))
    with progress_enabled(True):
        found = decide_cpu_kernels(UNDECIDED, CPU, CONFIG, "auto")
    assert (
        found.cpu_kernels is False
        and explain_unused_cpu_kernels(found, CPU, CONFIG, "auto") == "it was not built"
    )
    assert "duetto: without CPU kernels: there is no compiler" in capfd.readouterr().err
    with pytest.raises(ValueError, match="cpu_kernels=True is not allowed: there is no compiler"):
        decide_cpu_kernels(replace(UNDECIDED, cpu_kernels=True), CPU, CONFIG, "auto")


@pytest.mark.usefixtures("usable")
def test_an_engine_reports_why_an_instruction_set_is_unused(monkeypatch):
    why = "not avx512_amx: its products are wrong on this processor"
    monkeypatch.setattr(cpu_kernels, "load_library", lambda: KernelLibrary(("avx512_bf16",), why))
    found = decide_cpu_kernels(UNDECIDED, CPU, CONFIG, "auto")
    assert found.cpu_kernels and explain_unused_cpu_kernels(found, CPU, CONFIG, "auto") == why
    assert explain_unused_cpu_kernels(found, GPU, CONFIG, "auto") == ""


@pytest.mark.usefixtures("usable")
def test_what_an_engine_says_of_its_kernels():
    """Why it has none, where the options ask for none too; nothing on accelerators."""
    without = replace(UNDECIDED, cpu_kernels=False)
    assert explain_unused_cpu_kernels(without, CPU, CONFIG, "auto") == cpu_kernels.NOT_ASKED
    assert "they do not read" in explain_unused_cpu_kernels(without, CPU, CONFIG, "half")
    assert explain_unused_cpu_kernels(replace(without, cpu_kernels=True), CPU, CONFIG, "auto") == ""
    assert explain_unused_cpu_kernels(without, GPU, CONFIG, "auto") == ""


def test_auto_is_the_checkpoints_dtype_where_kernels_multiply_it(monkeypatch):
    kernels = {
        isas[0]: KernelLibrary(isas)
        for isas in (("avx2",), ("avx512_bf16", "avx2"), ("avx512_amx", "avx512_bf16"))
    }
    found = {}
    for isa, own in kernels.items():
        monkeypatch.setattr(dtype, "load_library", lambda own=own: own)
        for option in (True, False):
            found[isa, option] = str(dtype.compute_dtype("auto", CPU, CONFIG, None, option))
    assert found.pop(("avx512_bf16", True)) == found.pop(("avx512_amx", True)) == "bfloat16"
    assert set(found.values()) == {"float32"}
