"""The real batch command, killed again and again: nothing is lost, nothing is computed twice, the bytes are
the same."""

import json
import random
import signal
import time
from pathlib import Path

import pytest
from cases.requests import FLAGS
from fakes.processes import Forked, command, script
from suite.marks import full
from suite.strict import STRICT

from duetto.serve.jobs.batch.journal import decode_journal_record

LINES = 160


def source_in(folder: Path, lines: int = LINES) -> Path:
    """An input of lines of both formats, greedy and sampled, short and long, some of them wrong."""
    path = folder / "in.jsonl"
    prompts = ["def read(path):\n", "class Stack:\n", "import os\n", "for name in ", "    return ", "try:\n"]
    with open(path, "w") as file:
        for i in range(lines):
            fields = {"prompt": prompts[i % 6], "max_tokens": 4 + 7 * i % 40, "temperature": i % 3 * 0.5}
            if i % 5 == 0:
                fields = {"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions", "body": fields}
            file.write(json.dumps(fields) + "\n" if i % 17 else "not JSON\n")
    return path


def arguments(source: Path, out: Path) -> list[str]:
    return ["batch", str(source), str(out), "--quiet", *FLAGS]


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def killed(process: Forked, journal: Path, chance: random.Random) -> bool:
    """Kills a job at a random point, mostly while it answers; False if it was done before."""
    goal = size(journal) + chance.choice([0, 1, 1, 1000, 4000, 8000])
    while process.poll() is None and size(journal) < goal:
        time.sleep(0.001)
    time.sleep(chance.uniform(0, 0.02 if goal > size(journal) else 1.5) if chance.random() < 0.7 else 0)
    process.kill()
    return process.wait() == -signal.SIGKILL


def answered(journal: Path) -> list[int]:
    """The indices of the lines that a journal has answers of."""
    if not journal.exists():
        return []
    records = [decode_journal_record(line) for line in journal.read_bytes().splitlines(keepends=True)[1:]]
    return [record[0]["index"] for record in records if record is not None]


@pytest.mark.parametrize(("times", "lines"), [(3, 60), full(20, LINES)], ids=["3", "20"])
def test_a_repeatedly_killed_job_ends_with_the_same_bytes(tmp_path, times, lines):
    source = source_in(tmp_path, lines)
    whole, out = source.with_name("whole.jsonl"), source.with_name("out.jsonl")
    journal, report = (out.with_name(out.name + end) for end in (".journal", ".report.json"))
    assert Forked(command, *arguments(source, whole), heard=[], more=STRICT).wait() == 0
    expected = whole.read_bytes()
    assert expected.count(b"\n") == lines

    chance, kills, before = random.Random(7), 0, set()
    while kills < times:
        process = Forked(command, *arguments(source, out), heard=[], more=STRICT)
        if killed(process, journal, chance):
            kills += 1
            found = answered(journal)
            assert len(found) == len(set(found)), "a finished line was computed again"
            assert before <= set(found) or not journal.exists(), "a finished line was lost"
            before = set(found)
            assert not out.exists() or out.read_bytes() == expected
        else:
            assert process.poll() == 0 and out.read_bytes() == expected and not journal.exists()
            before = set()
            out.unlink()
            report.unlink()
    assert Forked(command, *arguments(source, out), heard=[], more=STRICT).wait() == 0
    assert out.read_bytes() == expected and not journal.exists()
    assert json.loads(report.read_bytes())["output"]["lines"] == lines


INTERRUPTED = """
import os, sys
from duetto.serve.jobs.batch.journal import Journal
from duetto.serve.cli.main import main
append, sync, appended = Journal.append, Journal.sync, []

def counted(*arguments):
    append(*arguments)
    appended.append(1)

def interrupted(journal):
    sync(journal)
    if len(appended) >= 20:
        appended.clear()
        os.kill(os.getpid(), int(signum))

Journal.append, Journal.sync, signum = counted, interrupted, sys.argv.pop(1)
raise SystemExit(main())
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), full(signal.SIGTERM, 143)])
def test_an_interrupted_command_says_so_by_its_exit_code(tmp_path, signum, code):
    source = source_in(tmp_path)
    out = source.with_name("out.jsonl")
    journal = out.with_name(out.name + ".journal")
    (program := source.with_name("program.py")).write_text(INTERRUPTED)
    process = Forked(script, str(program), str(int(signum)), *arguments(source, out), heard=[], more=STRICT)
    assert process.wait() == code and 20 <= len(answered(journal)) < LINES and not out.exists()
