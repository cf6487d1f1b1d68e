"""Programs kept on disk: a second start finds them, and nothing else is taken for them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from suite.fixtures import Model

from duetto import LLM, SamplingParams
from duetto.model.gpus import Gpu
from duetto.serve.host import identity
from duetto.serve.runtime.compiled import executable_cache, lowering
from duetto.serve.runtime.compiled.lowering import LocalLowering
from duetto.serve.runtime.compiled.program_table import ProgramTable
from duetto.serve.runtime.compiled.shapes import Shape, Sizes
from duetto.serve.runtime.compiled.small_programs import SmallPrograms
from duetto.serve.runtime.equal_bits import classes
from duetto.serve.runtime.steps.phases import TargetOnly

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
OPTIONS = {"max_num_seqs": 8, "max_prefill_tokens": 64, "max_model_len": 96}
pytestmark = pytest.mark.usefixtures("own_programs")


class Start(NamedTuple):
    folder: Path
    tokens: list[int]


@contextmanager
def settings_kept() -> Iterator[None]:
    """While this is entered, starts may set jax's cache."""
    names = "jax_compilation_cache_dir", "jax_compilation_cache_max_size"
    before = {name: jax.config.values[name] for name in names}
    try:
        yield
    finally:
        compilation_cache.reset_cache()
        for name, value in before.items():
            jax.config.update(name, value)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with settings_kept():
        yield tmp_path


@pytest.fixture(scope="module")
def first(one_layer: Model, own_programs: None, tmp_path_factory: pytest.TempPathFactory) -> Start:
    """A first start, whose folder each test copies."""
    place = tmp_path_factory.mktemp("first")
    with settings_kept():
        return Start(place, tokens(one_layer, place))


def tokens(model: Model, folder: Path) -> list[int]:
    with LLM.from_params(model.config, model.params, compilation_cache=str(folder), **OPTIONS) as llm:
        return list(llm.generate([[5, 6, 7]], GREEDY)[0].outputs[0].token_ids)


def fails(*args, **kwargs):
    raise AssertionError("this was kept")


def test_a_second_start_neither_lowers_nor_probes(one_layer, first, folder, monkeypatch):
    shutil.copytree(first.folder, folder, dirs_exist_ok=True)
    kept_files = list((folder / "duetto").iterdir())
    assert len(kept_files) == 7  # prefill[1,64], [2,32], decode[8,1], sample[8], classes, cost, checksums
    monkeypatch.setattr(LocalLowering, "lower", fails)
    monkeypatch.setattr(classes, "probe_classes", fails)
    assert tokens(one_layer, folder) == first.tokens


def test_programs_of_prompts_are_compiled_when_asked_and_kept(one_layer, first, folder, monkeypatch):
    shutil.copytree(first.folder, folder, dirs_exist_ok=True)
    assert tokens(one_layer, folder) == first.tokens
    for phase in ("forward", "decode"):
        monkeypatch.setattr(TargetOnly, phase, fails)
    expected = scores_and_embedding(one_layer, folder)
    monkeypatch.setattr(LocalLowering, "lower", fails)
    assert scores_and_embedding(one_layer, folder) == expected


def scores_and_embedding(model: Model, folder: Path) -> tuple[list[float], list[float]]:
    """Each takes one program more."""
    with LLM.from_params(model.config, model.params, compilation_cache=str(folder), **OPTIONS) as llm:
        programs = llm.report()["programs"]
        scored = llm.generate([[5, 6, 7]], replace(GREEDY, prompt_logprobs=0))[0].prompt_logprobs
        assert llm.report()["programs"] == programs + 1
        embedded = llm.embed([[5, 6, 7]])[0].outputs.embedding
        report = llm.report()
        assert report["programs"] == programs + 2 and report["compilations"] == 0
        assert scored is not None
        return [x.logprob for at in scored[1:] for x in at.values()], list(embedded)


@pytest.mark.full
def test_other_parameters_are_probed_again(one_layer, first, folder, monkeypatch):
    shutil.copytree(first.folder, folder, dirs_exist_ok=True)
    monkeypatch.setattr(classes, "probe_classes", fails)
    other = jax.tree.map(lambda x: x * 2, one_layer.params)
    with pytest.raises(AssertionError, match="kept"):
        LLM.from_params(one_layer.config, other, compilation_cache=str(folder), **OPTIONS)


def test_edited_code_of_a_package_makes_other_programs(tmp_path):
    (tmp_path / "room").mkdir()
    (file := tmp_path / "room" / "step.py").write_text("x = 1")
    before = identity.hash_sources([tmp_path])
    file.write_text("x = 2")
    assert identity.hash_sources([tmp_path]) != before


