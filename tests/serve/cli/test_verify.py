"""`duetto verify`: an audit log proved from a terminal."""

import json
from pathlib import Path
from typing import Any

import pytest
from cases.requests import SIZES, SMALLEST

from duetto import LLM, SamplingParams
from duetto.serve.cli.main import main
from duetto.serve.engine.startup.model_folder import DEMO_FOLDER
from duetto.serve.llm.audit.facts import REPLAY_OPTIONS


@pytest.mark.usefixtures("few_shapes")
def test_a_log_is_proved_or_what_was_altered_is_told(tmp_path, capsys):
    log = tmp_path / "log"
    with LLM(SMALLEST, audit_log=str(log), **SIZES) as llm:
        params = [SamplingParams(seed=i, max_tokens=8, logprobs=1) for i in range(3)]
        llm.generate(["def add(a, b):", "import ", "class A"], params, use_tqdm=False)
    assert main(["verify", str(log), "--model", SMALLEST, "--quiet"]) == 0
    assert "3 of 3 requests have the same bits again" in capsys.readouterr().out
    lines = log.read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"seed":', b'"seed":1')
    log.write_bytes(b"".join(lines))
    assert main(["verify", str(log), "--model", SMALLEST, "--quiet", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["proved"] == 2 and [one["line"] for one in found["altered"]] == [3] and found["broken"]


@pytest.mark.parametrize("content", [None, b"", b"a line\n"])
def test_what_is_no_log_is_said_in_a_sentence(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "log").write_bytes(content)
    assert main(["verify", str(tmp_path / "log")]) != 0
    told = capsys.readouterr()
    assert "Traceback" not in told.err + told.out and (told.err + told.out).strip()


FACTS = {"dtype": "float32"}


def forged(path: Path, **start: Any) -> str:
    """A log of one line with other fields in it than a server writes."""
    own = {
        "prev": "0" * 64,
        "kind": "start",
        "cut_off": 0,
        "model": str(DEMO_FOLDER),
        "options": {},
        "facts": FACTS,
    }
    own |= {"tokenizer": None, "outside_contract": [], "weights": None}
    path.write_text(json.dumps(own | start) + "\n")
    return str(path)


@pytest.mark.parametrize(
    "name, value",
    [
        ("audit_log", "made"),
        ("kv_disk_path", "made"),
        ("kv_disk_space", 1.0),
        ("kv_role", "prefill"),
        ("kv_address", "0.0.0.0:1"),
        ("cluster_key_file", "made"),
        ("compilation_cache", "made"),
        ("speculative_config", {"method": "draft_model", "model": "org/name"}),
        ("tokenizer", "org/name"),
        ("download_dir", "made"),
        ("profiler_config", {"torch_profiler_dir": "made"}),
        ("nnodes", 2),
        ("block_size", 64),
    ],
)
def test_an_option_that_no_log_has_is_refused(tmp_path, capsys, monkeypatch, name, value):
    """And no engine is started, no file made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("duetto.serve.llm.llm.LLM.__init__", None)
    log = forged(tmp_path / "log", options={name: value})
    assert main(["verify", log, "--quiet"]) == 1
    assert (
        f"altered: line 1: it is no line of a log: options: {name!r} is not allowed"
        in capsys.readouterr().out
    )
    assert [file.name for file in tmp_path.iterdir()] == ["log"]


@pytest.mark.parametrize("model", ["org/name", "/somewhere/else", "", "\x1b[2Jorg", None])
def test_a_model_is_only_taken_from_the_command_line(tmp_path, capsys, monkeypatch, model):
    monkeypatch.setattr("duetto.serve.llm.llm.LLM.__init__", None)
    assert main(["verify", forged(tmp_path / "log", model=model), "--quiet"]) == 2
    told = capsys.readouterr()
    assert "give it with --model" in told.err and "\x1b" not in told.out + told.err


def test_adapters_are_only_taken_from_the_command_line(tmp_path, monkeypatch):
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "duetto.serve.llm.llm.LLM.__init__", lambda _, **options: given.update(options) or 1 / 0
    )
    options = {"enable_lora": True, "lora_modules": ["a=/somewhere"], "max_num_seqs": 4}
    with pytest.raises(ZeroDivisionError):
        main(["verify", forged(tmp_path / "log", options=options), "--quiet"])
    assert given["max_num_seqs"] == 4 and given["enable_lora"] and given["lora_modules"] is None
    with pytest.raises(ZeroDivisionError):
        main(["verify", forged(tmp_path / "log", options=options), "--quiet", "--lora-modules", "a=/mine"])
    assert given["lora_modules"] == ["a=/mine"] and given["model"] is None


@pytest.mark.parametrize("options", [{"max_model_len": []}, {"max_num_seqs": -1}, {"kv_cache_dtype": "x"}])
def test_values_that_no_engine_has_are_said_in_a_sentence(tmp_path, capsys, options):
    assert main(["verify", forged(tmp_path / "log", options=options), "--quiet"]) == 2
    told = capsys.readouterr().err
    assert "no engine can be started as in the log" in told and next(iter(options)) in told


def test_unknown_dtypes_are_refused_in_a_sentence(tmp_path, capsys):
    assert main(["verify", forged(tmp_path / "log", facts={"dtype": "complex64"}), "--quiet"]) == 2
    assert "dtype 'complex64' is not allowed" in capsys.readouterr().err


def test_control_characters_of_a_log_are_escaped(tmp_path, capsys):
    log = tmp_path / "log"
    first = forged(log, kind="\x1b[2J\u202e")
    assert main(["verify", first, "--quiet"]) == 1
    told = capsys.readouterr()
    assert "\\x1b[2J" in told.out and not {"\x1b", "\u202e"} & set(told.out + told.err)


def test_options_of_a_log_name_no_path():
    """Nothing that the writer writes, adapters aside, is a file, a folder or an address."""
    places = {"path", "dir", "file", "address", "addr", "port", "log", "modules", "role", "config"}
    assert {name for name in REPLAY_OPTIONS if places & set(name.split("_"))} == {"lora_modules"}
