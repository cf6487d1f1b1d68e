"""Folders written by `duetto convert`: the same numbers and tokens, whole or not there."""

import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.compare import same_tensors
from cases.families import case_folder

from duetto import LLM, SamplingParams
from duetto.checkpoints import huggingface, orbax
from duetto.checkpoints.families import FAMILIES
from duetto.checkpoints.folders import copy_description, files, fresh
from duetto.checkpoints.tensors import CheckpointError
from duetto.model.compress import CompressionPlan, compress, quantize_params
from duetto.model.layers import Norm
from duetto.model.tree import paths
from duetto.serve.cli import main
from duetto.serve.commands.convert import convert
from duetto.serve.loading.folder import read_folder

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "checkpoints" / "demo"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
PATH = os.environ | {"PYTHONPATH": str(ROOT / "src")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tiny) -> Path:
    """A Hugging Face folder of a small random model, in bfloat16, with the demo's tokenizer files beside
    it."""
    folder = tmp_path_factory.mktemp("model") / "hub"
    huggingface.save(folder, tiny.config, tiny.params, "bfloat16")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / name, folder)
    (folder / "LICENSE.txt").write_text("as you like")
    return folder


@pytest.fixture(scope="module")
def converted(source: Path) -> Path:
    assert main(["convert", str(source), str(source.parent / "orbax")]) == 0
    return source.parent / "orbax"


def equal(a, b) -> bool:
    a, b = paths(a), paths(b)
    return a.keys() == b.keys() and all(
        x.dtype == b[path].dtype and np.array_equal(np.asarray(x), np.asarray(b[path]))
        for path, x in a.items()
    )


# ---------------------------------------------------------------- what is converted


def test_there_and_back_every_tensor_has_the_same_bits(source, converted, tmp_path):
    config, params = huggingface.load(source)
    read, restored = orbax.load(converted)
    assert read == config and equal(params, restored)
    back = tmp_path / "back"
    assert main(["convert", str(converted), str(back), "--format", "huggingface"]) == 0
    assert same_tensors(source, back)
    assert json.loads((back / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "LICENSE.txt"):
        assert (converted / name).read_bytes() == (back / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_there_and_back(name, tmp_path):
    (source := tmp_path / "source").mkdir()
    case_folder(name, source)
    convert(source, tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b", "huggingface")
    assert same_tensors(source, tmp_path / "b")


def test_a_converted_folder_is_served_like_its_source(source, converted):
    with LLM(converted, max_model_len=32, max_num_seqs=1, max_prefill_tokens=16, reproducible=False) as llm:
        assert equal(llm.params, huggingface.load(source, "float32")[1])
        assert llm.config == huggingface.read_config(source)
        assert llm.tokenizer.eos_token == "<|end|>" or len(llm.tokenizer) > 256
        answer = llm.generate([[5, 6, 7]], GREEDY, use_tqdm=False)[0].outputs[0]
        assert len(answer.token_ids) == 12


def test_a_dtype_casts_on_the_way_in_and_on_the_way_out(source, converted, tmp_path):
    _, params = huggingface.load(source)
    _, wide = orbax.load(converted, "float32")
    assert equal(wide, jax.tree.map(lambda x: x.astype(jnp.float32), params))
    convert(source, tmp_path / "wide", dtype="float32")
    assert equal(orbax.load(tmp_path / "wide")[1], wide)
    convert(tmp_path / "wide", tmp_path / "hub", "huggingface", "bfloat16")
    assert same_tensors(source, tmp_path / "hub")


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8"])
def test_quantised_weights_are_kept_as_they_are(source, tmp_path, scheme):
    _, params = huggingface.load(source)
    convert(source, tmp_path / scheme, quantization=scheme)
    _, restored = orbax.load(tmp_path / scheme)
    assert equal(restored, quantize_params(params, scheme))
    assert jax.tree.structure(restored) == jax.tree.structure(quantize_params(params, scheme))
    with pytest.raises(
        ValueError, match=f"parameter layers.0.attention.q is {scheme}: only orbax folders hold"
    ):
        convert(tmp_path / scheme, tmp_path / "hub", "huggingface")
    assert not (tmp_path / "hub").exists() and not list(tmp_path.glob("*partial*"))


def test_factored_weights_are_kept_too(source, tmp_path):
    _, params = huggingface.load(source)
    thin = compress(params, CompressionPlan((("layers.*.ffn.*", 0.5),)))
    with fresh(tmp_path / "thin") as folder:
        shutil.copy(source / "config.json", folder)
        orbax.save(folder, thin)
    restored = orbax.load(tmp_path / "thin")[1]
    assert equal(restored, thin) and jax.tree.structure(restored) == jax.tree.structure(thin)


def test_anyone_can_read_the_parameters_with_orbax(converted):
    from orbax.checkpoint import v1 as ocp

    tree = ocp.metadata(str(converted / "params")).metadata
    assert tree["layers"]["0"]["attention"]["q"].shape == (48, 6, 8)


# ---------------------------------------------------------------- whole or not there


def test_an_existing_folder_is_refused_unless_it_is_empty(source, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        assert main(["convert", str(source), str(tmp_path / name)]) == 1
        assert "exists already, expected a new name or an empty folder" in capsys.readouterr().err
    assert files(tmp_path) == ["file", "full/notes"]
    (tmp_path / "empty").mkdir()
    convert(source, tmp_path / "empty")
    assert orbax.load(tmp_path / "empty")[0].num_layers == 2


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("", "is the working directory"),
        (".", "is the working directory"),
        ("file/new", "file/new: no folder can be made there"),
        ("nowhere", "nowhere: is a link to nothing"),
    ],
)
def test_a_target_that_cannot_be_is_named(source, tmp_path, monkeypatch, capsys, target, said):
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
    convert(beside, tmp_path / "new")
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
    assert files(tmp_path) == []


def test_a_source_that_is_none_leaves_nothing(tmp_path, capsys):
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "new")]) == 1
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert files(tmp_path) == []


