"""The command line: flags follow the dataclasses, commands do what the Python API does, errors are one
sentence."""

import argparse
import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cases.requests import FLAGS, SIZES, SMALLEST

import duetto
from duetto import LLM, SamplingParams
from duetto.serve.cli import main as cli
from duetto.serve.cli import plan
from duetto.serve.cli.common import set_log_level
from duetto.serve.cli.main import main, parse_command_line
from duetto.serve.host import devices
from duetto.serve.jobs.batch.fingerprint import hash_folder
from duetto.serve.options.engine import EngineOptions
from duetto.serve.options.flags import add_field_flags, read_given_fields
from duetto.serve.planner.roofline.report import check_report_path, render_compilations, render_engine_report


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=1200, check=False
    )


# ---------------------------------------------------------------- flags


def test_every_field_has_a_flag_of_its_type():
    parser = argparse.ArgumentParser()
    add_field_flags(parser, SamplingParams, "sampling")
    line = [
        *("--n", "2", "--temperature", "0.5", "--seed", "none", "--max-tokens", "none", "--logprobs", "3"),
        *("--stop", "a", "--stop", "b c", "--stop-token-ids", "7", "--stop-token-ids", "8", "--ignore-eos"),
        *("--logit-bias", '{"5": -1.5}', "--no-detokenize", "--bad-words", "x", "--allowed-token-ids", "5"),
    ]
    line = [word for word in line if word not in ("--stop", "a", "b c")] + ["--include-stop-str-in-output"]
    params = SamplingParams(**read_given_fields(SamplingParams, parser.parse_args(line)))
    assert params == SamplingParams(
        n=2,
        temperature=0.5,
        max_tokens=None,
        logprobs=3,
        stop_token_ids=(7, 8),
        ignore_eos=True,
        logit_bias={5: -1.5},
        detokenize=False,
        bad_words=("x",),
        allowed_token_ids=(5,),
        include_stop_str_in_output=True,
    )
    stops = parser.parse_args(["--stop", "a", "--stop", "b c"])
    assert SamplingParams(**read_given_fields(SamplingParams, stops)).stop == ("a", "b c")
    helped = parser.format_help()
    assert all(
        f"--{f.name.replace('_', '-')}" in helped
        for f in dataclasses.fields(SamplingParams)
        if f.name != "output_kind"
    )


def test_what_is_not_given_stays_the_models_default():
    parser = argparse.ArgumentParser()
    add_field_flags(parser, EngineOptions, "engine")
    assert read_given_fields(EngineOptions, parser.parse_args([])) == {}
    assert read_given_fields(EngineOptions, parser.parse_args(["--no-reproducible"])) == {
        "reproducible": False
    }


