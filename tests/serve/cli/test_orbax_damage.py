"""Folders of `duetto convert` are whole or not there: what is damaged in one is named in a sentence."""

import dataclasses
import json
import re
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from cases.compare import same_params
from fakes.processes import Forked, script

from duetto import LLM
from duetto.checkpoints import huggingface, orbax
from duetto.checkpoints.folders import copy_description, list_files
from duetto.checkpoints.tensors import CheckpointError
from duetto.model.layers import Norm
from duetto.model.tree import map_by_path
from duetto.model.weights.compression.compress import quantize_params
from duetto.serve.engine.startup.model_folder import read_model

LIMIT = 600.0  # seconds


def written(folder: Path, text: str) -> str:
    """The path of a program."""
    (folder / "program.py").write_text(text)
    return str(folder / "program.py")


def test_each_missing_or_cut_file_is_named(converted, tmp_path):
    listed = [f for f in list_files(converted) if f != "duetto.json"]
    assert len([f for f in listed if f.startswith("params/")]) > 5
    for name in listed:
        broken = tmp_path / "broken"
        shutil.copytree(converted, broken)
        (broken / name).unlink()
        with pytest.raises(CheckpointError, match=rf"broken: file '{name}' is missing$"):
            orbax.load_orbax(broken)
        if name.startswith("params/") and (size := (converted / name).stat().st_size):
            (broken / name).write_bytes((converted / name).read_bytes()[: size // 2])
            with pytest.raises(
                CheckpointError, match=rf"file '{name}' has {size // 2} bytes, expected {size}$"
            ):
                orbax.load_orbax(broken)
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
from duetto.checkpoints.tensors import CheckpointError
try:
    orbax.load(sys.argv[1])
except CheckpointError as error:
    sys.exit(print(error) or 1)
"""


@pytest.mark.parametrize("name", ["_METADATA", "manifest.ocdbt"])
def test_damaged_contents_are_one_sentence(converted, tmp_path, name):
    broken = shutil.copytree(converted, tmp_path / "broken")
    file = broken / "params" / "state" / name
    file.write_bytes(bytes(file.stat().st_size))
    # in its own process: Orbax closes its event loop on the first error, and reads that end later write to
    # stderr at any time
    process = Forked(script, written(tmp_path, LOAD), str(broken))
    said, errors = process.communicate(LIMIT)
    assert process.wait() == 1
    assert re.search(r"params: Orbax cannot read it \(", said), errors


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
        (
            {"layers.0.attention.q": {"type": "Quantised", "scheme": "int3", "packed": -1}},
            "layers.0.attention.q has scheme 'int3', expected one of int8, int4, fp8",
        ),
        ({"nope": {"type": "LowRank"}}, "nope is no parameter of the model that config.json describes"),
    ],
)
def test_records_that_are_none_are_named(converted, tmp_path, records, said):
    broken = shutil.copytree(converted, tmp_path / "broken")
    manifest = json.loads((broken / "duetto.json").read_text())
    (broken / "duetto.json").write_text(json.dumps(manifest | {"records": records}))
    for read in (orbax.load_orbax, orbax.read_orbax_specs):
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
        orbax.load_orbax(other)
    (other / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match=r"layers.2.\S+ has shape None, config.json says \("):
        orbax.load_orbax(other)


WRITER = """
import os, signal, sys
from duetto.serve.cli.convert import convert_model
source, target, event, end = sys.argv[1:]

def stop(name, arguments):
    if name == event and ".partial-" in str(arguments[0]) and str(arguments[0]).endswith(end % os.getpid()):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(stop)
convert_model(source, target)
"""
# What the writer is about to do, to a path that ends so, and whether its folder is complete by then.
MOMENTS = [
    ("open", ".partial-%d/config.json", False),
    ("os.rename", "params.orbax-checkpoint-tmp%.0s", False),
    ("open", ".partial-%d/duetto.json", False),
    ("os.rename", ".partial-%d", True),
]


def test_a_killed_writer_leaves_whole_folders_or_none(source, tmp_path):
    params, program = huggingface.load_hf(source)[1], written(tmp_path, WRITER)
    for attempt, (event, end, whole) in enumerate(MOMENTS):
        target = tmp_path / str(attempt) / "new"
        target.parent.mkdir()
        writer = Forked(script, program, str(source), str(target), event, end, heard=[])
        assert writer.wait(LIMIT) == -signal.SIGKILL
        (found,) = target.parent.iterdir()
        assert found.name.startswith("new.partial-")
        if whole:
            assert same_params(orbax.load_orbax(found)[1], params)
        else:
            with pytest.raises(CheckpointError):
                read_model(found, "auto", jax.devices()[0])


def test_codes_without_scales_are_refused(source, tmp_path):
    params = quantize_params(huggingface.load_hf(source)[1], "int8")
    copy_description(source, tmp_path)
    damaged = map_by_path(
        params, (), lambda path, x: x.at[0, 3].set(0) if path == "layers.1.ffn.up.scales" else x
    )
    orbax.save_orbax(tmp_path, damaged)
    with pytest.raises(CheckpointError, match="params: parameter layers.1.ffn.up has scales of 0 beside"):
        orbax.load_orbax(tmp_path)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_numbers_that_are_not_finite_are_refused(source, tmp_path, value):
    params = huggingface.load_hf(source)[1]
    copy_description(source, tmp_path)
    gain = params.norm.gain.at[3].set(value)
    orbax.save_orbax(tmp_path, dataclasses.replace(params, norm=Norm(gain)))
    with pytest.raises(
        CheckpointError, match=f"params: parameter norm.gain holds NaN or infinity as {gain.dtype}"
    ):
        orbax.load_orbax(tmp_path)
