"""`duetto doctor` names the device, its kernels and rates, gives advice, and its exit code tells scripts."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from cases.gpus import traced_for

from duetto.cpu_kernels.library import load_library
from duetto.serve.cli import doctor
from duetto.serve.cli.main import main
from duetto.serve.engine.startup.kernel_checks import HUNG_REASON, KernelCheck
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.engine_plan import EnginePlan, plan_engine
from duetto.serve.planner.roofline import targets
from duetto.serve.planner.roofline.targets import GPUS, Peaks, local_target
from duetto.serve.runtime.compiled import executable_cache

MEASURED = Peaks(1e12, 5e11, 2e10, 0.0, 0)
REFUSED = {
    "attention_decode 6/2 heads": KernelCheck("attention_decode", "it lies", 1.0, 2.0),
    "attention_prefill 6/2 heads": KernelCheck("attention_prefill", "", 1e-3, 1.5),
    "expert_product 64x64": KernelCheck("expert_product", "it needs compute capability 9.0"),
}


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "measure_peaks", lambda: MEASURED)


def found(capsys: Any, *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    code = main(["doctor", "--json", *flags])
    return json.loads(capsys.readouterr().out) | {"code": code}


def test_a_cpu_is_described(capsys):
    facts = found(capsys)
    assert facts["code"] == 0 and facts["platform"] == "cpu" and facts["kernels"] == {}
    assert facts["capability"] is facts["memory"] is None and facts["cores"] >= 1
    assert facts["cpu_kernels"] == "jax_disable_most_optimizations is set"
    if load_library().isas:
        assert found(capsys, "--cpu-kernels")["cpu_kernels"] == load_library().isa
    assert facts["dtype"] == "float32" and {"duetto", "jax", "jaxlib"} <= set(facts["versions"])
    assert facts["rates"]["flops16"] == {"measured": 1e12, "vendor": None}
    assert not any(advice["is_fault"] for advice in facts["advice"])
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "none: they are for NVIDIA GPUs" in text and "bandwidth    20 GB/s\n" in text + "\n"


def test_a_kernel_that_did_not_pass_is_a_fault(capsys, monkeypatch: pytest.MonkeyPatch):
    """One that a rule refuses is none."""
    monkeypatch.setattr(doctor, "check_kernels", lambda *_, is_anew: REFUSED if is_anew else {})
    facts = found(capsys)
    assert facts["code"] == 1 and set(facts["kernels"]) == set(REFUSED)
    assert [x["text"].split()[0] for x in facts["advice"] if x["is_fault"]] == ["attention_decode"]
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "attention_decode 6/2 heads: not used: it lies" in text
    assert "attention_prefill 6/2 heads: used; off by 1.0e-03 of the largest number" in text


def test_a_hanging_kernel_is_reported_and_nothing_is_measured(capsys, monkeypatch: pytest.MonkeyPatch):
    hung = {
        "attention_decode 6/2 heads": KernelCheck("attention_decode", f"{HUNG_REASON} 300 s", None, 301.0)
    }
    monkeypatch.setattr(doctor, "check_kernels", lambda *_, is_anew: hung)
    monkeypatch.setattr(targets, "measure_peaks", lambda: pytest.fail("it would never end"))
    facts = found(capsys)
    assert facts["code"] == 1 and facts["rates"] == {} and set(facts["kernels"]) == set(hung)
    assert main(["doctor"]) == 1
    assert "not used: did not end within 300 s" in capsys.readouterr().out


def test_a_gpu_that_jax_does_not_use_is_a_fault(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "exists_in_dev", lambda files: True)
    facts = found(capsys)
    (fault,) = (x["text"] for x in facts["advice"] if x["is_fault"])
    assert facts["code"] == 1 and "jax does not use it" in fault


def test_programs_that_are_not_kept_cost_each_start(capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(executable_cache, "program_folder", lambda: None)
    facts = found(capsys)
    assert facts["code"] == 0 and any("each start compiles" in x["text"] for x in facts["advice"])


def planned(dtype: str, **options: Any) -> EnginePlan:
    return plan_engine(None, "135m", dtype, EngineOptions(max_model_len=64, **options), local_target(), None)


@pytest.mark.parametrize(
    "kind, dtype, fraction, seats, words",
    [
        ("t4", "bfloat16", "0.95", 64, ["--dtype float16 is faster than bfloat16"]),
        ("t4", "float16", "0.95", 8, ["max_num_seqs is 8"]),
        ("l4", "float32", "0.5", 64, ["--dtype bfloat16", "XLA_CLIENT_MEM_FRACTION=0.5", "8 bits"]),
        ("h200", "bfloat16", "0.95", 64, ["8 bits"]),
    ],
)
def test_advice_names_what_makes_a_gpu_faster(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, fraction: str, seats: int, words: list[str]
):
    monkeypatch.setattr(doctor, "find_spec", lambda name: object())
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", fraction)
    plan = planned(dtype, max_num_seqs=seats)
    with traced_for(kind):
        texts = [advice.text for advice in doctor.gpu_advice(targets.CHIPS[kind].gpu, plan)]
    assert len(texts) == len(words) and all(map(str.__contains__, texts, words))


def test_rates_far_below_the_vendors_are_named():
    h100 = GPUS["h100"]
    slow = replace(h100, bandwidth=h100.bandwidth / 4)
    (advice,) = doctor.rate_advice(slow, h100)
    assert "memory reach 25%" in advice.text and not advice.is_fault
    assert list(doctor.rate_advice(h100, h100)) == list(doctor.rate_advice(MEASURED, None)) == []


def test_a_gpu_is_described_in_json():
    client = SimpleNamespace(platform_version="cuda 12090")
    device = SimpleNamespace(
        device_kind="NVIDIA H200", platform="gpu", client=client, memory_stats=lambda: {"bytes_limit": 1}
    )
    facts = doctor.describe_machine(replace(local_target(), devices=(device,)))
    assert json.loads(json.dumps(facts))["xla_options"] and facts["capability"] == "9.0"
