"""The files beside a batch's output: what is not ours stays as it is, under whatever name, and keeps to
itself who may read."""

import json
import os
import stat
from pathlib import Path

import pytest
from fakes.batch import LINES, MODEL, FakeEngine, journal_of, report_of, runner

from duetto.serve.jobs.batch.job import BatchOptions
from duetto.serve.jobs.batch.run import run_batch


@pytest.fixture
def run(tmp_path):
    return runner(tmp_path)


def batch(source: Path | str, output: Path | str, **named) -> int:
    return run_batch(FakeEngine, str(source), str(output), BatchOptions(progress=False), MODEL, **named)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_cache_that_cannot_be_saved_costs_no_answer(run, capsys, monkeypatch):
    """The device is full by then: the answers are kept, and the same command makes the output of them."""

    def full(self, path):
        raise OSError(28, "No space left on device", path)

    monkeypatch.setattr(FakeEngine, "save_cache", full, raising=False)
    assert run(LINES, save_cache="pages").code == 1
    said = capsys.readouterr().err
    assert "pages: No space left on device" in said and "run the same command again" in said
    assert len(run(LINES, save_cache="pages").answers) == len(LINES)


# ---------------------------------------------------------------- what is not ours


def test_a_file_called_partial_stays_as_it_is(run, tmp_path):
    for name in ("out.jsonl.partial", "out.jsonl.report.json.partial"):
        (tmp_path / name).write_text("precious")
    assert run(LINES).code == 0
    for name in ("out.jsonl.partial", "out.jsonl.report.json.partial"):
        assert (tmp_path / name).read_text() == "precious"


def test_an_input_called_partial_survives_its_own_job(tmp_path):
    source = tmp_path / "o.partial"
    source.write_text(json.dumps({"prompt": "a"}) + "\n")
    before = source.read_bytes()
    assert batch(source, tmp_path / "o") == 0
    assert source.read_bytes() == before and b"text" in (tmp_path / "o").read_bytes()


def test_links_at_the_names_of_temporary_files_are_not_followed(run, tmp_path):
    (tmp_path / "victim").write_text("precious")
    for name in ("out.jsonl.partial", "out.jsonl.report.json.partial"):
        (tmp_path / name).symlink_to("victim")
    assert run(LINES).code == 0
    assert (tmp_path / "victim").read_text() == "precious"
    assert (tmp_path / "out.jsonl").is_file() and not (tmp_path / "out.jsonl").is_symlink()


@pytest.mark.parametrize("target", ["victim", "nowhere"])
def test_a_link_at_the_journals_name_is_refused(run, tmp_path, capsys, target):
    (tmp_path / "victim").write_text("")
    journal_of(tmp_path / "out.jsonl").symlink_to(target)
    assert run(LINES).code == 1 and "is a link" in capsys.readouterr().err
    assert (tmp_path / "victim").read_text() == "" and not (tmp_path / "nowhere").exists()


def test_a_pipe_at_the_journals_name_is_refused(run, tmp_path, capsys):
    os.mkfifo(journal_of(tmp_path / "out.jsonl"))
    assert run(LINES).code == 1 and "exists and is not a file" in capsys.readouterr().err


FOREIGN = {
    "text": "precious",
    "JSON": '{"fingerprint": {}, "results": [1, 2]}',
    "JSON that is nearly ours": '{"fingerprint": {"a": 1}, "output": {"sha256": 3}}',
    "JSON without end": "[" * 100_000,
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_report_is_refused_before_anything_runs(run, tmp_path, capsys, content):
    report = tmp_path / "out.jsonl.report.json"
    report.write_text(content)
    result = run(LINES)
    assert result.code == 1 and not result.engine.ran and report.read_text() == content
    assert "exists and is not a report of this command" in capsys.readouterr().err
    assert names(tmp_path) == {"in.jsonl", "out.jsonl.report.json"}
    report.unlink()
    assert run(LINES).code == 0


def test_a_report_that_appears_during_the_job_stays(run, tmp_path, capsys):
    report = tmp_path / "out.jsonl.report.json"
    result = run(LINES, FakeEngine(on_step=lambda engine: report.write_text("precious")))
    assert result.code == 1 and report.read_text() == "precious"
    assert "not a report of this command" in capsys.readouterr().err
    report.unlink()
    again = run(LINES)
    assert again.code == 0 and not again.engine.ran, "no answer is lost by it"
    assert report_of(again.out)["output"]["lines"] == len(LINES)


def test_a_link_at_the_reports_name_is_refused(run, tmp_path, capsys):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "out.jsonl.report.json").symlink_to("victim")
    assert run(LINES).code == 1 and "not a report" in capsys.readouterr().err
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_file_that_replaced_the_journal_stays(run, tmp_path):
    """The job goes on with the file that it has open, and finishes from it."""
    journal = journal_of(tmp_path / "out.jsonl")

    def replace(engine):
        if engine.steps == 2:
            journal.rename(tmp_path / "moved")
            journal.write_text("precious")

    result = run(LINES, FakeEngine(on_step=replace))
    assert result.code == 0 and len(result.answers) == len(LINES)
    assert journal.read_text() == "precious"


