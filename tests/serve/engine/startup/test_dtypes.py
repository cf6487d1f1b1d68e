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
from cases.families.reading import config_of
from cases.gpus import traced_for
from cases.requests import SIZES
from fakes.greedy import greedy_programs
from suite.fixtures import ROOT, Model

from duetto import LLM, SamplingParams
from duetto.checkpoints import huggingface
from duetto.checkpoints.families import FAMILIES
from duetto.checkpoints.huggingface import read_config
from duetto.model.config import ModelConfig
from duetto.serve.cli.convert import convert_model
from duetto.serve.engine.startup import bfloat16_gain, dtype
from duetto.serve.engine.startup.dtype import compute_dtype, may_overflow_float16
from duetto.serve.engine.startup.model_folder import load_folder
from duetto.serve.host import identity, progress
from duetto.serve.options.engine import EngineOptions
from duetto.serve.planner.engine_plan import plan_engine
from duetto.serve.planner.roofline.presets import PRESETS
from duetto.serve.planner.roofline.targets import local_target
from duetto.serve.runtime.compiled import executable_cache

WRITE = executable_cache.write_record
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
def anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bfloat16_gain.TrialLayers]]:
    """A process that has measured nothing yet; gives what is measured."""
    seen: list[bfloat16_gain.TrialLayers] = []
    monkeypatch.setattr(
        bfloat16_gain, "measure_gain", lambda _, layers: seen.append(layers) or 1.0 + len(seen) / 8
    )
    bfloat16_gain.load_or_measure_gain.cache_clear()
    yield seen
    bfloat16_gain.load_or_measure_gain.cache_clear()


def folder_in(tiny: Model, place: Path, dtype: str) -> Path:
    huggingface.save_hf(place, tiny.config, tiny.params, dtype)
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
def test_a_cpu_keeps_bfloat16_where_it_multiplies_faster(
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


def test_families_that_overflow_float16_are_served_in_bfloat16(tiny: Model, tmp_path: Path):
    """The list of vLLM: Gemma 2 and 3, GLM-4-0414; and those whose layers are theirs."""
    families = {name for name in FAMILIES if may_overflow_float16(config_of(name))}
    theirs = {"gemma4_text", "glm4v_text", "afmoe", "kolibri1"}
    assert families == {"gemma2", "gemma3_text", "glm4"} | theirs
    config, folder = replace(tiny.config, post_norms=True), folder_in(tiny, tmp_path, "float16")
    for name in ("float16", "half", jnp.float16):
        with pytest.raises(ValueError, match='"float16" is not allowed: .* use "bfloat16" or "float32"'):
            compute_dtype(name, CPU, config, folder)
    assert compute_dtype("float16", H200, tiny.config, folder) == jnp.float16
    assert compute_dtype("auto", H200, config, folder) == jnp.bfloat16
    assert compute_dtype("auto", H200, config) == "auto"
    with pytest.raises(ValueError, match='"auto" is not allowed on Tesla T4: .* use "float32"'):
        compute_dtype("auto", T4, config, folder)


def test_e4m3_caches_are_refused_on_gpus_without_conversion():
    a100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA A100-SXM4-80GB")
    for kept in ("fp8", "fp8_e4m3"):
        with pytest.raises(ValueError, match=f'"{kept}" is not allowed: .* has 8.0; use "int8"'):
            dtype.check_kv_cache_dtype(EngineOptions(kv_cache_dtype=kept), a100)
        dtype.check_kv_cache_dtype(EngineOptions(kv_cache_dtype=kept), H200)
        dtype.check_kv_cache_dtype(EngineOptions(kv_cache_dtype=kept), CPU)
    for kept in ("auto", "int8", "fp8_e5m2"):
        dtype.check_kv_cache_dtype(EngineOptions(kv_cache_dtype=kept), a100)


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
def test_a_converted_folder_keeps_its_dtype(tmp_path: Path, gain, stored: str):
    gain(FAST)
    convert_model(DRAFT, tmp_path / "there", dtype=stored)
    assert compute_dtype("auto", CPU, SMALL, tmp_path / "there") == stored


def test_the_chosen_dtype_is_logged_only_if_not_given(gain, capfd, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 600.0)
    load_folder(DRAFT, "auto")
    gain(FAST)
    load_folder(DRAFT, "bfloat16")
    with progress.progress_enabled(False):
        load_folder(DRAFT, "auto")
    assert capfd.readouterr().err == ""
    load_folder(DRAFT, "auto")
    assert capfd.readouterr().err.startswith("duetto: computing in bfloat16, ")


@greedy_programs()
def test_a_plan_and_a_report_say_what_a_start_chooses(gain, few_shapes):
    gain(FAST)
    options = EngineOptions(max_num_seqs=2, max_model_len=64)
    assert plan_engine(None, "135m", "auto", options, local_target(), None).dtype == "bfloat16"
    assert plan_engine(str(DRAFT), None, "auto", options, local_target(), None).dtype == "bfloat16"
    with LLM(DRAFT, **SIZES) as llm:
        assert llm.report()["dtype"] == "bfloat16"


def test_a_machine_is_measured_once(anew, monkeypatch, tmp_path):
    """Later starts find what the first one has kept; another machine, or another shape, is measured anew."""
    monkeypatch.setattr(executable_cache, "program_folder", lambda: tmp_path)
    device = jax.local_devices()[0]
    first = bfloat16_gain.bfloat16_gain(device, SMALL)
    bfloat16_gain.load_or_measure_gain.cache_clear()  # as in another process
    assert bfloat16_gain.bfloat16_gain(device, SMALL) == first == 1.125 and len(anew) == 1
    assert bfloat16_gain.bfloat16_gain(device, PRESETS["135m"]) == 1.25
    bfloat16_gain.load_or_measure_gain.cache_clear()
    monkeypatch.setattr(identity, "num_cores", lambda: 97)
    assert bfloat16_gain.bfloat16_gain(device, SMALL) == 1.375


def test_a_process_chooses_once_where_nothing_can_be_stored(anew, monkeypatch):
    monkeypatch.setattr(executable_cache, "program_folder", lambda: None)
    device = jax.local_devices()[0]
    assert bfloat16_gain.bfloat16_gain(device, SMALL) == bfloat16_gain.bfloat16_gain(device, SMALL) == 1.125


def test_a_choice_that_another_process_has_kept_first_counts(anew, monkeypatch, tmp_path):
    monkeypatch.setattr(executable_cache, "program_folder", lambda: tmp_path)
    monkeypatch.setattr(executable_cache, "write_record", lambda key, _: WRITE(key, 3.5))
    assert bfloat16_gain.bfloat16_gain(jax.local_devices()[0], SMALL) == 3.5


def test_measured_layers_have_the_models_width_and_fit_memory():
    for config in PRESETS.values():
        layers = bfloat16_gain.TrialLayers.from_config(config)
        assert layers.width == config.hidden_size and 0 < layers.number <= len(config.layers)
        assert 0 < 2 * layers.width * layers.inner * layers.number <= bfloat16_gain.MAX_WEIGHT_NUMBERS


def test_products_are_timed(monkeypatch):
    monkeypatch.setattr(bfloat16_gain, "MAX_TRIAL_SECONDS", bfloat16_gain.MIN_TRIAL_SECONDS)
    assert (
        bfloat16_gain.measure_gain(jax.local_devices()[0], bfloat16_gain.TrialLayers.from_config(SMALL)) > 0
    )
