"""Batch jobs that were cut short: they go on with what their journal holds, and end with the same bytes."""

import os
import signal

import pytest
from fakes.batch import (
    LINES,
    FakeEngine,
    characters,
    journal_of,
    report_of,
)

from duetto.serve.host.files import write_atomically
from duetto.serve.jobs.batch import run as batch_module
from duetto.serve.jobs.batch.journal import Header, Journal


@pytest.mark.parametrize("steps", range(6))
def test_a_resumed_job_ends_with_the_same_bytes(run, capsys, steps):
    whole = run(LINES, name="whole").out.read_bytes()
    with pytest.raises(RuntimeError, match="the device is gone"):
        run(LINES, FakeEngine(die_after=steps), in_flight=4)
    again = run(LINES, in_flight=5)
    assert again.out.read_bytes() == whole
    assert len(again.engine.ran) == 12 - 2 * steps, "what was finished is not computed again"
    assert not journal_of(again.out).exists()


def test_a_journal_cut_anywhere_loses_only_what_was_torn(run):
    whole = run(LINES, name="whole").out.read_bytes()
    with pytest.raises(RuntimeError):
        run(LINES, FakeEngine(die_after=4), in_flight=4)
    out = run(LINES, name="whole").out.with_name("out.jsonl")
    content = journal_of(out).read_bytes()
    ends = [i + 1 for i, b in enumerate(content) if b == 10]
    cuts = {0, 1, 17, 40, *ends, *(e - 1 for e in ends), *(e - 9 for e in ends), *(e + 3 for e in ends[:-1])}
    for cut in sorted(cuts):
        journal_of(out).write_bytes(content[:cut])
        again = run(LINES)
        kept = content[:cut].count(b'"e2e"') - (content[:cut].rsplit(b"\n")[-1].count(b'"e2e"'))
        assert again.code == 0 and again.out.read_bytes() == whole, cut
        assert len(again.engine.ran) == 12 - kept, cut
        out.unlink()


@pytest.mark.parametrize("change", ["flip a bit", "zeros at the end", "garbage at the end"])
def test_undamaged_records_of_a_journal_are_used(run, change):
    whole = run(LINES, name="whole").out.read_bytes()
    with pytest.raises(RuntimeError):
        run(LINES, FakeEngine(die_after=4), in_flight=4)
    path = journal_of(run(LINES, name="whole").out.with_name("out.jsonl"))
    content = bytearray(path.read_bytes())
    third = [i for i, b in enumerate(content) if b == 10][3] + 20
    if change == "flip a bit":
        content[third] ^= 1
    path.write_bytes(bytes(content) + {"f": b"", "z": b"\0" * 99, "g": b"garbage\n"}[change[0]])
    again = run(LINES)
    assert again.out.read_bytes() == whole
    assert len(again.engine.ran) == (12 - 7 if change == "flip a bit" else 12 - 8)


def test_what_was_torn_is_cut_off(tmp_path):
    path, header = tmp_path / "j", Header({"model": "fake"}, "2026-01-01T00:00:00")
    with Journal(path, header) as journal:
        for i in range(3):
            journal.append(i, 10 + i, b"answer", {})
        journal.sync()
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\0" * 50)
    with Journal(path, Header({"model": "fake"}, "2027-02-02T00:00:00")) as journal:
        assert journal.num_answered == 2 and journal.header == header
        assert (journal.has_answer(1, 11), journal.has_answer(1, 10), journal.has_answer(2, 12)) == (
            True,
            False,
            False,
        )
        assert path.read_bytes() == b"".join(content.splitlines(keepends=True)[:3])
        journal.append(2, 12, b"answer", {})
        journal.sync()
    assert path.read_bytes() == content


def test_a_finished_job_is_not_run_again(run, capsys):
    first = run(LINES)
    before = first.out.stat().st_mtime_ns
    again = run(LINES)
    assert again.code == 0 and not again.engine.ran and "already complete" in capsys.readouterr().err
    assert again.out.stat().st_mtime_ns == before


def test_a_chat_templates_time_is_the_jobs_first_start(run, monkeypatch):
    """It is kept in whole seconds, so the template finds no microseconds."""
    engine, seen = FakeEngine(), []
    monkeypatch.setattr(
        engine,
        "add_request",
        lambda *a, **more: (seen.append(a[0]), FakeEngine.add_request(engine, *a, **more)),
    )
    assert run([{"messages": [{"role": "user", "content": "a"}]}], engine).code == 0
    assert characters().decode(seen[0]) == "[user]a000000"


@pytest.mark.parametrize("point", ["report", "journal"])
def test_a_kill_while_finishing_is_repaired(run, monkeypatch, point):
    def dying(path, *rest, **named):
        if path.name.endswith("report.json") == (point == "report"):
            raise KeyboardInterrupt
        write_atomically(path, *rest, **named)

    with monkeypatch.context() as patch:
        if point == "report":
            patch.setattr(batch_module, "write_atomically", dying)
        else:
            patch.setattr(Journal, "remove", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(LINES)
    out = run(LINES, name="whole").out.with_name("out.jsonl")
    assert out.exists() and journal_of(out).exists()
    again = run(LINES)
    assert again.code == 0 and not again.engine.ran and not journal_of(out).exists()
    assert (
        again.out.read_bytes() == out.with_name("whole").read_bytes()
        and report_of(out)["output"]["lines"] == 13
    )


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_job_keeps_its_answers_and_explains_resuming(run, capsys, signum, code):
    def interrupt(engine):
        if engine.steps == 3:
            os.kill(os.getpid(), signum)

    handlers = signal.getsignal(signum)
    result = run(LINES, FakeEngine(on_step=interrupt), in_flight=4)
    assert result.code == code and result.engine.closed and signal.getsignal(signum) == handlers
    said = capsys.readouterr().err
    assert "interrupted" in said and "lines are answered and kept in" in said and "same command again" in said
    again = run(LINES)
    assert again.code == 0 and len(again.engine.ran) == 12 - 6


def test_answers_of_products_that_were_tuned_otherwise_are_not_continued(run, capsys):
    """An accelerator's autotuning may choose other products elsewhere, whose sums have other bits."""
    with pytest.raises(RuntimeError):
        run(LINES, FakeEngine(die_after=2, products="one"), in_flight=4)
    refused = run(LINES, FakeEngine(products="another"))
    assert refused.code == 1
    said = capsys.readouterr().err
    assert "come of products one, this engine's are another" in said and "4 of 13 lines" in said
    again = run(LINES, FakeEngine(products="one"))
    assert again.code == 0 and len(again.engine.ran) == 8
    assert {line.get("products") for line in report_of(again.out)["requests"]} == {
        "one",
        None,
    }  # and the error
