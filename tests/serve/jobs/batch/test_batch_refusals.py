"""Jobs, inputs and outputs that a batch refuses in a sentence, before it touches them."""

import errno
import json
import os
import resource
from pathlib import Path

import pytest
from fakes.batch import (
    LINES,
    MODEL,
    FakeEngine,
    journal_of,
)

from duetto.serve.jobs.batch.job import BatchOptions
from duetto.serve.jobs.batch.journal import Header, Journal
from duetto.serve.jobs.batch.run import run_batch


def refused(result, capsys) -> str:
    assert result.code == 1 and not result.engine.ran
    return capsys.readouterr().err


def test_another_jobs_journal_is_refused_field_by_field(run, capsys):
    with pytest.raises(RuntimeError):
        run(LINES, FakeEngine(die_after=1))
    capsys.readouterr()
    said = refused(run(LINES, model={"model": "real", "max_model_len": "64", "dtype": "f32"}, seed=3), capsys)
    for difference in ("  model: was fake, is real", "  dtype: was not set, is f32", "  seed: was 0, is 3"):
        assert difference in said
    assert "max_model_len" not in said and "holds answers of another job" in said
    said = refused(run(LINES[:-1]), capsys)
    assert "  input: was " in said and said.count("was") == 1
    assert run(LINES).code == 0


def test_a_flag_that_the_journals_version_lacks_has_its_default(run, capsys):
    """So has one in the report of a finished job."""
    plain, coded = ({**MODEL, "--activations": scheme} for scheme in ("None", "int8"))
    with pytest.raises(RuntimeError):
        run(LINES, FakeEngine(die_after=1))
    capsys.readouterr()
    assert "\n  --activations: was None, is int8\n" in refused(run(LINES, model=coded), capsys)
    assert run(LINES, model=plain).code == 0
    assert run(LINES).code == 0 and "already complete" in capsys.readouterr().err
    assert "\n  --activations: was None, is int8\n" in refused(run(LINES, model=coded), capsys)


def test_a_journal_without_answers_is_no_hindrance(run):
    with pytest.raises(RuntimeError):
        run(LINES[:3], FakeEngine(die_after=0))
    assert run(LINES[:3], model={"model": "real"}).code == 0


def test_another_jobs_output_is_refused_and_left_alone(run, capsys):
    out = run(LINES).out
    before = out.read_bytes()
    capsys.readouterr()
    said = refused(run(LINES, model={**MODEL, "model": "real"}), capsys)
    assert "is the result of another job" in said and "  model: was fake, is real" in said
    out.write_bytes(before + b"mine\n")
    assert "was changed since it was finished" in refused(run(LINES), capsys)
    assert out.read_bytes() == before + b"mine\n" and not journal_of(out).exists()
    out.unlink()
    assert run(LINES, model={**MODEL, "model": "real"}).code == 0


def test_foreign_files_are_refused_and_empty_ones_are_used(run, capsys, tmp_path):
    (tmp_path / "out.jsonl").write_text("precious")
    assert "exists and is not a result of this command" in refused(run(LINES), capsys)
    assert (tmp_path / "out.jsonl").read_text() == "precious"
    (tmp_path / "out.jsonl").write_text("")
    assert run(LINES).code == 0
    (tmp_path / "o2.journal").write_text("precious")
    assert "exists and is not a journal" in refused(run(LINES, name="o2"), capsys)
    assert (tmp_path / "o2.journal").read_text() == "precious"


def test_an_output_that_appears_meanwhile_is_not_replaced(run, capsys, tmp_path):
    out = tmp_path / "out.jsonl"
    result = run(LINES, FakeEngine(on_step=lambda engine: out.write_text("precious")))
    said = capsys.readouterr().err
    assert (
        result.code == 1 and out.read_text() == "precious" and "13 of 13 lines are answered and kept" in said
    )
    out.unlink()
    assert run(LINES, FakeEngine(die_after=0)).code == 0


@pytest.mark.parametrize("name", ["no/such/folder/out", "folder", "/dev/null"])
def test_places_that_cannot_be_written_are_refused_in_a_sentence(run, capsys, tmp_path, name):
    (tmp_path / "folder").mkdir()
    said = refused(run(LINES, name=name), capsys)
    assert said.count("\n") == 1 and name.split("/")[-1].removesuffix("out") in said
    assert Path("/dev/null").is_char_device()


def test_a_missing_input_is_refused_in_a_sentence(capsys, tmp_path):
    for name in (tmp_path / "none", tmp_path):
        code = run_batch(FakeEngine, str(name), str(tmp_path / "out"), BatchOptions(progress=False), MODEL)
        assert code == 1 and f"duetto batch: {name}: " in capsys.readouterr().err


def test_wrong_defaults_are_refused(run, capsys):
    assert "top_p=3.0 is not allowed" in refused(run(LINES, sampling={"top_p": 3.0}), capsys)


def test_a_model_that_cannot_be_loaded_costs_nothing(tmp_path, run, capsys):
    def missing():
        raise ValueError("config.json is not there")

    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps(LINES[0]))
    code = run_batch(missing, str(source), str(tmp_path / "out.jsonl"), BatchOptions(progress=False), MODEL)
    said = capsys.readouterr().err
    assert (
        code == 1
        and "the model cannot be loaded: config.json is not there" in said
        and "Traceback" not in said
    )
    assert run(LINES[:1]).code == 0


def test_the_second_process_on_an_output_is_refused(run, capsys, tmp_path):
    with Journal(tmp_path / "out.jsonl.journal", Header({}, "2026-01-01T00:00:00")):
        assert "another process is working on" in refused(run(LINES), capsys)
    assert run(LINES).code == 0


def test_an_input_that_changes_is_noticed(run, capsys, tmp_path):
    def change(engine):
        with open(tmp_path / "in.jsonl", "r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"X")

    lines = [{"prompt": f"p{i}", "id": f"{i:020}"} for i in range(500)]
    result = run(lines, FakeEngine(on_step=change), in_flight=2)
    assert result.code == 1 and "the input was changed while the job ran" in capsys.readouterr().err
    assert not result.out.exists()
    again = run(lines)
    assert again.code == 0 and [a["id"] for a in again.answers] == [x["id"] for x in lines]


def test_lines_added_while_the_job_runs_belong_to_the_next(run, tmp_path):
    def add(engine):
        with open(tmp_path / "in.jsonl", "ab") as file:
            file.write(b'{"prompt": "late"}\n')

    assert len(run(LINES, FakeEngine(on_step=add), in_flight=2).answers) == len(LINES)


def test_a_full_disk_is_one_sentence_and_loses_nothing(run, capsys, tmp_path):
    whole = run(LINES, name="whole").out.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2500, hard))
        result = run(LINES)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capsys.readouterr().err
    assert result.code == 1 and os.strerror(errno.EFBIG) in said and "run the same command again" in said
    assert journal_of(result.out).read_bytes().endswith(b"\n"), "no torn record stays behind"
    again = run(LINES)
    assert again.out.read_bytes() == whole and 0 < len(again.engine.ran) < 12
