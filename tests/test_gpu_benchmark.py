"""The benchmark of a GPU is rehearsed from start to end where there is none, and writes no measured figure
there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from suite.fixtures import ROOT

from benchmarks.gpu.__main__ import PARTS, main

SCRIPT = ROOT / "benchmarks" / "gpu.sh"
PEERS = {"peers"}  # in a process of their own, where Transformers is installed


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = os.environ | {"PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run([SCRIPT, *arguments], check=False, capture_output=True, text=True, env=own)


def figures(folder: Path) -> dict[str, Any]:
    (file,) = folder.glob("*.json")
    assert file.name.endswith("-gpu-dry.json")
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a rehearsal, and what it printed."""
    folder = tmp_path_factory.mktemp("rehearsed")
    ran = run("--dry", str(folder))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder, ran.stdout


@pytest.mark.full
def test_every_part_is_rehearsed_behind_doctor(rehearsed: tuple[Path, str]):
    folder, told = rehearsed
    found = figures(folder)
    assert found["about"]["dry"] is True
    assert {row["part"] for row in found["rows"]} - PEERS == set(PARTS) - PEERS - {"reference", "steps"}
    assert "device" in told.partition("TFLOP/s")[0], "doctor speaks first"
    checks = {row["what"]: row["value"] for row in found["rows"] if row["part"] == "checks"}
    assert checks["requests alone and together: tokens and log-probabilities"] == 1.0


@pytest.mark.full
def test_a_part_stands_alone_and_joins_the_figures(rehearsed: tuple[Path, str]):
    folder, _ = rehearsed
    before = figures(folder)["rows"]
    ran = run("--dry", str(folder), PARTS="prefill")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = figures(folder)["rows"]
    assert rows[: len(before)] == before
    assert {row["part"] for row in rows[len(before) :]} == {"prefill"}


@pytest.mark.full
def test_the_script_ends_where_nothing_is_measured(tmp_path: Path):
    ran = run(str(tmp_path))
    assert ran.returncode == 2 and "is no NVIDIA GPU: nothing is measured" in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("kept", "flags", "said"),
    [
        ('{"about": {"dry": true}, "rows": []}', [], "is no NVIDIA GPU: nothing is measured"),
        ('{"about": {}, "rows": []}', ["--dry"], "the file has measured figures"),
    ],
    ids=["without a GPU", "dry figures"],
)
def test_what_is_no_measurement_is_not_written(
    tmp_path: Path, monkeypatch, capsys, kept: str, flags: list[str], said: str
):
    """Neither anew, nor into a file of measured figures."""
    (file := tmp_path / "figures.json").write_text(kept)
    monkeypatch.setattr(sys, "argv", ["gpu", str(file), *flags, "--parts", "steps"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert said in capsys.readouterr().err
    assert file.read_text() == kept and list(tmp_path.iterdir()) == [file]
