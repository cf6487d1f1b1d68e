"""`duetto plan --workload`: an answer for people and for machines, and command lines that start what it
names."""

import json
import shlex
from pathlib import Path

import pytest

from duetto.serve.cli import main, parse
from duetto.serve.commands.command import engine_options

ASKED = ["plan", "--workload", "40,200,20", "--target", "h200", "--search-seconds", "0.1"]


def test_an_answer_names_engines_that_start(capsys):
    limits = ["--ttft", "0.5", "--tpot", "0.02", "--share", "0.9", "--price-per-hour", "3"]
    assert main([*ASKED, *limits, "--acceptance", "0.7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["answers"][0]
    assert best["bears"] > 0 and best["replicas"] >= 1 and best["price"] > best["price_full"] > 0
    assert best["seen"]["ttft"]["p50"] > 0 and best["seen"]["given_up"] is False
    for answer in found["answers"]:
        words = shlex.split(answer["commands"][0])
        assert words[0] == "duetto"
        options = engine_options(parse(words[1:]))
        assert f"{options.max_num_seqs} seats" in answer["name"]
    assert found["limits"] == {"ttft": 0.5, "tpot": 0.02, "share": 0.9}


def test_an_answer_is_told_and_drawn(capsys, tmp_path: Path):
    picture, trace = tmp_path / "frontier.svg", tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 200, "output_length": 30}\n' * 3)
    asked = ["plan", "--workload", str(trace), "--target", "h200", "--tpot", "0.02"]
    assert main([*asked, "--search-seconds", "0.1", "--plot", str(picture)]) == 0
    told = capsys.readouterr().out
    assert "3 requests, inf a second: prompts of 200 tokens" in told
    assert "one replica on 1 device bears" in told and "duetto serve --max-model-len 256" in told
    assert "nothing is measured" in told and picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "flags, error",
    [
        (["--ttft", "0"], "--ttft 0.0 is not allowed: above 0"),
        (["--share", "2"], "--share 2.0 is not allowed"),
        (["--acceptance", "2"], "--acceptance 2.0 is not allowed"),
        (["--efficiency", "1.2,1"], "--efficiency 1.2,1 is not allowed"),
        (["--target", "a100"], "target 'a100' is unknown"),
        (["--target", "3xh200", "--workload", "nowhere.csv"], "nowhere.csv: No such file"),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys, flags, error):
    try:
        assert main([*ASKED, *flags]) == 1
    except SystemExit as end:
        assert end.code == 2
    assert error in capsys.readouterr().err
