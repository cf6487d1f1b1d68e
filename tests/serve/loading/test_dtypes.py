"""What "auto" computes in: the checkpoint's dtype on accelerators, on a CPU what it multiplies fast without a
loss."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
from conftest import Model

from duetto import LLM
from duetto.checkpoints import huggingface
from duetto.serve.commands.convert import convert
from duetto.serve.commands.planning import plan_job
from duetto.serve.host import devices, progress
from duetto.serve.loading.dtype import compute_dtype
from duetto.serve.loading.folder import DEMO, load_folder
from duetto.serve.options.engine import EngineOptions
from duetto.serve.roofline.targets import here

CPU: Any = SimpleNamespace(platform="cpu")
AMX = "flags : fpu avx512_bf16 amx_bf16 amx_tile"
ARM = "Features : fp asimd bf16"


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch):
    return lambda flags: monkeypatch.setattr(devices, "processor", lambda: flags)


def folder_in(tiny: Model, place: Path, dtype: str) -> Path:
    huggingface.save(place, tiny.config, tiny.params, dtype)
    return place


@pytest.mark.parametrize(
    ("flags", "stored", "expected"),
    [
        (AMX, "bfloat16", "bfloat16"),
        (AMX, "float16", "float32"),
        (AMX, "float32", "float32"),
        ("flags : fpu avx512_bf16", "bfloat16", "float32"),
        (ARM, "bfloat16", "float32"),
        ("", "bfloat16", "float32"),
    ],
)
def test_a_cpu_keeps_a_checkpoints_bfloat16_where_it_multiplies_that(
    tiny: Model, tmp_path: Path, processor, flags: str, stored: str, expected: str
):
    processor(flags)
    folder = folder_in(tiny, tmp_path, stored)
    assert compute_dtype("auto", CPU, folder) == expected
    assert compute_dtype("auto", SimpleNamespace(platform="gpu"), folder) == "auto"
    assert [compute_dtype(name, CPU, folder) for name in ("float32", "float16")] == ["float32", "float16"]
    assert load_folder(folder, "auto")[1].embed.dtype == expected


def test_the_stored_weights_decide_where_the_configuration_does_not(tiny: Model, tmp_path: Path, processor):
    processor(AMX)
    file = folder_in(tiny, tmp_path, "bfloat16") / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({name: x for name, x in fields.items() if name != "torch_dtype"}))
    assert compute_dtype("auto", CPU, tmp_path) == jnp.bfloat16


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_a_converted_folder_has_the_dtype_that_it_was_converted_to(tmp_path: Path, processor, stored: str):
    processor(AMX)
    convert(DEMO, tmp_path / "there", dtype=stored)
    assert compute_dtype("auto", CPU, tmp_path / "there") == stored


def test_the_choice_is_told_and_only_where_it_is_one(processor, capfd, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 600.0)
    load_folder(DEMO, "auto")
    processor(AMX)
    load_folder(DEMO, "bfloat16")
    with progress.telling(False):
        load_folder(DEMO, "auto")
    assert capfd.readouterr().err == ""
    load_folder(DEMO, "auto")
    assert capfd.readouterr().err.startswith("duetto: computing in bfloat16, ")


def test_a_plan_and_a_report_say_what_a_start_chooses(processor):
    processor(AMX)
    options = EngineOptions(max_num_seqs=2, max_model_len=64)
    assert plan_job(None, "135m", "auto", options, here(), None).dtype == "bfloat16"
    assert plan_job(str(DEMO), None, "auto", options, here(), None).dtype == "bfloat16"
    with LLM(max_num_seqs=2, max_model_len=64, max_prefill_tokens=16, reproducible=False) as llm:
        assert llm.report()["dtype"] == "bfloat16"