# ---------------------------------------------------------------- nothing is both read and written


@pytest.mark.parametrize("name", ["out", "out.journal", "out.report.json"])
@pytest.mark.parametrize("how", ["name", "hard link", "link"])
def test_the_input_may_be_no_file_of_the_job(tmp_path, capsys, name, how):
    source, target = tmp_path / "in", tmp_path / name
    source.write_text(json.dumps({"prompt": "a"}) + "\n")
    if how == "name":
        source = source.rename(target)
    elif how == "hard link":
        target.hardlink_to(source)
    else:
        target.symlink_to("in")
    before = source.read_bytes()
    assert batch(source, tmp_path / "out") == 1
    assert "they must be two files" in capsys.readouterr().err
    assert source.read_bytes() == before


def test_an_empty_input_is_not_its_own_output(tmp_path, capsys):
    (tmp_path / "x").touch()
    assert (
        batch(tmp_path / "x", tmp_path / "x") == 1
        and "is the input and the output" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "what"), [("in", "the input"), ("out", "the output"), ("out.journal", "journal")]
)
def test_the_closing_report_is_a_file_of_its_own(tmp_path, capsys, name, what):
    (tmp_path / "in").write_text(json.dumps({"prompt": "a"}) + "\n")
    code = batch(tmp_path / "in", tmp_path / "out", report_file=str(tmp_path / name))
    assert code == 1 and what in capsys.readouterr().err and names(tmp_path) == {"in"}


@pytest.mark.parametrize("name", ["in/out", "x" * 250, "x" * 245])
def test_an_invalid_path_is_one_sentence(tmp_path, capsys, name):
    """Also where only the longer names beside it are too long: at once, not after the work."""
    (tmp_path / "in").write_text(json.dumps({"prompt": "a"}) + "\n")
    assert batch(tmp_path / "in", tmp_path / name) == 1
    assert capsys.readouterr().err.count("\n") == 1 and names(tmp_path) == {"in"}


# ---------------------------------------------------------------- leftovers, and who may read


def test_temporary_files_of_a_killed_job_are_removed(run, tmp_path, monkeypatch):
    """A kill between writing and renaming: the name is the job's own, so the next run knows whose it is."""

    def killed(*_: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
        with pytest.raises(SystemExit):
            run(LINES)
    (left,) = names(tmp_path) - {"in.jsonl", "out.jsonl.journal"}
    (tmp_path / left).chmod(0o400)
    assert run(LINES).code == 0
    assert names(tmp_path) == {"in.jsonl", "out.jsonl", "out.jsonl.report.json"}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_an_output_keeps_its_mode_and_the_journal_shares_it(run, tmp_path):
    out, seen = tmp_path / "out.jsonl", []
    out.touch()
    out.chmod(0o600)
    run(LINES, FakeEngine(on_step=lambda engine: seen.append(mode(journal_of(out)))))
    assert out.stat().st_size and mode(out) == mode(out.with_name("out.jsonl.report.json")) == 0o600
    assert set(seen) == {0o600}


def test_a_new_output_has_the_mode_of_the_umask(run):
    before = os.umask(0o027)
    try:
        out = run(LINES).out
    finally:
        os.umask(before)
    assert mode(out) == 0o640


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_an_output_keeps_its_owner(run, tmp_path):
    out = tmp_path / "out.jsonl"
    out.touch()
    os.chown(out, 1234, 2345)
    assert run(LINES).code == 0 and (out.stat().st_uid, out.stat().st_gid) == (1234, 2345)


def test_the_journal_of_a_new_output_is_the_users_alone(run, tmp_path):
    """Answers are in it, and no user asked for the file; the output is as the user's umask says."""
    seen, out = [], tmp_path / "out.jsonl"
    before = os.umask(0o022)
    try:
        run(LINES, FakeEngine(on_step=lambda engine: seen.append(mode(journal_of(out)))))
    finally:
        os.umask(before)
    assert set(seen) == {0o600} and mode(out) == 0o644
