"""Command lines of long runs, which refuse what would fail or do nothing after them."""

import json

import pytest

from benchmarks.chaos import __main__ as chaos
from benchmarks.soak import __main__ as soak

ZERO = [
    ["--minutes", "0"],
    ["--minutes", "-1"],
    ["--minutes", "nan"],
    ["--minutes", "inf"],
    ["--output", "/"],
]


@pytest.mark.parametrize(
    "words",
    [
        *ZERO,
        ["--seeds", "0"],
        ["--seeds", "1.5"],
        ["--workers", "0"],
        ["--first", "-1"],
        ["--first", "3", "--output", "figures.json"],
        ["--output", "no/such/folder.json"],
        ["--plant", "nothing"],
    ],
)
def test_the_simulation_refuses(words, capsys):
    with pytest.raises(SystemExit) as raised:
        chaos.parser().parse_args(words)
    assert raised.value.code == 2 and words[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        *ZERO,
        ["--kill-every", "0"],
        ["--requests", "0"],
        ["--clients", "0"],
        ["--think", "-1"],
        ["--seed", "-1"],
        ["--replay", "nothing.jsonl"],
        ["--folder", "/"],
    ],
)
def test_the_soak_refuses(words, capsys):
    with pytest.raises(SystemExit) as raised:
        soak.parser().parse_args(words)
    assert raised.value.code == 2 and words[0] in capsys.readouterr().err


@pytest.mark.parametrize("text", ["no JSON", "{}", "[]", json.dumps({"seeds": {}, "faults": {}})])
def test_the_simulation_adds_to_no_file_of_other_figures(text, tmp_path, monkeypatch):
    file = tmp_path / "figures.json"
    file.write_text(text)
    with pytest.raises(SystemExit):
        chaos.earlier(chaos.parser(), file)
    assert file.read_text() == text


def test_a_run_has_a_folder_of_its_own(tmp_path):
    given = ["--folder", str(tmp_path), "--output", str(tmp_path / "soak.json"), "--think", "0"]
    assert soak.parser().parse_args(given).folder == tmp_path
    (tmp_path / "models").mkdir()
    with pytest.raises(SystemExit):
        soak.parser().parse_args(given)