def test_a_failure_while_writing_leaves_nothing(source, tmp_path, monkeypatch):
    monkeypatch.setattr(orbax, "MANIFEST", "no/such/folder")
    with pytest.raises(OSError):
        convert(source, tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def test_each_missing_or_cut_file_is_named(converted, tmp_path):
    listed = [f for f in files(converted) if f != "duetto.json"]
    assert len([f for f in listed if f.startswith("params/")]) > 5
    for name in listed:
        broken = tmp_path / "broken"
        shutil.copytree(converted, broken)
        (broken / name).unlink()
        with pytest.raises(CheckpointError, match=rf"broken: file '{name}' is missing$"):
            orbax.load(broken)
        if name.startswith("params/") and (size := (converted / name).stat().st_size):
            (broken / name).write_bytes((converted / name).read_bytes()[: size // 2])
            with pytest.raises(
                CheckpointError, match=rf"file '{name}' has {size // 2} bytes, expected {size}$"
            ):
                orbax.load(broken)
        shutil.rmtree(broken)


def test_a_checkpoint_that_was_never_finished_is_refused(converted, tmp_path):
    cut = shutil.copytree(converted, tmp_path / "cut")
    (cut / "duetto.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"cut: duetto.json is missing, so the checkpoint was never finished"
    ):
        LLM(cut)


LOAD = """
import sys
from duetto.checkpoints import orbax
orbax.load(sys.argv[1])
"""


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt"])
def test_damaged_contents_are_one_sentence(converted, tmp_path, name):
    broken = shutil.copytree(converted, tmp_path / "broken")
    file = broken / "params" / "state" / name
    file.write_bytes(bytes(file.stat().st_size))
    # in its own process: Orbax closes its event loop on the first error, and reads that end later warn at any
    # time
    command = [sys.executable, "-c", LOAD, str(broken)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=PATH)
    assert done.returncode == 1
    assert re.search(r"CheckpointError: .*params: Orbax cannot read it \(", done.stderr), done.stderr


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (
            {"layers.0.attention.q": {"type": "Foo"}},
            "layers.0.attention.q is {'type': 'Foo'}, expected a type of",
        ),
        ({"layers.0.attention.q": 5}, "layers.0.attention.q is 5, expected a type of Quantised, LowRank"),
        ({"layers.0.attention.q": {"type": "Quantised"}}, "is {'type': 'Quantised'}, expected"),
        ({"layers.0.attention.q": {"type": []}}, "is {'type': []}, expected"),
        ({"nope": {"type": "LowRank"}}, "nope is no parameter of the model that config.json describes"),
    ],
)
def test_records_that_are_none_are_named(converted, tmp_path, records, said):
    broken = shutil.copytree(converted, tmp_path / "broken")
    manifest = json.loads((broken / "duetto.json").read_text())
    (broken / "duetto.json").write_text(json.dumps(manifest | {"records": records}))
    for read in (orbax.load, orbax.read_specs):
        with pytest.raises(
            CheckpointError, match=re.escape("broken/duetto.json: records: ") + ".*" + re.escape(said)
        ):
            read(broken)


def test_parameters_of_another_model_are_named(converted, tmp_path):
    other = shutil.copytree(converted, tmp_path / "other")
    raw = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(raw | {"intermediate_size": 100}))
    with pytest.raises(
        CheckpointError, match=r"layers.0.ffn.gate has shape \(48, 96\), config.json says \(48, 100\)"
    ):
        orbax.load(other)
    (other / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"layers.2.\S+ has shape None, config.json says \("):
        orbax.load(other)


