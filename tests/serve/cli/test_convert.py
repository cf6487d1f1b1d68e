"""Folders written by `duetto convert`: the same numbers and tokens, on one device or several; which targets
it takes."""

import json
import shutil

import jax
import jax.numpy as jnp
import pytest
from cases.compare import same_params, same_tensors
from cases.families.golden import case_folder
from cases.requests import SIZES
from fakes.processes import Forked, script
from suite.marks import full, full_if

from duetto import LLM, SamplingParams
from duetto.checkpoints import huggingface, orbax
from duetto.checkpoints.families import FAMILIES
from duetto.checkpoints.folders import atomic_folder, list_files
from duetto.model.weights.compression.compress import CompressionPlan, compress, quantize_params
from duetto.serve.cli.convert import convert_model
from duetto.serve.cli.main import main

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def test_converting_and_converting_back_keeps_all_bits(source, converted, tmp_path):
    config, params = huggingface.load_hf(source)
    read, restored = orbax.load_orbax(converted)
    assert read == config and same_params(params, restored)
    back = tmp_path / "back"
    assert main(["convert", str(converted), str(back), "--format", "huggingface"]) == 0
    assert same_tensors(source, back)
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE.txt"):
        assert (converted / name).read_bytes() == (back / name).read_bytes() == (source / name).read_bytes()


@full_if(lambda name: not name.startswith(("llama", "gpt2", "deepseek_v3")))
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_converted_and_converted_back(name, tmp_path):
    (source := tmp_path / "source").mkdir()
    case_folder(name, source)
    convert_model(source, tmp_path / "a")
    convert_model(tmp_path / "a", tmp_path / "b", "huggingface")
    family, _, _ = huggingface.read_family_config(source)
    if family.alternative_names:  # its files store some parameters under either of two names
        assert same_params(*(huggingface.load_hf(folder)[1] for folder in (source, tmp_path / "b")))
    else:
        assert same_tensors(source, tmp_path / "b")


@pytest.mark.full
def test_a_converted_folder_is_served_like_its_source(few_shapes, source, converted):
    with LLM(converted, **SIZES) as llm:
        assert same_params(llm.params, huggingface.load_hf(source, "float32")[1])
        assert llm.config == huggingface.read_config(source)
        assert llm.tokenizer.eos_token == "<|end|>" or len(llm.tokenizer) > 256
        answer = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0]
        assert len(answer.token_ids) == 12


def test_a_dtype_casts_both_when_loading_and_when_saving(source, converted, tmp_path):
    _, params = huggingface.load_hf(source)
    _, wide = orbax.load_orbax(converted, "float32")
    assert same_params(wide, jax.tree.map(lambda x: x.astype(jnp.float32), params))
    convert_model(source, tmp_path / "wide", dtype="float32")
    assert same_params(orbax.load_orbax(tmp_path / "wide")[1], wide)
    convert_model(tmp_path / "wide", tmp_path / "hub", "huggingface", "bfloat16")
    assert same_tensors(source, tmp_path / "hub")


@pytest.mark.parametrize("scheme", [full("int8"), "int4", full("fp8")])
def test_quantised_weights_are_kept_as_they_are(source, tmp_path, scheme):
    _, params = huggingface.load_hf(source)
    convert_model(source, tmp_path / scheme, quantization=scheme)
    _, restored = orbax.load_orbax(tmp_path / scheme)
    assert same_params(restored, quantize_params(params, scheme))
    assert jax.tree.structure(restored) == jax.tree.structure(quantize_params(params, scheme))
    with pytest.raises(
        ValueError, match=f"parameter layers.0.attention.q is {scheme}: only orbax folders hold"
    ):
        convert_model(tmp_path / scheme, tmp_path / "hub", "huggingface")
    assert not (tmp_path / "hub").exists() and not list(tmp_path.glob("*partial*"))


