"""What makes a batch another job: whatever decides its answers, and nothing else."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from cases import processors
from fakes.batch import MODEL, report_of

from duetto.cpu_kernels.library import KernelLibrary
from duetto.serve.cli.batch import decide_dtype
from duetto.serve.cli.main import main
from duetto.serve.engine.startup import cpu_kernels, dtype
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER
from duetto.serve.host import devices, identity
from duetto.serve.jobs.batch import fingerprint as module
from duetto.serve.jobs.batch.fingerprint import IGNORED_OPTIONS, hash_folder, job_fingerprint
from duetto.serve.jobs.batch.job import BatchOptions
from duetto.serve.jobs.batch.lines import has_grammar_field
from duetto.serve.jobs.batch.run import options_fingerprint
from duetto.serve.options.engine import EngineOptions


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((DEMO_FOLDER / "config.json").read_bytes())
    (folder / "model.safetensors").write_bytes(b"\0" * 100)
    return folder


def changed(model: Path, monkeypatch, change, **options) -> set[str]:
    """The fields that differ after a change."""
    options = EngineOptions(**options)
    before = job_fingerprint(model, None, "auto", options)
    change()
    after = job_fingerprint(model, None, "auto", options)
    return {name for name in {**before, **after} if before.get(name) != after.get(name)}


def test_the_same_job_has_the_same_fingerprint(model):
    options = EngineOptions(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    found = job_fingerprint(model, None, "auto", options)
    assert found == job_fingerprint(model, None, "auto", options)
    assert all(type(x) is str for x in [*found, *found.values()])
    assert {"model", "device", "runtime", "cores", "processor", "jax", "jaxlib", "tokenizers"} <= found.keys()
    assert "seed" not in found and "--seed" not in found


def test_the_machine_counts(model, monkeypatch):
    change = lambda: monkeypatch.setattr(identity, "num_cores", lambda: 97)
    assert changed(model, monkeypatch, change) == {"cores"}
    other = SimpleNamespace(
        device_kind="NVIDIA H100", platform="gpu", client=SimpleNamespace(platform_version="cuda 1")
    )
    replaced = changed(
        model, monkeypatch, lambda: monkeypatch.setattr(module, "default_device", lambda: other)
    )
    assert replaced == {"device", "runtime", "cores", "processor"}, "of a GPU's host nothing counts"


def test_the_processor_counts_by_its_name_and_its_instructions(monkeypatch):
    before = devices.processor_name()
    monkeypatch.setattr(devices, "processor_flags", lambda: "flags: avx99")
    assert devices.processor_name.__wrapped__() != before


@pytest.mark.parametrize("name", identity.COMPILER_VARIABLES)
def test_the_compilers_settings_count(model, monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    assert changed(model, monkeypatch, lambda: monkeypatch.setenv(name, "")) == set()
    assert changed(model, monkeypatch, lambda: monkeypatch.setenv(name, "--x=1")) == {name}


@pytest.mark.parametrize("package", ["jax", "jaxlib", "tokenizers", "jinja2"])
def test_versions_count(model, monkeypatch, package):
    version = identity.installed_version
    newer = lambda name: "99.0" if name == package else version(name)
    change = lambda: monkeypatch.setattr(identity, "installed_version", newer)
    assert changed(model, monkeypatch, change) == {package}


def test_the_draft_models_content_counts_and_not_its_name(model, monkeypatch, tmp_path):
    draft, moved = tmp_path / "draft", tmp_path / "moved"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"1")
    config = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    change = lambda: (draft / "model.safetensors").write_bytes(b"2")
    assert changed(model, monkeypatch, change, speculative_config=config) == {"draft"}
    before = job_fingerprint(model, None, "auto", EngineOptions(speculative_config=config))
    draft.rename(moved)
    config = {**config, "model": str(moved)}
    assert job_fingerprint(model, None, "auto", EngineOptions(speculative_config=config)) == before
    config = {**config, "num_speculative_tokens": 2}
    after = job_fingerprint(model, None, "auto", EngineOptions(speculative_config=config))
    assert json.loads(after["--speculative-config"])["num_speculative_tokens"] == 2


@pytest.mark.parametrize("name", ["params/d/data", "params/_METADATA", "duetto.json"])
def test_an_orbax_folder_counts_with_all_its_files(model, monkeypatch, name):
    (model / "params" / "d").mkdir(parents=True)
    for file in ("params/d/data", "params/_METADATA", "duetto.json"):
        (model / file).write_text("1")
    assert changed(model, monkeypatch, lambda: (model / name).write_text("2")) == {"model"}
    before = hash_folder(model)
    (model / name).rename((model / name).with_name("renamed.json"))
    assert hash_folder(model) != before


def test_files_that_make_no_model_do_not_count(model, monkeypatch):
    (model / "original").mkdir()
    (model / "original" / "model.safetensors").write_bytes(b"1")
    change = lambda: (model / "original" / "model.safetensors").write_bytes(b"2")
    assert changed(model, monkeypatch, change) == set()


def test_acceptance_by_rejection_is_refused_in_a_batch(tmp_path, capsys):
    """Which tokens it draws depends on how far guesses reach, and that on what else runs."""
    (tmp_path / "in").write_text('{"prompt": "a"}\n')
    config = '{"method": "ngram", "acceptance": "rejection"}'
    with pytest.raises(SystemExit) as ended:
        main(["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--speculative-config", config])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "acceptance=rejection is not allowed in a batch" in said
    assert not (tmp_path / "out").exists() and sys.stdout is not None


def test_the_dtype_that_auto_chooses_on_this_machine_counts(monkeypatch):
    """On Ray the actors' machines choose, and their answers name it."""
    args, options = ARGS, EngineOptions()
    chosen = []
    for gain in (1.0, 2.0):
        monkeypatch.setattr(dtype, "bfloat16_gain", lambda *_, gain=gain: gain)
        chosen.append(decide_dtype(args, DEMO_FOLDER, options)[0])
    assert chosen == ["float32", "bfloat16"]
    assert decide_dtype(SimpleNamespace(**vars(args) | {"ray": 2}), DEMO_FOLDER, options) == ("auto", options)
    assert (
        decide_dtype(SimpleNamespace(**vars(args) | {"dtype": "half"}), DEMO_FOLDER, options)[0] == "float16"
    )


