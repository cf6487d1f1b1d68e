"""An append-only log: whole lines or none, one writer at a time."""

import os
from pathlib import Path

import pytest

from duetto.serve.host.append_log import AppendLog
from duetto.serve.host.files import JobError


def test_a_failed_append_leaves_the_log_unchanged(tmp_path: Path, monkeypatch):
    log, write = AppendLog(tmp_path / "log"), os.write
    log.append(b"first\n")
    with monkeypatch.context() as patched:
        patched.setattr(
            os, "write", lambda to, data: write(to, data[:3]) if len(data) > 3 else write(-1, data)
        )
        with pytest.raises(OSError, match="Bad file descriptor"):
            log.append(b"second\n", durable=True)
    assert (tmp_path / "log").read_bytes() == b"first\n"
    log.append(b"third\n")
    with log.open_reader() as file:
        assert list(file) == [b"first\n", b"third\n"]
    log.close()


def test_one_process_has_a_log_and_removes_no_other_file(tmp_path: Path):
    log = AppendLog(tmp_path / "log")
    with pytest.raises(JobError, match="another process"):
        AppendLog(tmp_path / "log")
    (tmp_path / "log").rename(tmp_path / "moved")
    (tmp_path / "log").write_text("another")
    log.remove()
    assert (tmp_path / "log").read_text() == "another"
    log.close()
