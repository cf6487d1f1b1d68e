"""Batches between pipes: standard input and output, answers that wait for their turn, and progress."""

import io
import json
import os
import threading
from types import SimpleNamespace

import pytest
from fakes.batch import (
    LINES,
    MODEL,
    FakeEngine,
)

from duetto.serve.jobs.batch.job import BatchOptions, OrderedStream
from duetto.serve.jobs.batch.run import run_batch


def test_standard_input_and_output(run, capfd, monkeypatch, tmp_path):
    whole = run(LINES, name="whole").out.read_bytes()
    content = (tmp_path / "in.jsonl").read_bytes()
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    capfd.readouterr()
    seen = []
    code = run_batch(
        FakeEngine, "-", "-", BatchOptions(progress=False, in_flight=3), MODEL, on_report=seen.append
    )
    assert code == 0 and capfd.readouterr().out.encode() == whole and seen[0]["steps"] > 0


def test_a_pipe_as_input(tmp_path, run):
    whole = run(LINES, name="whole").out.read_bytes()
    pipe, content = tmp_path / "pipe", (tmp_path / "in.jsonl").read_bytes()
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()
    out = tmp_path / "out"
    assert run_batch(FakeEngine, str(pipe), str(out), BatchOptions(progress=False), MODEL) == 0
    writer.join()
    assert out.read_bytes() == whole


def test_early_answers_wait_for_their_turn(tmp_path):
    with open(tmp_path / "out", "wb") as file:
        stream = OrderedStream(file.fileno())
        for index in (2, 1):
            stream.append(index, 0, b"%d" % index, {})
        stream.sync()
        assert (tmp_path / "out").read_bytes() == b""
        stream.append(0, 0, b"0", {})
        stream.sync()
    assert (tmp_path / "out").read_bytes() == b"0\n1\n2\n"


def test_a_closed_output_pipe_raises_for_the_command():
    read, write = os.pipe()
    os.close(read)
    stream = OrderedStream(write)
    stream.append(0, 0, b"x", {})
    with pytest.raises(BrokenPipeError):
        stream.sync()
    os.close(write)


def test_progress_is_shown_on_standard_error(tmp_path, capsys):
    (tmp_path / "in").write_text(json.dumps(LINES[0]))
    assert run_batch(FakeEngine, str(tmp_path / "in"), str(tmp_path / "out"), BatchOptions(), MODEL) == 0
    said = capsys.readouterr()
    assert "1/1" in said.err and "tokens/s" in said.err and said.out == ""