def test_factored_weights_are_kept_too(source, tmp_path):
    _, params = huggingface.load_hf(source)
    thin = compress(params, CompressionPlan((("layers.*.ffn.*", 0.5),)))
    with atomic_folder(tmp_path / "thin") as folder:
        shutil.copy(source / "config.json", folder)
        orbax.save_orbax(folder, thin)
    restored = orbax.load_orbax(tmp_path / "thin")[1]
    assert same_params(restored, thin) and jax.tree.structure(restored) == jax.tree.structure(thin)


def test_anyone_can_read_the_parameters_with_orbax(converted):
    from orbax.checkpoint import v1 as ocp

    tree = ocp.metadata(str(converted / "params")).metadata
    assert tree["layers"]["0"]["attention"]["q"].shape == (48, 6, 8)


def test_an_existing_folder_is_refused_unless_it_is_empty(source, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        assert main(["convert", str(source), str(tmp_path / name)]) == 1
        assert "exists already, expected a new name or an empty folder" in capsys.readouterr().err
    assert list_files(tmp_path) == ["file", "full/notes"]
    (tmp_path / "empty").mkdir()
    convert_model(source, tmp_path / "empty")
    assert orbax.load_orbax(tmp_path / "empty")[0].num_layers == 2


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("", "is the working directory"),
        (".", "is the working directory"),
        ("file/new", "file/new: no folder can be made there"),
        ("nowhere", "nowhere: is a link to nothing"),
    ],
)
def test_an_invalid_target_is_named(source, tmp_path, monkeypatch, capsys, target, said):
    monkeypatch.chdir(tmp_path)
    if target == "file/new":
        (tmp_path / "file").write_text("mine")
    if target == "nowhere":
        (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    assert main(["convert", str(source), target]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


def test_a_folder_of_licences_is_left_where_it_is(source, tmp_path):
    beside = shutil.copytree(source, tmp_path / "beside")
    (beside / "LICENSES").mkdir()
    convert_model(beside, tmp_path / "new")
    assert not (tmp_path / "new" / "LICENSES").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--dtype", "int8"], "dtype 'int8' is not allowed"),
        (["--quantization", "int3"], "quantization is 'int3', expected one of int8, int4, fp8"),
    ],
)
def test_wrong_flags_are_one_sentence(source, tmp_path, capsys, flags, said):
    assert main(["convert", str(source), str(tmp_path / "new"), *flags]) == 1
    assert said in capsys.readouterr().err
    assert list_files(tmp_path) == []


def test_a_source_that_is_none_leaves_nothing(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "new")]) == 1
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert list_files(tmp_path) == []


def test_a_failure_while_writing_leaves_nothing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(orbax, "MANIFEST", "no/such/folder")
    with pytest.raises(OSError):
        convert_model(source, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


TWO = """
import sys, jax, numpy as np
from pathlib import Path
from jax.sharding import Mesh
from duetto.checkpoints import huggingface, orbax
from duetto.model.sharding import make_sharding, make_shardings
from duetto.model.transformer import decoder_spec
from duetto.model.layers import Norm
from duetto.model.tree import leaves_by_path
_, source, folder = sys.argv
mesh = Mesh(np.array(jax.devices()), ("tensor",))
config, whole = huggingface.load(source)
placed = make_shardings(decoder_spec(config), mesh)
for load, at in ((huggingface.load, source), (orbax.load, folder)):
    spread = load(at, shardings=placed)[1]
    for path, leaf in leaves_by_path(spread).items():
        jax.block_until_ready(leaf)
        assert leaf.sharding == leaves_by_path(placed)[path], path
        assert np.array_equal(np.asarray(leaf), np.asarray(leaves_by_path(whole)[path])), path
leaves = leaves_by_path(spread).items()
split = [p for p, x in leaves if len(x.sharding.device_set) == 2 and not x.is_fully_replicated]
assert {"embed", "layers.0.attention.q", "layers.1.ffn.down"} <= set(split), split
print(len(split))
"""


def test_each_device_gets_its_part(source, converted, tmp_path):
    (program := tmp_path / "two.py").write_text(TWO)
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    process = Forked(script, str(program), str(source), str(converted), more=flags)
    told, errors = process.communicate(1200)
    assert process.wait() == 0, errors
    assert int(told) >= 2 + 2 * 7 - 1