@pytest.mark.full
def test_damaged_files_are_made_anew(one_layer, first, folder):
    shutil.copytree(first.folder, folder, dirs_exist_ok=True)
    for file in (folder / "duetto").iterdir():
        file.write_bytes(file.read_bytes()[:-100])
    assert tokens(one_layer, folder) == first.tokens
    assert tokens(one_layer, folder) == first.tokens


@pytest.mark.full
def test_a_folder_that_cannot_be_written_keeps_nothing(one_layer, first, folder):
    (folder / "duetto").write_text("in the way")
    assert tokens(one_layer, folder) == tokens(one_layer, folder) == first.tokens


def test_a_key_follows_from_step_config_shapes_flags_and_source(tiny, monkeypatch):
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def key(phase: str = "decode", size: int = 8, dtype=jnp.float32, config=tiny.config) -> str | None:
        arguments = {"x": jax.ShapeDtypeStruct((size,), dtype, sharding=here)}
        return executable_cache.executable_key(TargetOnly(config), phase, arguments)

    plain = key()
    assert plain == key()
    found = [
        plain,
        key("prefill"),
        key(size=9),
        key(dtype=jnp.bfloat16),
        key(config=replace(tiny.config, vocab_size=7)),
    ]
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    found.append(key())
    monkeypatch.setattr(identity, "imported_sources_hash", lambda: "edited")
    found.append(key())
    assert len(set(found)) == len(found)


@pytest.fixture
def seats(monkeypatch: pytest.MonkeyPatch) -> Sizes:
    """Sizes of an engine whose programs are none, as on an H200."""
    small = SmallPrograms(*[SimpleNamespace(compile=dict)] * 5)
    monkeypatch.setattr(lowering, "gpu_from_device", lambda device: Gpu("NVIDIA H200", (9, 0)))
    monkeypatch.setattr(LocalLowering, "lower", lambda *_: None)
    monkeypatch.setattr(LocalLowering, "lower_small", lambda self: small)
    return Sizes(max_model_len=64, max_num_seqs=128, pages=(16,), page_size=64)


def test_steps_of_the_contract_are_compiled_and_stored_by_themselves(tiny, seats, monkeypatch):
    """On a GPU, where their products must not be split."""
    given = []
    monkeypatch.setattr(
        executable_cache, "compile_and_store", lambda *key_and_options: given.append(key_and_options)
    )
    shapes = [Shape("decode", rows, 1) for rows in (64, 128)]
    local = LocalLowering.from_params(TargetOnly(tiny.config), tiny.params, seats)
    for reproducible in (False, True):
        ProgramTable(local, shapes, reproducible=reproducible)
    keys = {(key, "TRITON" in str(options)) for key, _, options in given}
    assert len(given) == 4 and len(keys) == 3 and sum(has_triton_alone for _, has_triton_alone in keys) == 1


def test_steps_that_cannot_do_without_cublas_use_it(tiny, seats, monkeypatch, caplog):
    def compile(key, lowered, options):
        if "TRITON" in str(options):
            raise jax.errors.JaxRuntimeError("NOT_FOUND: no backend")
        return "with cuBLAS"

    monkeypatch.setattr(executable_cache, "compile_and_store", compile)
    shape = Shape("decode", 128, 1)
    local = LocalLowering.from_params(TargetOnly(tiny.config), tiny.params, seats)
    made = ProgramTable(local, [shape], reproducible=True)
    assert made.steps == {shape: "with cuBLAS"}
    assert "decode[128,1] may have bits of its own" in caplog.text


def test_phases_of_code_that_is_not_hashed_have_no_key(tiny):
    @dataclass(frozen=True)
    class Foreign(TargetOnly):
        """Of a module that `TRACED_MODULES` does not name."""

    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arguments = [jax.ShapeDtypeStruct((1,), jnp.float32, sharding=device)]
    assert executable_cache.executable_key(TargetOnly(tiny.config), "decode", arguments) is not None
    assert executable_cache.executable_key(Foreign(tiny.config), "decode", arguments) is None


def test_programs_of_code_edited_after_import_are_not_stored(folder, monkeypatch):
    jax.config.update("jax_compilation_cache_dir", str(folder))
    executable_cache.compile_and_store("same", jax.jit(lambda x: 2 * x).lower(jnp.ones(3)))
    monkeypatch.setattr(identity, "hash_traced_sources", lambda: "edited")
    executable_cache.compile_and_store("edited", jax.jit(lambda x: 3 * x).lower(jnp.ones(3)))
    assert executable_cache.read_entry("same") and not executable_cache.read_entry("edited")


def test_nothing_is_kept_without_a_cache(folder):
    jax.config.update("jax_compilation_cache_dir", None)
    assert executable_cache.program_folder() is None
    executable_cache.write_record("key", 1)
    assert executable_cache.read_record("key", int) is None
    assert executable_cache.combine_keys(["a", None]) is None
