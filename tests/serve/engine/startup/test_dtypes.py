"""What "auto" computes in: the checkpoint's dtype on accelerators, on a CPU what it multiplies fast without a
loss."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases.gpus import traced_for
from cases.requests import SIZES
from fakes.greedy import greedy_programs
from suite.fixtures import ROOT, Model

from duetto import LLM, SamplingParams
from duetto.checkpoints import huggingface
from duetto.checkpoints.huggingface import read_config
from duetto.model.config import ModelConfig
from duetto.serve.cli.convert import convert
from duetto.serve.engine.startup import dtype, trial
from duetto.serve.engine.startup.dtype import compute_dtype
from duetto.serve.engine.startup.folder import load_folder
from duetto.serve.host import progress
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.planning import plan_job
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.targets import here
from duetto.serve.runtime.compiled import executable_cache

WRITE = executable_cache.write
CPU: Any = SimpleNamespace(platform="cpu")
H200, T4 = (SimpleNamespace(platform="gpu", device_kind=kind) for kind in ("NVIDIA H200", "Tesla T4"))
DRAFT = ROOT / "checkpoints" / "demo-draft"  # the smallest there is
FAST = 1.5  # times as many products a second in bfloat16
SMALL = ModelConfig.uniform(50, 32, 48, 2, 4, 2, 8, 64)


@pytest.fixture
def gain(monkeypatch: pytest.MonkeyPatch):
    """Sets what is measured of this machine's products."""
    return lambda found: monkeypatch.setattr(dtype, "bfloat16_gain", lambda *_: found)


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[trial.Layers]]:
    """A process that has measured nothing yet; gives what is measured."""
    seen: list[trial.Layers] = []
    monkeypatch.setattr(trial, "measured", lambda _, layers: seen.append(layers) or 1.0 + len(seen) / 8)
    trial.known_gain.cache_clear()
    yield seen
    trial.known_gain.cache_clear()


def folder_in(tiny: Model, place: Path, dtype: str) -> Path:
    huggingface.save(place, tiny.config, tiny.params, dtype)
    return place


@pytest.mark.parametrize(
    ("times", "stored", "expected"),
    [
        (FAST, "bfloat16", "bfloat16"),
        (FAST, "float16", "float32"),
        (FAST, "float32", "float32"),
        (1.05, "bfloat16", "float32"),  # nearly as fast: float32 loses nothing
        (0.5, "bfloat16", "float32"),
    ],
)
def test_a_cpu_keeps_a_checkpoints_bfloat16_where_it_multiplies_that_faster(
    tiny: Model, tmp_path: Path, gain, times: float, stored: str, expected: str
):
    gain(times)
    folder, config = folder_in(tiny, tmp_path, stored), tiny.config
    assert compute_dtype("auto", CPU, config, folder) == expected
    assert compute_dtype("auto", H200, config, folder) == "auto"
    named = [compute_dtype(name, CPU, config, folder) for name in ("float32", "float16")]
    assert named == ["float32", "float16"]
    assert load_folder(folder, "auto")[1].embed.dtype == expected


@pytest.mark.parametrize(
    ("stored", "expected"), [("bfloat16", "float16"), ("float16", "auto"), ("float32", "auto")]
)
def test_a_t4_computes_in_float16_what_is_stored_in_bfloat16(
    tiny: Model, tmp_path: Path, stored: str, expected: str
):
    folder = folder_in(tiny, tmp_path, stored)
    assert compute_dtype("auto", T4, tiny.config, folder) == expected
    assert compute_dtype("bfloat16", T4, tiny.config, folder) == jnp.bfloat16
    assert compute_dtype("auto", T4, SMALL) == jnp.float16  # random weights


def test_a_model_that_overflows_float16_is_told_to_take_float32():
    gemma = replace(SMALL, embedding_scale=SMALL.hidden_size**0.5)
    with pytest.raises(ValueError, match='"auto" is not allowed on Tesla T4: .* use "float32"'):
        compute_dtype("auto", T4, gemma)
    assert compute_dtype("float32", T4, gemma) == jnp.float32
    assert compute_dtype("auto", H200, gemma) == "auto"


def test_a_cache_in_e4m3_is_refused_by_name_where_it_cannot_be_converted():
    a100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100-SXM4-80GB")
    for kept in ("fp8", "fp8_e4m3"):
        with pytest.raises(ValueError, match=f'"{kept}" is not allowed: .* has 8.0; use "int8"'):
            dtype.check_cache(EngineOptions(kv_cache_dtype=kept), a100)
        dtype.check_cache(EngineOptions(kv_cache_dtype=kept), H200)
        dtype.check_cache(EngineOptions(kv_cache_dtype=kept), CPU)
    for kept in ("auto", "int8", "fp8_e5m2"):
        dtype.check_cache(EngineOptions(kv_cache_dtype=kept), a100)