WRITER = """
import sys
from pathlib import Path
from duetto.serve.commands.convert import convert
source, folder = map(Path, sys.argv[1:])
convert(source, folder / "first")
print("ready", flush=True)
for i in range(1000):
    convert(source, folder / str(i))
"""


def test_a_writer_killed_at_any_moment_leaves_whole_folders_or_none(source, tmp_path):
    draw, (_, params), partial = random.Random(1), huggingface.load(source), 0
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        command = [sys.executable, "-c", WRITER, str(source), str(folder)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=PATH)
        assert writer.stdout.readline() == "ready\n"
        time.sleep(draw.uniform(0.1, 0.6))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        left = sorted(folder.iterdir())
        assert folder / "first" in left
        for found in left:
            whole = (
                ".partial-" not in found.name or (found / "duetto.json").exists()
            )  # killed before the renaming
            partial += not whole
            if whole:
                assert equal(orbax.load(found)[1], params)
            else:
                with pytest.raises(CheckpointError):
                    read_folder(found, "auto", jax.devices()[0])
    assert partial, "no writer was killed while it wrote"


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_numbers_that_are_not_finite_are_refused(source, tmp_path, value):
    params = huggingface.load(source)[1]
    copy_description(source, tmp_path)
    gain = params.norm.gain.at[3].set(value)
    orbax.save(tmp_path, dataclasses.replace(params, norm=Norm(gain)))
    with pytest.raises(
        CheckpointError, match=f"params: parameter norm.gain holds NaN or infinity as {gain.dtype}"
    ):
        orbax.load(tmp_path)


# ---------------------------------------------------------------- several devices

TWO = """
import sys, jax, numpy as np
from pathlib import Path
from jax.sharding import Mesh
from duetto.checkpoints import huggingface, orbax
from duetto.model.sharding import sharding, shardings
from duetto.model.transformer import decoder_spec
from duetto.model.layers import Norm
from duetto.model.tree import paths
source, folder = sys.argv[1:]
mesh = Mesh(np.array(jax.devices()), ("tensor",))
config, whole = huggingface.load(source)
placed = shardings(decoder_spec(config), mesh)
for load, at in ((huggingface.load, source), (orbax.load, folder)):
    spread = load(at, shardings=placed)[1]
    for path, leaf in paths(spread).items():
        jax.block_until_ready(leaf)
        assert leaf.sharding == paths(placed)[path], path
        assert np.array_equal(np.asarray(leaf), np.asarray(paths(whole)[path])), path
split = [p for p, x in paths(spread).items() if len(x.sharding.device_set) == 2 and not x.is_fully_replicated]
assert {"embed", "layers.0.attention.q", "layers.1.ffn.down"} <= set(split), split
print(len(split))
"""


def test_each_device_gets_its_part(source, converted):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", TWO, str(source), str(converted)],
        env=os.environ | flags, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 2 + 2 * 7 - 1
