"""`duetto plan --workload`: an answer for people and for machines, and command lines that start what it
names."""

import json
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from duetto.serve.cli.common import parse_engine_options
from duetto.serve.cli.main import main, parse_command_line
from duetto.serve.cli.plan_workload import plan_report
from duetto.serve.planner.simulation.search import CandidateResult, search_candidates

GUESSES = '{"method": "ngram", "num_speculative_tokens": 2}'
ASKED = ["plan", "--workload", "40,200,20", "--target", "h200", "--search-seconds", "0.1"]


def test_an_answer_names_engines_that_start(capsys):
    limits = ["--ttft", "0.5", "--tpot", "0.02", "--share", "0.9", "--price-per-hour", "3"]
    assert main([*ASKED, *limits, "--acceptance", "0.7", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["answers"][0]
    assert best["bears"] > 0 and best["replicas"] >= 1 and best["price"] > best["price_full"] > 0
    assert best["seen"]["ttft"]["p50"] > 0 and best["seen"]["given_up"] is False
    for own in found["answers"]:
        words = shlex.split(own["commands"][0])
        assert words[0] == "duetto"
        options = parse_engine_options(parse_command_line(words[1:]))
        assert f"{options.max_num_seqs} seats" in own["name"]
    assert found["limits"] == {"ttft": 0.5, "tpot": 0.02, "share": 0.9}


def test_an_answer_is_printed_and_plotted(capsys, tmp_path: Path):
    picture, trace = tmp_path / "frontier.svg", tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 200, "output_length": 30}\n' * 3)
    asked = ["plan", "--workload", str(trace), "--target", "h200", "--tpot", "0.02"]
    assert main([*asked, "--search-seconds", "0.1", "--plot", str(picture)]) == 0
    told = capsys.readouterr().out
    assert "3 requests, all there at once: prompts of 200 tokens" in told
    assert "one replica on 1 device bears" in told and "duetto serve --max-model-len 256" in told
    assert "nothing is measured" in told and picture.read_text().startswith("<?xml")


@pytest.mark.parametrize(
    "flags, error",
    [
        (["--ttft", "0"], "--ttft 0.0 is not allowed: above 0"),
        (["--share", "2"], "--share 2.0 is not allowed"),
        (["--acceptance", "2"], "--acceptance 2.0 is not allowed"),
        (["--efficiency", "1.2,1"], "--efficiency 1.2,1 is not allowed"),
        (["--price-per-hour", "nan"], "--price-per-hour nan is not allowed: above 0"),
        (["--workload", "5,0,10"], "--workload 5,0,10 is not allowed: a file that is there, or"),
        (["--speed", "1e-320"], "--speed 1e-320 is not allowed: requests do not come"),
        (["--plot", "/nowhere/x.svg"], "--plot /nowhere/x.svg is not allowed: no file can be written"),
        (["--plot", "x.jsonl"], "--plot x.jsonl is not allowed: its ending is one of"),
        (["--context", "5"], "--context is not allowed with --workload"),
        (["--kv-role", "both"], "kv_role 'both' is not allowed with --workload"),
        (["--speculative-config", GUESSES], "not allowed with --workload without --acceptance"),
        (["--shape", "8b", "--model", "x"], "--model x is not allowed with --shape 8b"),
        (["--target", "0xh200"], "target '0xh200' is unknown"),
        (["--target", "a10"], "target 'a10' is unknown"),
        (["--target", "3xh200", "--workload", "nowhere.csv"], "nowhere.csv: No such file"),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys, flags, error):
    try:
        assert main([*ASKED, *flags]) == 1
    except SystemExit as end:
        assert end.code == 2
    assert error in capsys.readouterr().err


def test_flags_of_a_workload_are_refused_without_one(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--ttft", "1", "--compile", "none"])
    assert "--ttft is not allowed without --workload" in capsys.readouterr().err


def test_what_is_given_stays_and_is_in_the_command(capsys):
    given = ["--shape", "8b", "--target", "4xh200", "--tensor-parallel-size", "2", "--max-num-seqs", "8"]
    assert main([*ASKED, *given, "--dtype", "float16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [own["name"] for own in (*found["answers"], *found["estimated"])]
    assert names and all(name.startswith("TP2, ") and ", 8 seats" in name for name in names)
    assert "--dtype float16" in found["answers"][0]["commands"][0]
    assert not {"TP2 PP1 DP1", "TP2 PP2 DP1"} & found["refused"].keys()


def test_unmet_limits_name_the_nearest_candidate(capsys):
    assert main([*ASKED, "--shape", "135m", "--tpot", "1e-6"]) == 0
    told = capsys.readouterr().out
    assert "bears n" in told and "; its bound is time between tokens" in told
    assert "0.0% of those looked at are in time" in told and "first token p50" in told


@pytest.fixture
def ctrl_c():
    """Python's own handler, whatever tests before this one have left."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_ends_the_search_and_prints_results(capsys, monkeypatch):
    def interrupted(*args: Any) -> list[CandidateResult]:
        found = search_candidates(*args)
        signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(plan_report, "search_candidates", interrupted)
    assert main([*ASKED, "--shape", "135m", "--ttft", "1"]) == 130
    told = capsys.readouterr()
    assert "what was found by then" in told.out and "requests/s" in told.out
    assert "interrupted" in told.err and "without the limit" not in told.out