def test_the_choices_of_a_t4_run(few_shapes):
    """No kernel, float16: a model answers as in float32, but for ties."""
    config = read_config(DRAFT)
    chosen = compute_dtype("auto", T4, config, DRAFT)
    prompts = ["The quick brown fox", "Once upon a time"]
    params = SamplingParams(temperature=0.0, max_tokens=8)
    with (
        traced_for("t4"),
        greedy_programs(),
        LLM(DRAFT, dtype=chosen, **SIZES, background_compilation=False) as llm,
    ):
        found = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        report = llm.report()
    assert report["dtype"] == "float16"
    assert {check["reason"] for check in report["kernels"].values()} == {
        "it needs compute capability 8.0, Tesla T4 has 7.5"
    }
    with LLM(DRAFT, dtype="float32", **SIZES) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    assert [tokens[:4] for tokens in found] == [tokens[:4] for tokens in expected]


def test_the_stored_weights_decide_where_the_configuration_does_not(tiny: Model, tmp_path: Path, gain):
    gain(FAST)
    file = folder_in(tiny, tmp_path, "bfloat16") / "config.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({name: x for name, x in fields.items() if name != "torch_dtype"}))
    assert compute_dtype("auto", CPU, tiny.config, tmp_path) == jnp.bfloat16


@pytest.mark.parametrize("stored", ["bfloat16", "float32"])
def test_a_converted_folder_has_the_dtype_that_it_was_converted_to(tmp_path: Path, gain, stored: str):
    gain(FAST)
    convert(DRAFT, tmp_path / "there", dtype=stored)
    assert compute_dtype("auto", CPU, SMALL, tmp_path / "there") == stored


def test_the_choice_is_told_and_only_where_it_is_one(gain, capfd, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE", 600.0)
    load_folder(DRAFT, "auto")
    gain(FAST)
    load_folder(DRAFT, "bfloat16")
    with progress.telling(False):
        load_folder(DRAFT, "auto")
    assert capfd.readouterr().err == ""
    load_folder(DRAFT, "auto")
    assert capfd.readouterr().err.startswith("duetto: computing in bfloat16, ")


@greedy_programs()
def test_a_plan_and_a_report_say_what_a_start_chooses(gain, few_shapes):
    gain(FAST)
    options = EngineOptions(max_num_seqs=2, max_model_len=64)
    assert plan_job(None, "135m", "auto", options, here(), None).dtype == "bfloat16"
    assert plan_job(str(DRAFT), None, "auto", options, here(), None).dtype == "bfloat16"
    with LLM(DRAFT, **SIZES) as llm:
        assert llm.report()["dtype"] == "bfloat16"


def test_a_machine_is_measured_once(anew, monkeypatch, tmp_path):
    """Later starts find what the first one has kept; another machine, or another shape, is measured anew."""
    monkeypatch.setattr(executable_cache, "folder", lambda: tmp_path)
    device = jax.local_devices()[0]
    first = trial.bfloat16_gain(device, SMALL)
    trial.known_gain.cache_clear()  # as in another process
    assert trial.bfloat16_gain(device, SMALL) == first == 1.125 and len(anew) == 1
    assert trial.bfloat16_gain(device, PRESETS["135m"]) == 1.25
    trial.known_gain.cache_clear()
    monkeypatch.setattr(executable_cache, "cores", lambda: 97)
    assert trial.bfloat16_gain(device, SMALL) == 1.375


def test_a_process_keeps_to_one_choice_where_nothing_can_be_stored(anew, monkeypatch):
    monkeypatch.setattr(executable_cache, "folder", lambda: None)
    device = jax.local_devices()[0]
    assert trial.bfloat16_gain(device, SMALL) == trial.bfloat16_gain(device, SMALL) == 1.125


def test_a_choice_that_another_process_has_kept_first_counts(anew, monkeypatch, tmp_path):
    monkeypatch.setattr(executable_cache, "folder", lambda: tmp_path)
    monkeypatch.setattr(executable_cache, "write", lambda key, _: WRITE(key, 3.5))
    assert trial.bfloat16_gain(jax.local_devices()[0], SMALL) == 3.5


def test_what_is_measured_has_a_models_width_and_fits_in_memory():
    for config in PRESETS.values():
        layers = trial.Layers.of(config)
        assert layers.width == config.hidden_size and 0 < layers.number <= len(config.layers)
        assert 0 < 2 * layers.width * layers.inner * layers.number <= trial.MOST


def test_products_are_timed(monkeypatch):
    monkeypatch.setattr(trial, "LONGEST", trial.LEAST)
    assert trial.measured(jax.local_devices()[0], trial.Layers.of(SMALL)) > 0