@pytest.mark.parametrize(
    "line, said",
    [
        (["generate", "x", "--temperature", "-1"], "temperature=-1.0 is not allowed"),
        (["generate", "x", "--logit-bias", "[1]"], "invalid JSON object value"),
        (["generate", "x", "--logit-bias", '{"1": 2, "1": 3}'], "the key '1' is not allowed more than once"),
        (["generate", "x", "--max-num-seqs", "0"], "max_num_seqs 0 is not allowed"),
        (["generate", "x", "--top-k", "many"], "invalid int value: 'many'"),
        (["generate", "x", "--temp", "1"], "unrecognized arguments: --temp"),
        (["generate", "x", "--max-tokns", "5"], "usage: duetto generate PROMPT [flags]"),
        (["generate", "x", "--max-tokns", "5"], "--max-tokns 5; did you mean --max-tokens?"),
        (
            ["batch", "a", "b", "--no-progres"],
            "duetto batch: error: unrecognized arguments: --no-progres; did",
        ),
        (["generate", "x", "y"], "duetto generate: error: unrecognized arguments: y\n"),
        (["generate", "x", "--token-ids"], "--token-ids: the prompt lists token ids"),
        (["generate", "5", "--chat", "--token-ids"], "--token-ids: not allowed with argument --chat"),
        (["generate"], "required: prompt"),
        (["batch", "in", "out", "--top-p", "7"], "top_p=7.0 is not allowed"),
        (["batch", "in", "out", "--in-flight", "0"], "invalid positive integer value"),
        (["answer"], "invalid choice"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_usage_ends_with_2(line: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(line)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_help_does_not_wait_for_jax():
    code = (
        "import sys; from duetto.serve.cli import main as cli\n"
        "try: cli.main(['--help'])\n"
        "finally: assert 'jax' not in sys.modules"
    )
    done = python(code)
    assert done.returncode == 0 and all(name in done.stdout for name in cli.COMMANDS)


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"duetto {duetto.__version__}\n"


def test_public_names_are_found_at_their_first_use():
    aliases = {"AsyncLLMEngine": "AsyncLLM"}
    for name in duetto.__all__:
        assert getattr(getattr(duetto, name), "__name__", name) == aliases.get(name, name)
    assert set(duetto.__all__) <= set(dir(duetto))
    with pytest.raises(AttributeError, match="'Nothing'"):
        _ = duetto.Nothing
    done = python("import duetto, sys; assert 'jax' not in sys.modules; from duetto import SamplingParams")
    assert done.returncode == 0, done.stderr


# ---------------------------------------------------------------- commands


def test_generate_streams_what_the_api_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report = tmp_path / "report.json"
    line = [
        "generate",
        "def main(",
        "--temperature",
        "0",
        "--max-tokens",
        "12",
        "--report",
        str(report),
        *FLAGS,
    ]
    assert main(line) == 0
    shown = capsys.readouterr()
    with LLM(SMALLEST, **SIZES) as llm:
        params = dataclasses.replace(llm.get_default_sampling_params(), temperature=0.0, max_tokens=12)
        expected = llm.generate("def main(", params, use_tqdm=False)[0].outputs[0].text
    assert shown.out == expected + "\n"
    numbers = json.loads(report.read_text())
    assert numbers["generated_tokens"] == 12 and numbers["compilations"] == 0
    assert render_engine_report(numbers) in shown.err and "12 generated tokens" in shown.err


@pytest.mark.parametrize(
    ("command", "default"), [("generate", "the model's own, else 256"), ("batch", "16; in a")]
)
def test_the_help_says_one_default_of_max_tokens(command, default, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    helped = " ".join(capsys.readouterr().out.split())
    assert f"maximum generated tokens; null is up to the model's length (default: {default}" in helped
    assert "max-tokens is" not in helped


def test_a_prompt_may_be_token_ids(capsys: pytest.CaptureFixture[str]):
    assert (
        main(["generate", "5, 17 3", "--token-ids", "--max-tokens", "4", "--seed", "1", "--quiet", *FLAGS])
        == 0
    )
    shown = capsys.readouterr()
    with LLM(SMALLEST, **SIZES) as llm:
        params = dataclasses.replace(llm.get_default_sampling_params(), seed=1, max_tokens=4)
        expected = llm.generate([5, 17, 3], params, use_tqdm=False)[0].outputs[0].token_ids
    assert [int(word) for word in shown.out.split()] == expected and not shown.err


def test_a_platform_without_a_plugin_is_one_sentence(monkeypatch, capsys):
    def fails() -> None:
        raise AssertionError

    monkeypatch.setattr(devices.jax, "local_devices", fails)
    assert main(["generate", "x", "--quiet"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "install its plugin" in said and "duetto[cuda]" in said


def test_quiet_draws_no_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "import", "max_tokens": 3, "temperature": 0}\n')
    assert main(["batch", str(source), str(output), "--quiet", *FLAGS]) == 0
    said = capsys.readouterr().err
    assert "it/s" not in said and "%|" not in said and "1 lines are answered" in said


@pytest.mark.parametrize(
    ("read", "ready", "said"),
    [
        (0, [0.5, 0.5], "2 compiled in"),
        (2, [0.1, 0.1], "2 read in"),
        (1, [0.1, 0.5, 9.0], "1 compiled and 1 read in"),
    ],
)
def test_a_report_counts_what_was_compiled_and_what_was_read(read, ready, said):
    fields = {"warmup_seconds": 1.0, "programs_read": read, "programs_missing": 0, "compilations": 0}
    times = {str(i): t for i, t in enumerate(ready)}
    assert render_compilations(
        fields | {"compiled_at": times, "steps_beside_compiling_seconds": 0.0}
    ).startswith(said)


def test_batch_answers_and_knows_another_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"prompt": "import", "max_tokens": 3, "temperature": 0}\n{"prompt": "def", "temperature": 0}\n'
    )
    line = ["batch", str(source), str(output), "--max-tokens", "5", "--no-progress", "--quiet", *FLAGS]
    assert main(line) == 0
    answers = [json.loads(answer) for answer in output.read_text().splitlines()]
    assert [a["usage"]["completion_tokens"] for a in answers] == [3, 5]
    assert main(line) == 0
    assert "already complete" in capsys.readouterr().err
    assert main([*line, "--page-size", "32"]) == 1
    assert "--page-size: was 16, is 32" in capsys.readouterr().err


def test_other_weights_are_another_model(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    before = hash_folder(tmp_path)
    (tmp_path / "README.md").write_text("not part of it")
    assert hash_folder(tmp_path) == before
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 99 + b"\1")
    assert hash_folder(tmp_path) != before


@pytest.mark.parametrize("command", [["generate", "x"], ["batch", "in", "out"]])
def test_a_missing_model_is_one_sentence(command: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*command, "--model", "/nowhere"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("duetto: /nowhere")


@pytest.mark.parametrize("command", [["generate", "x"], ["batch", "in", "out"]])
@pytest.mark.parametrize(
    "flags, said",
    [
        (["--load-cache", "nowhere"], "load_cache: no saved cache in 'nowhere': No such file"),
        (["--load-cache", ""], "load_cache: no saved cache in ''"),
        (["--save-cache", "file"], "save_cache: 'file' is not allowed for pages: file is no folder"),
        (["--save-cache", ""], "save_cache: '' is not allowed for pages"),
    ],
)
def test_unusable_cache_folders_are_refused_before_the_model_loads(
    tmp_path, monkeypatch, capsys, command, flags, said
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    assert main([*command, "--model", "/nowhere", *flags]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line and os.listdir(".") == ["file"]


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch):
    def interrupted(args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan, "run", interrupted)
    assert main(["plan"]) == 130


def test_a_reader_who_leaves_is_no_error():
    code = (
        "import sys; from duetto.serve.cli import main as cli; from duetto.serve.cli import plan\n"
        "def talk(args):\n    while True: print('text ' * 1000, flush=True)\n"
        "plan.run = talk\n"
        "sys.exit(cli.main(['plan']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stderr
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_the_seed_of_a_batch_is_the_jobs():
    args = parse_command_line(["batch", "in", "out", "--seed", "3"])
    assert (args.seed, read_given_fields(EngineOptions, args, leave_out=("seed",))) == (3, {})


@pytest.mark.parametrize("command", [["generate", "def"], ["batch", "in", "out"]])
@pytest.mark.parametrize(
    "content, said", [("answers\n", "it exists and is no report"), (None, "the folder .* does not exist")]
)
def test_a_report_takes_no_other_files_place(tmp_path, capsys, command, content, said):
    place = tmp_path / "report.json" if content else tmp_path / "nowhere" / "report.json"
    if content:
        place.write_text(content)
    assert main([*command, "--report", str(place)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(said, line)
    assert content is None or place.read_text() == content


def test_a_report_may_take_an_earlier_ones_place(tmp_path):
    (file := tmp_path / "report.json").write_text("")
    check_report_path(file)
    file.write_text(json.dumps(dict.fromkeys(["ttft", "tpot", "e2e", "steps", "requests"], 0)))
    check_report_path(file)


@pytest.mark.parametrize(("level", "shown"), [("debug", True), ("info", False)])
def test_a_log_level_decides_which_lines_are_shown(monkeypatch, capsys, level: str, shown: bool):
    log = logging.getLogger("duetto")
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "propagate", True)
    before = log.level
    set_log_level(level)
    log.debug("duetto: request 1 waits")
    log.setLevel(before)
    assert re.fullmatch(r"[\d-]+ [\d:,]+ duetto: request 1 waits\n" * shown, capsys.readouterr().err)