def test_the_kernels_that_this_machine_uses_count(model, monkeypatch):
    for module_of_kernels in (module, cpu_kernels):
        monkeypatch.setattr(module_of_kernels, "load_library", lambda: KernelLibrary(("avx2",)))
    monkeypatch.setattr(cpu_kernels, "build_missing_library", lambda: None)
    _, plain = decide_dtype(ARGS, DEMO_FOLDER, EngineOptions(cpu_kernels=False))
    monkeypatch.setattr(cpu_kernels, "is_optimisation_off", lambda: False)
    monkeypatch.setattr(cpu_kernels, "explain_default_without_kernels", lambda *_: "")
    _, own = decide_dtype(ARGS, DEMO_FOLDER, EngineOptions(cpu_kernels=None))
    before, after = (job_fingerprint(model, None, "float32", options) for options in (plain, own))
    differing = {name for name in {**before, **after} if before.get(name) != after.get(name)}
    assert differing == {"--cpu-kernels", "CPU kernels"} and "avx2" in after["CPU kernels"]


ARGS = SimpleNamespace(ray=None, dtype="auto", compilation_cache="none", quiet=True)


def test_what_a_logits_processor_computes_counts(model, monkeypatch):
    """A number of another module, which the function's own file does not show."""
    asked = {"logits_processors": ["cases.processors:ban_at_first"]}
    assert changed(model, monkeypatch, lambda: None, **asked) == set()
    other = lambda: monkeypatch.setattr(processors.example.jnp, "inf", 7.0)
    assert changed(model, monkeypatch, other, **asked) == {"logits_processors"}


def documented() -> tuple[set[str], set[str]]:
    """Names in the page's table of fields, and its flags that are in none."""
    page = (Path(__file__).parents[4] / "docs" / "batch.md").read_text(encoding="utf-8")
    section = page.partition("## Resuming a job")[2].partition("\n## ")[0]
    table = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    left_out = next(line for line in section.splitlines() if line.startswith("These flags"))
    return {name for cell in table for name in re.findall("`([^`]+)`", cell)}, {
        *re.findall("`([^`]+)`", left_out)
    }


def test_the_page_lists_every_field(model, monkeypatch, tmp_path):
    for name in identity.COMPILER_VARIABLES:
        monkeypatch.setenv(name, "--x=1")
    for name in identity.RARE_JAX_SETTINGS:
        monkeypatch.setitem(identity.RARE_JAX_SETTINGS, name, "other than it is")
    monkeypatch.setattr(identity, "installed_version", lambda package: "1.0")
    (tmp_path / "draft").mkdir()
    own = {"method": "draft_model", "model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    options = EngineOptions(
        speculative_config=own,
        lora_modules=[f"NAME={model}"],
        enable_lora=True,
        logits_processors=["cases.processors:ban_at_first"],
    )
    found = {"input", *options_fingerprint(BatchOptions()), *job_fingerprint(model, model, "auto", options)}
    fields, left_out = documented()
    flags = {name for name in found if name.startswith("--")}
    assert fields == {"--dtype", "--speculative-config", "--NAME"} | (found - flags)
    hidden = {f"--{name.replace('_', '-')}" for name in IGNORED_OPTIONS}
    known = {"--seed", "--lora-modules", "--speculative-config", "--logits-processors"}  # under other names
    assert left_out == hidden - known and not left_out & flags


@pytest.mark.parametrize(
    ("line", "constrains"),
    [
        ('{"prompt": "a"}', False),
        ('{"prompt": "a", "structured_outputs": {"choice": ["a"]}}', True),
        ('{"body": {"response_format": {"type": "json_object"}}}', True),
        (
            '{"body": {"response_format": {"type": "text"}, "tool_choice": "auto", "guided_json": null}}',
            False,
        ),
        ('{"body": {"tool_choice": "required"}}', True),
        ('{"body": {"tool_choice": {"type": "function", "function": {"name": "f"}}}}', True),
        (json.dumps({"prompt": '"response_format": {"type": "json_object"}'}), False),
    ],
)
def test_lines_that_constrain_their_output(line, constrains):
    assert has_grammar_field(line.encode()) is constrains


@pytest.mark.parametrize("constrained", [False, True])
def test_llguidance_counts_where_a_line_needs_it(run, constrained):
    line = {"prompt": "a"} | (
        {"guided_json": None, "structured_outputs": {"choice": ["a"]}} if constrained else {}
    )
    versions = {"without": {}, "with": {"llguidance": "1.0"}}
    outs = [run([line], name=name, model=MODEL | own).out for name, own in versions.items()]
    before, after = (report_of(out)["fingerprint"] for out in outs)
    assert (before != after) == constrained
